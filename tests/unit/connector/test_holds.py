from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest

from kvrelay.connector.core.orders import SaveOrder
from kvrelay.connector.core.tables import Blocks, Table, Tables
from kvrelay.connector.holds import PATIENCE_S, Holds
from kvrelay.identity.core.chunks import Chunk

if TYPE_CHECKING:
    from collections.abc import Sequence

TABLES = Tables((Table(8, 0), Table(8, 1)), (0, 16), 0)


class Engine:
    """Reference counts of blocks, and a clock."""

    def __init__(self) -> None:
        self.users: Counter[int] = Counter()
        self.now = 0.0
        self.left_out: list[int] = []
        self.holds = Holds(TABLES, ranks=2, clock=lambda: self.now, limited=self.left_out.append)
        self.holds.bind(blocks=40, touch=self.users.update, free=self.free)

    def free(self, blocks: Sequence[int]) -> None:
        self.users.subtract(blocks)
        assert min(self.users.values()) >= 0
        self.users += Counter()


@pytest.fixture
def engine() -> Engine:
    return Engine()


def order(number: int, *windowed: int) -> SaveOrder:
    tables = (Blocks((1, 2, 3), 0), Blocks(windowed, 0))
    return SaveOrder("r", (Chunk(b"c", 0, 24),), tables, (0, 0), None, number=number)


def test_blocks_of_groups_with_a_window_are_held_until_every_rank_has_ended_the_order(engine: Engine) -> None:
    engine.holds.hold(order(1, 0, 0, 11, 12))
    engine.holds.hold(order(2, 12, 13))
    assert engine.users == {11: 1, 12: 2, 13: 1}
    engine.holds.ended({1: 1, 2: 1})
    assert engine.users == {11: 1, 12: 2, 13: 1}
    engine.holds.ended({2: 1})
    assert engine.users == {11: 1, 12: 1}
    engine.holds.ended({1: 1, 99: 1})
    assert (dict(engine.users), len(engine.holds)) == ({}, 0)


def test_what_would_hold_too_much_is_saved_without_those_groups(engine: Engine) -> None:
    first, second = order(1, *range(10, 20)), order(2, 20)
    assert engine.holds.hold(first) is first
    limited = engine.holds.hold(second)
    assert (limited.of(0), limited.of(1)) == (second.chunks, ())
    assert 20 not in engine.users
    assert engine.left_out == [24]
    engine.holds.ended({1: 2})
    assert engine.holds.hold(second) is second


def test_one_order_is_held_however_large(engine: Engine) -> None:
    large = order(1, *range(10, 40))
    assert engine.holds.hold(large) is large


def test_the_engine_waits_for_held_blocks_a_moment_and_no_longer(engine: Engine) -> None:
    seen = [engine.holds.worth_waiting]
    engine.holds.hold(order(1, 11))
    seen.append(engine.holds.worth_waiting)
    engine.now = PATIENCE_S
    seen.append(engine.holds.worth_waiting)
    assert seen == [False, True, False]


def test_an_order_without_windows_holds_nothing(engine: Engine) -> None:
    engine.holds.hold(order(1, 0, 0))
    assert (dict(engine.users), len(engine.holds)) == ({}, 0)
