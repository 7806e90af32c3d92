"""The way to an arena that is mapped here: one copy each way."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from kvrelay.errors import ProtocolError

if TYPE_CHECKING:
    from kvrelay.client.core.blocks import Blocks, Mover
    from kvrelay.client.core.steps import Operation


class MappedArena:
    """A `Direct` over shared memory."""

    def __init__(self, arena: memoryview, mover: Mover) -> None:
        self._arena = arena
        self._mover = mover

    def write(self, blocks: Blocks, offsets: bytes) -> Operation[bytes]:
        """Copy blocks into the arena; the checksums of what was copied."""
        check_places(blocks, offsets, self._arena.nbytes)
        yield from ()  # an operation that never has to wait
        return self._mover.copy_in(blocks, self._arena, offsets)

    def read(self, offsets: bytes, blocks: Blocks, sums: bytes) -> Operation[int]:
        """Copy blocks out of the arena; the first that does not match its checksum, else -1."""
        check_places(blocks, offsets, self._arena.nbytes)
        yield from ()
        return self._mover.copy_out(self._arena, offsets, blocks, sums)


def check_places(blocks: Blocks, offsets: bytes, arena_bytes: int) -> None:
    """Refuse places that are not within the arena.

    Raises:
        ProtocolError: the pool named one.
    """
    column = array("Q")
    column.frombytes(offsets)
    if len(column) != len(blocks):
        raise ProtocolError(f"the pool named {len(column)} places for {len(blocks)} objects")
    if column and max(column) + max(blocks.sizes) > arena_bytes:
        for place, size in zip(column, blocks.sizes, strict=True):
            if place + size > arena_bytes:
                raise ProtocolError(f"{size} bytes at {place} are not within the arena's {arena_bytes}")
