"""Who runs when in the benchmark of hand-overs, with stacks and contestants that only note what happens to them."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from handoff_bench.beside import BesideTable, Rates
from handoff_bench.cases import Case, Table, beyond
from handoff_bench.legs import Settings
from handoff_bench.ttft import Times, TtftTable
from handoff_bench.turns import grouped, interleave
from kvrelay.errors import KvRelayError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from handoff_bench.engines import Pair
    from handoff_bench.legs import Legs

ROUNDS, WARMUP = 6, 1


@dataclass
class Stage:
    """Whose stack runs, and what happened in order."""

    running: str = ""
    heard: list[tuple[str, str]] = field(default_factory=list)


@dataclass
class FakePair:
    stage: Stage
    name: str

    @contextmanager
    def turn(self) -> Iterator[None]:
        assert not self.stage.running
        self.stage.running = self.name
        try:
            yield
        finally:
            self.stage.running = ""


class FakeCase(Case):
    def __init__(self, stage: Stage, name: str, fails_at: int | None) -> None:
        self.stage = stage
        self.fails_at = fails_at
        super().__init__(cast("Legs", SimpleNamespace(contestant=SimpleNamespace(name=name))), 257)

    def _hear(self, what: str) -> None:
        assert self.stage.running == self.name, "asked while its stack was suspended"
        self.stage.heard.append((self.name, what))

    def begin(self, what: str) -> None:  # noqa: ARG002
        self._hear("begin")

    def warm_up(self, round_: int) -> None:  # noqa: ARG002
        self._hear("warm up")

    def measure(self, round_: int, *, counts: bool) -> None:
        self._hear("counts" if counts else "does not count")
        if round_ == self.fails_at:
            raise KvRelayError("not proven")

    def end(self) -> None:
        self._hear("end")

    def close(self) -> None:
        self._hear("close")


class FakeTable(Table[FakeCase]):
    def __init__(self, stage: Stage, fails_at: dict[str, int], limit_s: float = 60.0) -> None:
        super().__init__(Settings(ROUNDS, WARMUP, limit_s), "table", ["contestant"])
        self.stage = stage
        self.fails_at = fails_at

    def case(self, legs: Legs, length: int, decodes: int) -> FakeCase | None:  # noqa: ARG002
        name = legs.contestant.name
        return None if name == "other kind" else FakeCase(self.stage, name, self.fails_at.get(name))

    def note(self, cases: Sequence[FakeCase]) -> None:
        self.section.rows += [[case.name] for case in cases]


def played(*names: str, **more: Any) -> FakeTable:
    stage = Stage()
    table = FakeTable(stage, more.pop("fails_at", {}), **more)
    started = [
        (cast("Pair", FakePair(stage, name)), cast("Legs", SimpleNamespace(contestant=SimpleNamespace(name=name))))
        for name in names
    ]
    interleave(table, 257, 0, started)
    return table


def test_every_round_has_one_warmed_up_turn_of_each_contestant() -> None:
    names = ("a", "b", "c")
    table = played(*names, "other kind")
    turns = [name for name, what in table.stage.heard if what == "warm up"]
    rounds = [turns[first : first + 3] for first in range(0, len(turns), 3)]
    assert len(rounds) == WARMUP + ROUNDS
    assert all(sorted(round_) == list(names) for round_ in rounds)
    assert len({tuple(round_) for round_ in rounds}) > 1, "always in the same order"
    for name in names:
        heard = [what for who, what in table.stage.heard if who == name]
        one, counted = ["warm up", "does not count"], ["warm up", "counts"]
        assert heard == ["begin", *one * WARMUP, *counted * ROUNDS, "end", "close"]
    assert table.section.rows == [["a"], ["b"], ["c"]]
    assert table.section.absent == {}


def test_who_fails_is_absent_with_its_reason_and_the_others_go_on() -> None:
    table = played("a", "b", fails_at={"b": 2})
    assert table.section.rows == [["a"]]
    assert table.section.absent == {"b, 257 tokens, 0 decodes": "not proven"}
    assert [what for who, what in table.stage.heard if who == "b"][-3:] == ["warm up", "counts", "close"]
    assert sum(what == "counts" for who, what in table.stage.heard if who == "a") == ROUNDS


def test_too_few_rounds_in_time_are_no_result() -> None:
    table = played("a", "b", limit_s=-1.0)
    assert table.section.rows == []
    assert set(table.section.absent) == {"a, 257 tokens, 0 decodes", "b, 257 tokens, 0 decodes"}


@pytest.mark.parametrize(
    ("at_once", "groups"), [(2, [["a", "b"], ["c"]]), (3, [["a", "b", "c"]]), (1, [["a"], ["b"], ["c"]])]
)
def test_groups_hold_what_fits(at_once: int, groups: list[list[str]]) -> None:
    assert grouped(["a", "b", "c"], at_once) == groups


def test_what_is_compared_is_the_difference_within_rounds() -> None:
    drift = [0.001 * round_ for round_ in range(25)]
    assert beyond([0.05 + more for more in drift], [0.04 + more for more in drift]) == pytest.approx((10.0, 10.0, 10.0))
    out_of_time = [0.04 + more for more in drift[:9]]
    assert beyond(out_of_time, [0.05 + more for more in drift]) == pytest.approx((-10.0, -10.0, -10.0))
    assert beyond([], [0.1]) is None


def test_contestants_rows_say_what_they_take_beyond_ours() -> None:
    drift = [0.001 * round_ for round_ in range(25)]
    ours = Times([0.020 + more for more in drift], [0.018 + more for more in drift])
    theirs = Times([0.030 + more for more in drift], [0.019 + more for more in drift])
    uncached = Times([0.027 + more for more in drift])
    table = TtftTable(Settings(repeats=25), goal_ms=3.0)
    table.compare(1025, 4, {"kvrelay": ours, "nixl": theirs, "shared-storage": uncached})
    figures = table.section.figures
    assert figures["kvrelay 1025 4"]["overhead_ms"] == pytest.approx([2.0] * 3)
    assert figures["nixl 1025 4"]["overhead_beyond_ms"] == pytest.approx([9.0] * 3)
    assert figures["nixl 1025 4"]["handed_beyond_ms"] == pytest.approx([10.0] * 3)
    assert figures["shared-storage 1025 4"]["handed_beyond_ms"] == pytest.approx([7.0] * 3)
    assert "overhead_ms" not in figures["shared-storage 1025 4"]
    less = table.section.goals[-1]
    assert less.value == pytest.approx(-9.0)
    assert less.met


def test_decodes_are_compared_within_rounds_too() -> None:
    table = BesideTable(Settings(repeats=25))
    ours, theirs = Rates([500.0] * 25, [510.0] * 25), Rates([250.0] * 25, [400.0] * 25)
    table.compare(1025, {"kvrelay": ours, "nixl": theirs, "shared-storage": Rates([400.0] * 25)})
    figures = table.section.figures
    assert figures["kvrelay 1025"]["itl_ratio"] == pytest.approx([1.02] * 3)
    assert figures["nixl 1025"]["handed_ratio"] == pytest.approx([0.5] * 3)
    assert figures["shared-storage 1025"]["handed_ratio"] == pytest.approx([0.8] * 3)
    assert "itl_ratio" not in figures["shared-storage 1025"]
    assert [goal.met for goal in table.section.goals] == [True]
