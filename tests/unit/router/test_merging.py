"""Metrics of several workers as one router's."""

from __future__ import annotations

import re

from kvrelay.router.core.fleet import Role, make_engines, parse_address
from kvrelay.router.core.health import HealthSettings
from kvrelay.router.core.merging import Shown, lasting, merge, weight
from kvrelay.router.metrics import RouterMetrics, render


def engines() -> RouterMetrics:
    return RouterMetrics(make_engines(Role.DECODE, [parse_address("http://127.0.0.1:1")], HealthSettings()))


def value(text: bytes, series: str) -> float:
    found = re.search(rf"^{re.escape(series)} (\S+)$", text.decode(), re.MULTILINE)
    assert found is not None, series
    return float(found[1])


def test_one_workers_snapshot_is_rendered_as_its_own_text() -> None:
    metrics = engines()
    metrics.requests.labels("/v1/completions", "ok").inc(3)
    metrics.timings.first_byte("D0", 0.3)
    metrics.pool_up.set(1)
    assert set(render(metrics.snapshot()).splitlines()) == set(metrics.render().splitlines())
    assert render(merge([metrics.snapshot()])) == render(metrics.snapshot())


def test_what_is_counted_is_added_up_and_what_is_a_state_is_the_worst() -> None:
    one, other = engines(), engines()
    one.requests.labels("/v1/completions", "ok").inc(3)
    other.requests.labels("/v1/completions", "ok").inc(4)
    other.requests.labels("/v1/completions", "error").inc()
    one.timings.first_byte("D0", 0.3)
    other.timings.first_byte("D0", 40.0)
    one.in_flight[Role.DECODE].set(2)
    other.in_flight[Role.DECODE].set(5)
    one.pool_up.set(1)
    other.pool_up.set(0)
    other.circuit_open.set(1)
    text = render(merge([one.snapshot(), other.snapshot()]))
    assert value(text, 'kvrelay_router_requests_total{endpoint="/v1/completions",outcome="ok"}') == 7
    assert value(text, 'kvrelay_router_requests_total{endpoint="/v1/completions",outcome="error"}') == 1
    assert value(text, 'kvrelay_router_ttft_seconds_bucket{le="0.5",worker="D0"}') == 1
    assert value(text, 'kvrelay_router_ttft_seconds_count{worker="D0"}') == 2
    assert value(text, 'kvrelay_router_in_flight{role="decode"}') == 7
    assert value(text, "kvrelay_router_pool_up") == 0
    assert value(text, "kvrelay_router_circuit_open") == 1


def test_what_outlives_a_worker_is_what_it_counted() -> None:
    metrics = engines()
    metrics.requests.labels("/v1/completions", "ok").inc(3)
    metrics.in_flight[Role.DECODE].set(2)
    left = lasting(metrics.snapshot())
    assert weight(left) == weight(metrics.snapshot()) == 3
    assert {family.kind for family in left} == {"counter", "histogram"}
    grown = merge([metrics.snapshot(), left])
    assert weight(grown) == 6
    assert all(isinstance(family, Shown) for family in grown)
