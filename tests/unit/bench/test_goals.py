"""Goals of the benchmarks, with made-up speeds: which way each points, where its bound is, what is left unjudged."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from handoff_bench.legs import Settings
from handoff_bench.saving import KINDS, MORE_ROUNDS, Costs, SavingTable
from handoff_bench.ttft import Times, TtftTable
from kvrelay.bench.section import JUDGED_ROUNDS, Goal, Section, ratio
from pool_bench import lookup
from pool_bench.transfer import KIB, OURS, Bench, _shm_goals, _tcp_goals

if TYPE_CHECKING:
    from collections.abc import Mapping


@pytest.mark.parametrize(
    ("at_least", "value", "met"),
    [(True, 1.9, False), (True, 2.0, True), (False, 2.0, True), (False, 2.1, False), (True, None, None)],
)
def test_a_goal_is_met_at_its_bound_and_on_one_side_of_it(
    at_least: bool, value: float | None, met: bool | None
) -> None:
    goal = Goal("what", 2.0, value, at_least=at_least)
    assert goal.met is met
    assert goal.row()[1] == (">= 2" if at_least else "<= 2")
    assert goal.row()[3] == {True: "met", False: "NOT met", None: "not measured"}[met]


def test_a_median_of_few_rounds_is_shown_and_not_judged() -> None:
    few = Goal("what", 2.0, 3.0, rounds=JUDGED_ROUNDS - 1)
    assert few.met is None
    assert few.row()[2:] == ["3.00", "not judged: 19 rounds"]
    assert Goal("what", 2.0, 3.0, rounds=JUDGED_ROUNDS).met


def test_a_ratio_with_something_missing_is_none() -> None:
    assert ratio(6.0, 3.0) == 2.0
    assert ratio(None, 3.0) is ratio(3.0, None) is ratio(3.0, 0.0) is None


def judged(section: Section) -> dict[str, tuple[float, bool | None]]:
    """Bound and verdict of every goal, by its name."""
    return {goal.what: (goal.bound, goal.met) for goal in section.goals}


def bench(size: int, speeds: Mapping[str, float]) -> Bench:
    made = Bench(size, size)
    made.speeds = {f"{name} {what}": [speed] * 3 for name, speed in speeds.items() for what in ("put", "get")}
    return made


def test_tcp_is_held_against_mooncake_the_faster_redis_and_the_raw_stream_of_large_objects() -> None:
    section = Section("", [])
    speeds = {OURS: 4.0, "Mooncake": 2.0, "Redis raw": 1.0, "redis-py": 2.1, "raw socket": 4.0}
    _tcp_goals(section, bench(256 * KIB, speeds))
    found = judged(section)
    for what in ("put", "get"):
        assert found[f"tcp {what} 256 KiB / Mooncake"] == (2.0, True)
        assert found[f"tcp {what} 256 KiB / best Redis client"] == (2.0, False)
        assert found[f"tcp {what} 256 KiB / raw socket"] == (0.85, True)
    small = Section("", [])
    _tcp_goals(small, bench(16 * KIB, {OURS: 4.0, "Mooncake": 1.0}))
    assert judged(small)["tcp put 16 KiB / Mooncake"] == (5.0, False)
    assert judged(small)["tcp put 16 KiB / best Redis client"] == (2.0, None)
    assert not any("raw" in what for what in judged(small))


def test_shared_memory_is_held_against_memcpy_and_at_64_kib_against_nixl() -> None:
    for size, bound in ((16, 0.6), (64, 0.8), (256, 0.8)):
        section = Section("", [])
        _shm_goals(section, bench(size * KIB, {OURS: 0.7, "memcpy": 1.0, "NIXL shm": 0.5}))
        found = judged(section)
        assert found[f"shm put {size} KiB / memcpy"] == (bound, bound <= 0.7)
        assert (f"shm put {size} KiB / NIXL shm" in found) == (size == 64)
        if size == 64:
            assert found["shm put 64 KiB / NIXL shm"] == (1.5, False)
            assert found["shm get 64 KiB / NIXL shm"] == (1.2, True)


def test_each_way_of_looking_up_has_goals_of_its_own() -> None:
    times = {f"kvrelay {call} {beside}": 30.0 for call in lookup.CALLS for beside in ("nothing", "tcp transfers")}
    p50 = times | {"Mooncake batch_is_exist nothing": 300.0, "kvrelay match_prefix nothing": 31.0}
    p50 |= {f"kvrelay {call} shm transfers": 10.0 for call in lookup.CALLS}
    p99 = {name: 90.0 if "match" in name else 91.0 for name in p50} | {"kvrelay count_prefix shm transfers": 30.0}
    found = {goal.what: (goal.bound, goal.met) for goal in lookup.goals(p50, p99)}
    assert found == {
        "match_prefix p50 / Mooncake batch_is_exist p50": (0.1, False),
        "count_prefix p50 / Mooncake batch_is_exist p50": (0.1, True),
        "match_prefix p99 / p50 beside tcp transfers": (3.0, True),
        "count_prefix p99 / p50 beside tcp transfers": (3.0, False),
        "match_prefix p99 / p50 beside shm transfers": (3.0, False),
        "count_prefix p99 / p50 beside shm transfers": (3.0, True),
    }
    alone = [goal for goal in lookup.goals({**p50, "Mooncake batch_is_exist nothing": 0.0}, p99) if goal.met is None]
    assert len(alone) == 2


@pytest.mark.parametrize(("rounds", "verdicts"), [(JUDGED_ROUNDS, [True, False]), (JUDGED_ROUNDS - 1, [None, None])])
def test_overheads_of_hand_overs_are_judged_from_enough_rounds_on(rounds: int, verdicts: list[bool | None]) -> None:
    def times(overhead_ms: float) -> Times:
        return Times([0.1 + overhead_ms / 1e3] * rounds, [0.1] * rounds, [0.1] * rounds)

    table = TtftTable(Settings(repeats=rounds), goal_ms=5.0)
    table.compare(1025, 0, {"kvrelay": times(4.0), "another": times(3.0)})
    section = table.finish()
    assert [goal.met for goal in section.goals] == verdicts
    assert [goal.bound for goal in section.goals] == [5.0, 0.0]


@pytest.mark.parametrize(("adds_ms", "met"), [(0.5, True), (1.5, False)])
def test_saving_is_judged_by_what_it_adds_within_rounds_beyond_a_copy(adds_ms: float, met: bool) -> None:
    costs = Costs()
    adds = dict(zip(KINDS, (adds_ms, 0.0, -0.2), strict=True))
    for round_ in range(JUDGED_ROUNDS):
        drift = 0.001 * round_  # of the machine: all prompts of a round are slower than those of the one before
        for kind, more in adds.items():
            costs.first_s[kind].append(0.1 + drift + more / 1e3)
            costs.threads_s[kind].append({1: 0.09 + drift, 2: adds_ms / 1e3 if kind == "saved" else 0.0})
    table = SavingTable(Settings(repeats=JUDGED_ROUNDS), kv_bytes_per_token=1)
    assert table.settings.repeats == MORE_ROUNDS * JUDGED_ROUNDS
    table.judge("kvrelay", 1025, costs)
    figures = table.section.figures["kvrelay 1025"]
    assert figures["saving_ms"] == pytest.approx([adds_ms] * 3)
    assert figures["saving_core_ms"] == pytest.approx([adds_ms] * 3)
    assert figures["own_core_ms"] == pytest.approx([adds_ms] * 3)
    assert figures["looking_ms"] == pytest.approx([0.2] * 3)
    assert [goal.met for goal in table.section.goals] == [met]
