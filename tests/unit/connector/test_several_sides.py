"""Which side of an engine with several pools is asked, and what it is asked with the others in mind."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kvrelay.connector.core.orders import LoadOutcome, RankReport, StepOrders
from kvrelay.connector.core.rank import Results
from kvrelay.connector.several import SeveralReports, SeveralSchedulers, SeveralWorkers

if TYPE_CHECKING:
    from collections.abc import Sequence


class Side:
    """Of a scheduler or a rank: remembers what it was told."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []
        self.connected = True
        self.about_to_load = False
        self.idle = True
        self.others: list[Side] = []
        self.foreign = False

    def share_engine(self, others: Sequence[Side]) -> None:
        self.others = list(others)

    def must_wait(self, local: int) -> bool:
        return self.about_to_load and local > 0

    def num_matched(self, request_id: str, local: int) -> tuple[int | None, bool]:
        self.told.append(("matched", request_id, local))
        return 5, False

    def loads_elsewhere(self, scheduled: Any) -> bool:
        return bool(scheduled) and self.foreign

    def step(self, scheduled: Any, preempted: Any, _: Any, *, foreign: bool) -> StepOrders:
        self.told.append(("step", tuple(scheduled), tuple(preempted), foreign))
        return StepOrders(preempted=tuple(preempted))

    def reset(self) -> bool:
        self.told.append(("reset",))
        return self.idle

    def finished(self, request_id: str, *_: Any) -> bool:
        self.told.append(("finished", request_id))
        return True

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **_: self.told.append((name, *args))


@pytest.fixture
def sides() -> tuple[Side, Side]:
    return Side(), Side()


@pytest.fixture
def several(sides: tuple[Any, Any]) -> SeveralSchedulers:
    return SeveralSchedulers(dict(zip(("P0", "P1"), sides, strict=True)))


def add(several: SeveralSchedulers, name: str, prefill: str | None) -> None:
    said = {"handover": name, "leg": "decode", "worker": "D0", "prefill": prefill}
    several.on_new_request(name, [1], 1, params={"kvrelay": said} if prefill is not None else None)


def test_a_request_is_the_sides_of_who_prefilled_else_of_the_first_whose_pool_is_there(
    several: SeveralSchedulers, sides: tuple[Side, Side]
) -> None:
    add(several, "a", "P1")
    add(several, "b", "P9")
    sides[0].connected = False
    add(several, "c", None)
    add(several, "d", "P0")
    sides[1].connected = False
    add(several, "e", "")
    assert [told[1] for told in sides[0].told] == ["b", "d", "e"]
    assert [told[1] for told in sides[1].told] == ["a", "c"]


@pytest.mark.usefixtures("several")
def test_each_side_knows_whose_requests_the_engine_runs_beside_its_own(sides: tuple[Side, Side]) -> None:
    assert (sides[0].others, sides[1].others) == ([sides[1]], [sides[0]])


def test_what_another_side_is_about_to_load_is_waited_for(several: SeveralSchedulers, sides: tuple[Side, Side]) -> None:
    """The engine names a synchronous load's blocks in its prefix cache at once, when they hold nothing yet."""
    add(several, "a", "P1")
    sides[0].about_to_load = True
    assert several.num_matched("a", 32) == (None, False)
    assert several.num_matched("nobody's", 32) == (None, False)
    assert several.num_matched("a", 0) == (5, False)
    sides[0].about_to_load, sides[1].about_to_load = False, True
    assert several.num_matched("a", 32) == (5, False)  # its own side knows better
    assert several.num_matched("nobody's", 0) == (0, False)


@pytest.mark.parametrize("foreign", [False, True])
def test_a_step_is_told_to_each_side_of_its_own_requests_and_preemptions_and_others_loads_to_all(
    several: SeveralSchedulers, sides: tuple[Side, Side], foreign: bool
) -> None:
    add(several, "a", "P0")
    add(several, "b", "P1")
    sides[1].foreign = foreign
    orders = several.step([("a", 0, 5), ("b", 0, 6), ("c", 0, 7)], iter(["b"]), lambda _: [])
    assert sides[0].told[-1] == ("step", (("a", 0, 5),), ("b",), foreign)
    assert sides[1].told[-1] == ("step", (("b", 0, 6),), ("b",), foreign)
    assert len(orders.parts) == 2


def test_a_request_that_ended_is_nobodys(several: SeveralSchedulers, sides: tuple[Side, Side]) -> None:
    add(several, "a", "P1")
    assert several.finished("a", 3, []) is True
    assert several.finished("a", 3, []) is False
    assert sides[0].told == []


def test_all_sides_part_with_their_names_whichever_has_a_load_under_way(
    several: SeveralSchedulers, sides: tuple[Side, Side]
) -> None:
    sides[0].idle = False
    assert several.reset() is False
    assert sides[0].told == sides[1].told == [("reset",)]


def report(name: str, number: int) -> RankReport:
    return RankReport({name: 1}, {name: LoadOutcome(number, 1, 0.1)}, {number: 1})


def test_reports_are_joined_side_by_side() -> None:
    """Both sides number their orders from 1, so nothing of one may be taken for the other's."""
    one = SeveralReports((report("a", 1), report("b", 1)))
    joined = one.join(SeveralReports((report("a", 1), RankReport({}, {}))))
    assert joined.tells
    assert not SeveralReports((RankReport({}, {}), RankReport({}, {}))).tells
    assert [part.saves_ended for part in joined.parts] == [{"a": 2}, {"b": 1}]
    assert [part.orders_ended for part in joined.parts] == [{1: 2}, {1: 1}]


def test_a_ranks_results_are_those_of_all_its_sides() -> None:
    class Rank(Side):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def take_results(self) -> Results:
            return Results({f"s{self.name}"}, {f"r{self.name}"}, {int(self.name)}, set(), report(self.name, 1))

    ranks: Any = [Rank("1"), Rank("2")]
    results = SeveralWorkers(ranks).take_results()
    assert results.finished_sending == {"s1", "s2"}
    assert results.finished_recving == {"r1", "r2"}
    assert results.invalid_block_ids == {1, 2}
    assert results.report.tells
