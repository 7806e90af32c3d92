"""Health by probes, beside health by results; and the one request by which an engine that rested is tried."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from kvrelay.router.core.health import Health, HealthSettings

SETTINGS = HealthSettings(failures=2, rest_s=1.0, max_rest_s=4.0, probe_failures=3)


def probe(health: Health, now: float, *results: bool) -> list[bool]:
    return [health.probed(now, well=well) for well in results]


def test_an_engine_is_down_after_several_failed_probes_in_a_row_and_back_with_one_good() -> None:
    health = Health(SETTINGS)
    assert probe(health, 0.0, False, False, True, False, False) == [False] * 5
    assert not health.is_resting(0.0)
    assert probe(health, 0.0, False, False) == [True, False]
    assert health.is_resting(1e9)
    assert health.resting_until == math.inf
    assert probe(health, 5.0, True, True) == [True, False]
    assert not health.is_resting(5.0)


def test_an_answered_request_is_better_evidence_than_failed_probes() -> None:
    health = Health(SETTINGS)
    probe(health, 0.0, False, False, False)
    health.succeeded()
    assert not health.is_resting(0.0)
    assert probe(health, 0.0, False, False) == [False, False]


def test_good_probes_do_not_wake_an_engine_whose_requests_fail() -> None:
    health = Health(SETTINGS)
    health.failed(0.0)
    health.failed(0.0)
    probe(health, 0.1, True, True, True)
    assert health.is_resting(0.5)
    assert not health.is_resting(1.0)


def test_an_engine_that_was_down_and_is_back_is_tried_by_one_request_at_once() -> None:
    health = Health(SETTINGS)
    for _ in range(2):
        health.failed(0.0)
    probe(health, 0.1, False, False, False)
    assert probe(health, 0.2, True) == [True]
    assert not health.is_resting(0.2)
    health.asked(0.2)
    assert health.is_resting(0.2)


steps = st.lists(
    st.one_of(
        st.floats(0.0, 2.0, allow_nan=False), st.sampled_from(["ask", "succeed", "fail", "probe well", "probe ill"])
    ),
    max_size=60,
)


@given(steps)
def test_after_a_rest_one_request_at_a_time_tries_the_engine(events: list[float | str]) -> None:
    """Whatever is asked, answered and probed in whatever order: an engine with enough failures in a row is asked by
    one request within ``rest_s``, until that one has succeeded.
    """
    health, now = Health(SETTINGS), 0.0
    last_asked = -math.inf
    for event in events:
        if isinstance(event, float):
            now += event
        elif event == "ask":
            if health.is_resting(now):
                continue  # a policy passes it over
            if health.failures >= SETTINGS.failures:
                assert now - last_asked >= SETTINGS.rest_s
                last_asked = now
            health.asked(now)
        elif event == "succeed":
            health.succeeded()
            last_asked = -math.inf
        elif event == "fail":
            before = health.is_resting(now)
            opened = health.failed(now)
            assert health.is_resting(now) or health.failures < SETTINGS.failures
            assert not (opened and before and health.down)
        else:
            health.probed(now, well=event == "probe well")
        assert health.resting_until <= now + SETTINGS.max_rest_s or health.down


@given(steps)
def test_no_engine_rests_longer_than_the_longest_rest_unless_it_is_down(events: list[float | str]) -> None:
    health, now = Health(SETTINGS), 0.0
    for event in events:
        if isinstance(event, float):
            now += event
        elif event in {"ask", "fail"}:
            health.failed(now)
        elif event == "succeed":
            health.succeeded()
    assert not health.is_resting(now + SETTINGS.max_rest_s)
