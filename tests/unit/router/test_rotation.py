"""Health and rotation."""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.errors import BadRequestError
from kvrelay.router.core.fleet import Address, Engine, Role, make_engines, parse_address
from kvrelay.router.core.health import Health, HealthSettings, Suspicion, is_engine_fault
from kvrelay.router.core.picker import Picker
from kvrelay.router.core.policy.round_robin import RoundRobin

if TYPE_CHECKING:
    from collections.abc import Sequence

SETTINGS = HealthSettings(failures=2, rest_s=1.0, max_rest_s=4.0)


def engines(count: int) -> tuple[Engine, ...]:
    return make_engines(Role.DECODE, [Address("h", port) for port in range(1, count + 1)], SETTINGS)


class Rotation:
    """Engines in turn."""

    def __init__(self, fleet: Sequence[Engine]) -> None:
        self._fleet = fleet
        self._picker = Picker(RoundRobin(), random.Random(1))

    def pick(self, now: float, tried: Sequence[Engine] = ()) -> Engine | None:
        return self._picker.pick(self._fleet, now, tried)


def fail(engine: Engine, now: float, times: int) -> None:
    for _ in range(times):
        engine.health.failed(now)


@given(st.integers(1, 7), st.integers(0, 40))
def test_rotation_is_exactly_even(count: int, picks: int) -> None:
    rotation = Rotation(engines(count))
    counts = Counter(rotation.pick(0.0) for _ in range(picks))
    assert max(counts.values(), default=0) - min((counts[e] for e in counts), default=0) <= 1
    assert len(counts) == min(count, picks)


def test_engines_are_named_by_role_and_order() -> None:
    assert [engine.name for engine in engines(3)] == ["D0", "D1", "D2"]


def test_a_resting_engine_is_passed_over_and_comes_back() -> None:
    fleet = engines(3)
    rotation = Rotation(fleet)
    fail(fleet[1], now=0.0, times=2)
    assert [rotation.pick(0.5) for _ in range(4)] == [fleet[0], fleet[2], fleet[0], fleet[2]]
    assert {rotation.pick(1.0) for _ in range(3)} == set(fleet)


def test_when_all_rest_the_one_that_wakes_first_is_asked() -> None:
    fleet = engines(2)
    fail(fleet[0], now=0.5, times=2)
    fail(fleet[1], now=0.0, times=2)
    assert Rotation(fleet).pick(0.6) is fleet[1]


def test_engines_tried_already_are_not_picked_again() -> None:
    fleet = engines(2)
    rotation = Rotation(fleet)
    assert rotation.pick(0.0, [fleet[0]]) is fleet[1]
    assert rotation.pick(0.0, fleet) is None


def test_an_engine_that_drains_is_not_picked_and_one_that_is_preferred_is_if_it_is_well() -> None:
    fleet = engines(3)
    picker = Picker(RoundRobin(), random.Random(1))
    fleet[0].draining = True
    assert {picker.pick(fleet, 0.0) for _ in range(4)} == {fleet[1], fleet[2]}
    assert [picker.pick(fleet, 0.0, prefer="D2") for _ in range(3)] == [fleet[2]] * 3
    assert picker.why == "preferred"
    assert picker.pick(fleet, 0.0, [fleet[2]], prefer="D2") is fleet[1]
    fail(fleet[2], now=0.0, times=2)
    assert picker.pick(fleet, 0.5, prefer="D2") is fleet[1]
    assert picker.pick(fleet, 0.5, prefer="D0") is fleet[1]
    fleet[1].draining = fleet[2].draining = True
    assert picker.pick(fleet, 0.5) is None


def test_what_a_policy_is_shown_is_what_engines_are_at_that_moment_whoever_changed_last() -> None:
    fleet = engines(3)
    picker = Picker(RoundRobin(), random.Random(1))

    def shown(now: float) -> list[tuple[int, int, float | None, bool, bool]]:
        views = picker.views(fleet, now)
        assert views == tuple(picker.views([engine], now)[0] for engine in fleet)
        return [(v.in_flight, v.in_flight_tokens, v.ttft_s, v.resting, v.draining) for v in views]

    idle = (0, 0, None, False, False)
    assert shown(0.0) == [idle] * 3
    fleet[1].load.begin(7)
    assert shown(0.0) == [idle, (1, 7, None, False, False), idle]
    fleet[1].load.end(7)
    fleet[1].load.add_ttft(0.5, 0.0)
    fleet[2].draining = True
    fail(fleet[0], now=0.0, times=2)
    assert shown(0.5) == [(0, 0, None, True, False), (0, 0, 0.5, False, False), (0, 0, None, False, True)]
    assert shown(1.0)[0] == idle
    fleet[0].health.succeeded()
    fleet[2].draining = False
    assert shown(0.5) == [idle, (0, 0, 0.5, False, False), idle]
    assert picker.views(fleet, 1.0)[0] is picker.views(fleet, 2.0)[0]


