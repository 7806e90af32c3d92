from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from kvrelay.router.core.fleet import Role, make_engines, parse_address
from kvrelay.router.core.health import HealthSettings
from kvrelay.router.core.observing.timings import GONE, SECONDS, Timings
from kvrelay.router.metrics import RouterMetrics


def lines(metrics: RouterMetrics) -> list[str]:
    return metrics.render().decode().splitlines()


@settings(deadline=None, max_examples=40)
@given(st.lists(st.floats(0, 1000) | st.sampled_from(SECONDS), max_size=50))
def test_the_text_is_what_prometheus_clients_own_histogram_writes(values: list[float]) -> None:
    metrics = RouterMetrics([])
    registry = CollectorRegistry()
    theirs = Histogram("kvrelay_router_ttft_seconds", "x", ("worker",), buckets=SECONDS, registry=registry)
    for value in values:
        metrics.timings.first_byte("", value)
        theirs.labels("").observe(value)
    wanted = [line for line in generate_latest(registry).decode().splitlines() if line.startswith("kv")]
    shown = lines(metrics)
    assert [line for line in wanted if "_created" not in line and line not in shown] == []


def test_a_worker_that_leaves_takes_its_series_with_it() -> None:
    engines = make_engines(Role.DECODE, [parse_address(f"http://h:{n}") for n in (1, 2)], HealthSettings())
    metrics = RouterMetrics(engines)
    for worker in ("D0", "D1"):
        metrics.timings.first_byte(worker, 0.1)
        metrics.timings.decode.at(worker, "ok").observe(1.0)
    metrics.timings.forget("D0")
    assert not [line for line in lines(metrics) if 'worker="D0"' in line]
    assert [line for line in lines(metrics) if 'worker="D1"' in line]


def test_what_is_observed_of_workers_that_left_is_one_series() -> None:
    """1. Workers come and go without end. 2. Their last requests end after that."""
    timings = Timings()
    for number in range(100):
        timings.welcome(f"D{number}")
        timings.forget(f"D{number}")
        timings.first_byte(f"D{number}", 0.1)
    assert list(timings.ttft.series) == [(GONE,)]
    assert sum(timings.ttft.at(GONE).counts) == 100
    timings.welcome("D7")
    timings.first_byte("D7", 0.1)
    assert ("D7",) in timings.ttft.series


@pytest.mark.parametrize("family", list(Timings()), ids=lambda family: family.name)
def test_buckets_rise(family: object) -> None:
    bounds = family.bounds  # type: ignore[attr-defined]
    assert list(bounds) == sorted(set(bounds))
