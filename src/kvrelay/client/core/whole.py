"""Whole objects, many at once, over the bulk messages of `kvrelay.wire.bulk`.

A call is cut into batches, and a few batches are under way at once: the pool finds room for, or looks up, the next
ones while this client copies. What a key costs here is a place in a list and eight bytes in a few columns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvrelay.client.core.gets import Getting
from kvrelay.client.core.puts import Putting

if TYPE_CHECKING:
    from kvrelay.client.core.blocks import Mover
    from kvrelay.client.core.segments import Segments


class Whole(Putting, Getting):
    """Puts and gets of one connection, over frames until ``direct`` is set."""

    def __init__(self, mover: Mover, segments: Segments) -> None:
        self.direct = None
        self._mover = mover
        self._segments = segments
        self._guess = 1
