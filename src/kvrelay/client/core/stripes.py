"""How a batch is split over several connections, and what their results are together."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from kvrelay.client.core.puts import Puts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvrelay.client.core.blocks import Blocks

MIN_STRIPE_BYTES = 1 << 20
"""Less is not worth another connection."""


def stripes(blocks: Blocks, connections: int) -> list[tuple[int, int]]:
    """Runs of blocks, in order, of about as many bytes each: first and last + 1; at most ``connections`` of them."""
    total = sum(blocks.sizes)
    count = max(1, min(connections, len(blocks), total // MIN_STRIPE_BYTES))
    if count == 1:
        return [(0, len(blocks))]
    cuts: list[int] = []
    for index, held in enumerate(accumulate(blocks.sizes), 1):
        if held * count >= total * (len(cuts) + 1):
            cuts.append(index)
            if len(cuts) == count - 1:
                break
    bounds = [0, *cuts, len(blocks)]
    return [(start, stop) for start, stop in pairwise(bounds) if stop > start]


def joined_puts(parts: Sequence[Puts]) -> Puts:
    """What became of every key."""
    return Puts(b"".join(part.states for part in parts), next((part.why for part in parts if part.why), ""))


def joined_count(runs: Sequence[tuple[int, int]], counts: Sequence[int]) -> int:
    """How long the prefix is that was read: what lies behind a hole counts for nothing."""
    for (start, stop), count in zip(runs, counts, strict=True):
        if count < stop - start:
            return start + count
    return runs[-1][1] if runs else 0