def test_rotation_stays_even_while_engines_join_and_leave() -> None:
    fleet = list(engines(4))
    picker = Picker(RoundRobin(), random.Random(1))
    assert [picker.pick(fleet, 0.0) for _ in range(2)] == fleet[:2]
    left: list[str] = []
    picker.on_forgotten = left.append
    gone = fleet.pop(0)
    assert [picker.pick(fleet, 0.0) for _ in range(3)] == [fleet[1], fleet[2], fleet[0]]
    assert left == ["D0"]
    fleet.append(gone)
    assert [picker.pick(fleet, 0.0) for _ in range(4)] == [fleet[1], fleet[2], gone, fleet[0]]


def test_rest_doubles_up_to_its_bound_and_success_forgets_it() -> None:
    health = Health(SETTINGS)
    now = 0.0
    rests = []
    health.failed(now)
    for _ in range(4):
        assert health.failed(now)
        rests.append(health.resting_until - now)
        now = health.resting_until
    assert rests == [1.0, 2.0, 4.0, 4.0]
    health.succeeded()
    assert not health.is_resting(now)
    assert not health.failed(now)


def test_failures_while_it_rests_do_not_prolong_the_rest() -> None:
    health = Health(SETTINGS)
    for _ in range(5):
        health.failed(0.0)
    assert health.resting_until == 1.0


def test_after_its_rest_an_engine_is_on_trial_with_one_request_until_that_succeeds() -> None:
    """1. D0 fails and rests. 2. Its rest ends: one request tries it, the next ones go past. 3. The trial succeeds."""
    fleet = engines(2)
    rotation, health = Rotation(fleet), fleet[0].health
    health.failed(0.0)
    health.failed(0.0)
    picked = [rotation.pick(now) for now in (0.5, 1.0, 1.1, 1.2, 1.3)]
    assert [engine.name for engine in picked if engine] == ["D1", "D0", "D1", "D1", "D1"]
    health.succeeded()
    assert {engine.name for engine in (rotation.pick(1.4), rotation.pick(1.4)) if engine} == {"D0", "D1"}


def test_a_failed_trial_means_a_longer_rest() -> None:
    health = Health(SETTINGS)
    health.failed(0.0)
    health.failed(0.0)
    health.asked(1.0)
    assert health.failed(1.5)
    assert health.resting_until == 3.5


def test_a_trial_that_never_ends_gives_way_to_another() -> None:
    health = Health(SETTINGS)
    health.failed(0.0)
    health.failed(0.0)
    health.asked(1.0)
    assert health.is_resting(1.9)
    assert not health.is_resting(2.0)


def test_a_request_under_which_two_engines_failed_is_suspected() -> None:
    suspicion = Suspicion()
    assert [suspicion.confirmed(status) for status in (503, 429, 500, 503, 502)] == [False, False, False, False, True]


@pytest.mark.parametrize(
    ("status", "fault"), [(200, False), (400, False), (429, False), (500, True), (501, False), (503, True)]
)
def test_only_what_is_the_engines_fault_is_held_against_it(status: int, *, fault: bool) -> None:
    assert is_engine_fault(status) is fault


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://a:1", Address("a", 1)),
        ("http://a", Address("a", 80)),
        ("http://a:1/", Address("a", 1)),
        ("http://a:1/vllm/", Address("a", 1, "/vllm")),
        ("http://[::1]:2", Address("::1", 2)),
        ("https://a:1", Address("a", 1, tls=True)),
        ("https://a/vllm", Address("a", 443, "/vllm", tls=True)),
    ],
)
def test_engine_urls_are_understood(url: str, expected: Address) -> None:
    assert parse_address(url) == expected


@pytest.mark.parametrize(
    "url", ["", "a:1", "ftp://a", "https://", "http://", "http://a:0", "http://a:x", "http://a:99999", "http://u@a",
            "http://a?b", "http://a#b", "http://a b", "http://ä", "http://a..b", f"http://{'a' * 64}.b", "http://a\x00",
            "http://a/\x7f"],
)  # fmt: skip
def test_other_urls_are_refused_by_name(url: str) -> None:
    with pytest.raises(BadRequestError, match="http://"):
        parse_address(url)


def test_an_ipv6_address_is_bracketed_in_urls() -> None:
    assert parse_address("http://[::1]:2").url == "http://[::1]:2"
    assert parse_address("https://[::1]").url == "https://[::1]:443"
