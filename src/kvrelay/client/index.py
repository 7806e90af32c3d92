"""Looking keys up in the index that a pool of this host keeps in shared memory: no message, no waiting.

Every method may answer None: the index does not say, ask the pool. It does not when the connection has ended, an object
is about to expire, the pool keeps it no more, there are lower tiers to be asked, or a key is none: the pool says why.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Self

from kvrelay.client.core.names import PrefixCount
from kvrelay.native import native
from kvrelay.transport.index import clock, mapped

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvrelay.wire import messages as m

can_look = native is not None
"""Whether this client can read an index: the native module does."""


class SharedIndex:
    """A tenant's index, mapped: ``table`` to be read, ``marks`` to be written. Any thread may ask."""

    def __init__(self, table: memoryview, marks: memoryview, *, tiered: bool) -> None:
        self._table = table
        self._marks = marks
        self._tiered = tiered

    @classmethod
    def attach(cls, descriptors: Sequence[int], reply: m.IndexMapped) -> Self | None:
        """Map what a pool sent; None: it cannot be used here. The descriptors are taken over."""
        try:
            table, marks = descriptors
            sizes = os.fstat(table).st_size, os.fstat(marks).st_size
            if sizes != (reply.table_bytes, reply.marks_bytes) or not can_look or reply.clock != clock():
                return None
            return cls(
                mapped(table, sizes[0], writable=False),
                mapped(marks, sizes[1], writable=True),
                tiered=reply.tiered,
            )
        except (OSError, ValueError):
            return None
        finally:
            for fd in descriptors:
                os.close(fd)

    def count_prefix(self, descriptor: int, keys: Sequence[bytes]) -> PrefixCount | None:
        """How long the prefix of ``keys`` is that is there. ``descriptor``: of the connection to the pool."""
        assert native is not None
        found = native.index_count(self._table, self._marks, descriptor, keys, self._tiered)
        return None if found is None else PrefixCount(found[0], found[1], found[0])

    def exists(self, descriptor: int, keys: Sequence[bytes]) -> list[bool] | None:
        """Which keys are sealed."""
        assert native is not None
        flags: list[bool] | None = native.index_exists(self._table, self._marks, descriptor, keys)
        return flags
