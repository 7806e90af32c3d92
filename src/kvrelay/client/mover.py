"""Copying and checksumming many blocks: `kvrelay.transport.copying` in the terms of the client's core."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvrelay.transport import copying

if TYPE_CHECKING:
    from array import array
    from collections.abc import Sequence

    from kvrelay.client.core.blocks import Blocks


def _side(blocks: Blocks) -> tuple[memoryview | Sequence[memoryview], array[int] | None, array[int] | None]:
    """Buffer or buffers, offsets and sizes."""
    if blocks.source is None:
        return blocks.sources, None, None
    return blocks.source, blocks.offsets, blocks.sizes


class BatchMover:
    """A `Mover` that does a batch in one call, natively where that was built."""

    def copy_in(self, blocks: Blocks, arena: memoryview, offsets: bytes) -> bytes:
        """Copy every block to its offset; the checksums of what was copied."""
        return copying.copy_sums(arena, offsets, *_side(blocks))

    def copy_out(self, arena: memoryview, offsets: bytes, blocks: Blocks, sums: bytes) -> int:
        """Copy every block from its offset; the first whose copy does not match its checksum, else -1."""
        target, places, sizes = _side(blocks)
        bad = copying.copy_verify(target, places, arena, offsets, sizes, sums)
        return -1 if bad is None else bad

    def sums(self, blocks: Blocks) -> bytes:
        """Checksums of the blocks."""
        return copying.sums(*_side(blocks))

    def check(self, blocks: Blocks, sums: bytes) -> int:
        """The first block that does not match its checksum, else -1."""
        bad = copying.verify(*_side(blocks), sums)
        return -1 if bad is None else bad
