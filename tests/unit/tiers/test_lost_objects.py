"""What is evicted, and whether it is lost: both catalogs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest

from kvrelay.pool.core.pool import PoolCore
from kvrelay.pool.core.tiering import Tiering, TierRules
from kvrelay.testing.catalogs import CATALOGS

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvrelay.pool.core.catalog import Catalog

PAGE = 4_096


@pytest.fixture(params=CATALOGS)
def core(request: pytest.FixtureRequest) -> PoolCore:
    make: Callable[[int], Catalog] = CATALOGS[request.param]
    return PoolCore(8 * PAGE, pool="pool", server="test", catalog=make)


def seal(core: PoolCore, *keys: bytes) -> None:
    for key in keys:
        row = core.catalog.add(0, key, PAGE)
        assert row is not None
        core.catalog.seal(row, bytes(8), math.inf)


def test_what_no_tier_had_is_counted_as_lost_when_it_is_evicted(core: PoolCore) -> None:
    core.attach(Tiering(core.catalog, [TierRules()]))
    seal(core, *(b"%d" % number for number in range(8)))
    for number in range(4):
        row = core.catalog.find(0, b"%d" % number)
        assert row is not None
        core.catalog.mark_clean(row, True)
    core.upkeep.make_room(0, 2 * PAGE, 2)
    assert core.stats()["lost"] == 0, "what a tier has goes first"
    assert core.stats()["evicted_for_room"] == 2
    seal(core, *(b"new %d" % number for number in range(8)))
    stats = core.stats()
    assert stats["evicted_for_room"] == 8
    assert stats["lost"] == 4


def test_without_tiers_nothing_counts_as_lost(core: PoolCore) -> None:
    seal(core, *(b"%d" % number for number in range(12)))
    assert core.stats()["evicted_for_room"] == 4
    assert core.stats()["lost"] == 0


def test_a_pool_with_tiers_makes_room_in_time_unless_it_is_told_otherwise(core: PoolCore) -> None:
    assert (core.upkeep.rules.high, core.upkeep.rules.low) == (1.0, 1.0)
    core.attach(Tiering(core.catalog, [TierRules()]))
    assert (core.upkeep.rules.high, core.upkeep.rules.low) == (0.9, 0.8)
