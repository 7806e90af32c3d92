"""Copying all of the arena down before it goes: both catalogs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest

from kvrelay.pool.core.tiering import Tiering, TierRules
from kvrelay.pool.tiers.core.orders import Store
from kvrelay.pool.tiers.core.tier import Outcome
from kvrelay.testing.catalogs import CATALOGS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvrelay.pool.core.catalog import Catalog

SIZE = 4_096
COUNT = 32


@pytest.fixture(params=CATALOGS)
def catalog(request: pytest.FixtureRequest) -> Catalog:
    make: Callable[[int], Catalog] = CATALOGS[request.param]
    return make(COUNT * SIZE)


def seal(catalog: Catalog, count: int) -> list[int]:
    rows = []
    for number in range(count):
        row = catalog.add(number % 2, b"%d" % number, SIZE)
        assert row is not None
        catalog.seal(row, bytes(8), math.inf)
        rows.append(row)
    return rows


def carried_out(tiering: Tiering, outcome: Outcome) -> list[tuple[int, bytes]]:
    """Answer every order there is, and those that follow, with ``outcome``: tier and key of each copy."""
    copies: list[tuple[int, bytes]] = []
    while orders := tiering.take_orders():
        for order in orders:
            assert isinstance(order, Store)
            copies += [(order.tier, copy.name.key) for copy in order.copies]
            tiering.stored(order.op, [outcome] * len(order.copies), 0.0)
            tiering.check_integrity()
    return copies


def keys(numbers: Sequence[int]) -> list[bytes]:
    return sorted(b"%d" % number for number in numbers)


def test_everything_that_is_not_below_is_copied_down_a_part_at_a_time(catalog: Catalog) -> None:
    tiering = Tiering(catalog, [TierRules(storing_bytes=4 * SIZE)])
    rows = seal(catalog, 20)
    catalog.mark_clean(rows[3], True)
    tiering.keep_all()
    begun = tiering.keeping
    assert begun
    assert tiering.stats()["demoting_bytes"] == 4 * SIZE, "no more than may be under way"
    copies = carried_out(tiering, Outcome.DONE)
    assert keys([number for number in range(20) if number != 3]) == sorted(key for _, key in copies)
    assert not tiering.keeping
    assert all(catalog.info(row).clean for row in rows)


def test_what_goes_while_it_waits_for_room_is_left_out(catalog: Catalog) -> None:
    tiering = Tiering(catalog, [TierRules(storing_bytes=SIZE)])
    rows = seal(catalog, 4)
    tiering.keep_all()
    catalog.forget(rows[2])
    copies = carried_out(tiering, Outcome.DONE)
    assert sorted(key for _, key in copies) == keys([0, 1, 3])
    assert not tiering.keeping


def test_a_tier_that_fails_does_not_keep_the_pool_for_ever(catalog: Catalog) -> None:
    tiering = Tiering(catalog, [TierRules()])
    rows = seal(catalog, 8)
    tiering.keep_all()
    assert len(carried_out(tiering, Outcome.FAILED)) == 8, "each is tried once"
    assert not tiering.keeping
    assert not any(catalog.info(row).clean for row in rows)


def test_it_goes_where_evicted_objects_go_and_else_to_the_eager_tiers(catalog: Catalog) -> None:
    both = Tiering(catalog, [TierRules(eager=True), TierRules()])
    seal(catalog, 4)
    both.keep_all()
    assert {tier for tier, _ in carried_out(both, Outcome.FAILED)} == {1}
    eager = Tiering(catalog, [TierRules(eager=True), TierRules(eager=True)])
    eager.keep_all()
    assert {tier for tier, _ in carried_out(eager, Outcome.DONE)} == {0, 1}
