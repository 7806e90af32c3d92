"""What a client can do, written once for both shells."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvrelay.client.core import ranges
from kvrelay.client.core.prefix import Prefix, StagePart
from kvrelay.client.core.puts import Puts, raise_unless_stored
from kvrelay.client.core.segments import Segments
from kvrelay.client.core.whole import Whole
from kvrelay.errors import NotFoundError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvrelay.client.core.blocks import Blocks, Mover
    from kvrelay.client.core.steps import Operation

__all__ = ["Operations", "Prefix", "StagePart"]


class Operations(Segments):
    """All operations of one connection: those of `Segments`, and whole objects.

    ``segment_sums``: XXH3-64 of each segment of a view, given a segment's size. ``mover``: copies and checksums blocks.
    """

    def __init__(
        self,
        segment_sums: Callable[[memoryview, int], list[int]],
        mover: Mover,
        group: str,
        *,
        reuse_staging: bool,
    ) -> None:
        super().__init__(segment_sums, group, reuse_staging=reuse_staging)
        self.whole = Whole(mover, self)

    def put_blocks(
        self, keys: Sequence[bytes], blocks: Blocks, ttl_s: float, ticket: str | None, *, partly: bool
    ) -> Operation[Puts]:
        """Store every block under its key. What could not be stored is raised, unless ``partly``."""
        puts = yield from self.whole.put(keys, blocks, ttl_s=ttl_s, ticket=ticket)
        if not partly:
            raise_unless_stored(puts)
        return puts

    def read_ranges(self, key: bytes, spans: Sequence[tuple[int, int]]) -> Operation[list[bytes] | None]:
        """Bytes of ranges of a sealed object; see `kvrelay.client.core.ranges.read_ranges`."""
        return (yield from ranges.read_ranges(self, key, spans))

    def write_ranges(
        self,
        key: bytes,
        size: int,
        pieces: Sequence[tuple[int, memoryview]],
        *,
        segment_bytes: int,
        group: str | None,
        lease_s: float,
        ticket: str | None,
    ) -> Operation[bool]:
        """Write pieces of an object; see `kvrelay.client.core.ranges.write_ranges`."""
        return (
            yield from ranges.write_ranges(
                self, key, size, pieces, segment_bytes=segment_bytes, group=group, lease_s=lease_s, ticket=ticket
            )
        )

    def read_pages(self, keys: Sequence[bytes], pages: Blocks, *, wait_s: float) -> Operation[None]:
        """Read every page. NotFoundError: one is not there; those before it were read."""
        count = yield from self.whole.get(keys, pages, wait_s=wait_s)
        if count < len(keys):
            raise NotFoundError(f"page {count} of {len(keys)}, key {keys[count].hex()}, is not in the pool")
