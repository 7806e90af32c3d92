"""How a client of the pool's host comes by the index of its tenant's objects, to look keys up without asking."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from kvrelay.wire import limits
from kvrelay.wire.base import Count, Reply, Request


class MapIndex(Request, frozen=True):
    """Ask for the index of the tenant's objects; two descriptors come as ancillary data with `IndexMapped`.

    For whom `Welcome` says so: over the UNIX socket, tenants trusted with shared memory.
    """


class IndexMapped(Reply, frozen=True):
    """Accompanies the descriptors of the table, for reading only, and of the marks (`kvrelay.transport.index`)."""

    table_bytes: Count
    marks_bytes: Count
    clock: Annotated[str, Meta(max_length=limits.MAX_NAME_CHARS)]
    """Which clock the index tells times of: a client that sees another cannot use it."""
    tiered: bool
    """Whether there are lower tiers: what is not in the index may be there."""
