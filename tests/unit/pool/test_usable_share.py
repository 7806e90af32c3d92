"""Eviction and allocation together keep the arena full of objects, whatever their sizes."""

from __future__ import annotations

import random

import pytest

from allocator_bench.usable import usable_shares
from kvrelay.testing.catalogs import CATALOGS

ARENA = 512 << 20


@pytest.mark.parametrize("kind", sorted(CATALOGS))
def test_churn_of_any_sizes_leaves_at_least_95_percent_of_the_arena_to_objects(kind: str) -> None:
    mixes = ["mixed", "powers", "uniform", "64 KiB", "mixed"]
    catalog = CATALOGS[kind](ARENA)
    shares = usable_shares(catalog, mixes, 2.0, random.Random(7))
    catalog.check_integrity()
    assert min(shares) >= 0.95, dict(zip(mixes, shares, strict=True))
