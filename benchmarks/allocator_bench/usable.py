"""How much of the arena a pool's catalog, allocator and eviction together, fills with objects that are wanted."""

from __future__ import annotations

import math
from array import array
from statistics import mean
from typing import TYPE_CHECKING

from allocator_bench.mixes import MIXES
from kvrelay.wire.bulk import Stored

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from kvrelay.pool.core.catalog import Catalog

ASKED = 0.2
"""How many of the objects stored are asked for again, soon after."""
LATELY = 100
LOOKS = 40
"""At the arena, in the time it is filled once."""


def live_bytes(catalog: Catalog) -> int:
    """Of all objects, as they were asked for."""
    rows, _ = catalog.page(None, 0, 1 << 30, b"")
    return sum(catalog.geometry(row)[1] for row in memoryview(rows).cast("I"))


def usable_shares(catalog: Catalog, mixes: Sequence[str], turnover: float, rng: random.Random) -> list[float]:
    """Store objects of one mix of sizes after the other, evicting for them.

    Args:
        catalog: An empty one.
        mixes: Names of `MIXES`.
        turnover: Arenas full of objects that are stored of each mix.
        rng: Draws sizes, and what is asked for.

    Returns:
        Of each mix, the mean share of the arena that live objects hold, bytes as they were asked for, once something
        had to be evicted for it.
    """
    arena, number = catalog.arena_bytes, 0
    shares: list[float] = []
    for mix in mixes:
        stored, look_at = 0, 0.0
        seen: list[float] = []
        while stored < turnover * arena:
            key, size = number.to_bytes(32, "big"), MIXES[mix](rng)
            states, rows, _ = catalog.reserve(0, [key], array("Q", [size]).tobytes())
            if list(states) != [Stored.STORED]:
                raise AssertionError(f"an object of {size} bytes found no room in {arena}")
            catalog.publish(rows, bytes(8), math.inf)
            number, stored = number + 1, stored + size
            if rng.random() < ASKED:
                catalog.count_prefix(0, [max(0, number - rng.randint(1, LATELY)).to_bytes(32, "big")])
            if stored >= look_at and catalog.counts().evicted_for_room:
                seen.append(live_bytes(catalog) / arena)
                look_at = stored + arena / LOOKS
        shares.append(mean(seen))
    return shares
