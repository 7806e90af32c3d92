"""What Prometheus is given: parsed by its own parser, named by its rules, right in its numbers."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from prometheus_client.parser import text_string_to_metric_families

from kvrelay.pool.latency import BOUNDS_S, Latencies
from kvrelay.pool.metrics import ELSEWHERE, STATS, PoolMetrics
from kvrelay.pool.traffic import Traffic

if TYPE_CHECKING:
    import httpx

    from kvrelay.testing.fake_control import FakeControl

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def samples(control: FakeControl, latencies: Latencies | None = None, traffic: Traffic | None = None) -> Samples:
    text = PoolMetrics(control, latencies or Latencies(), traffic or Traffic()).snapshot()().decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_a_number_and_its_metric_have_one_name() -> None:
    for name, metric in STATS.items():
        assert metric.name == f"kvrelay_pool_{name}" or metric.labels


def test_every_number_of_stat_is_a_metric(control: FakeControl) -> None:
    assert set(control.values) - ELSEWHERE == set(STATS)


def test_every_number_arrives_under_its_name_and_labels(control: FakeControl) -> None:
    control.values = {name: number for number, name in enumerate(control.values, start=1)}
    found = samples(control)
    for name in control.values.keys() - ELSEWHERE:
        plain = STATS[name]
        key = plain.name + ("_total" if plain.counter else ""), tuple(sorted(plain.labels))
        assert found[key] == control.values[name], name


def test_names_follow_the_rules_of_prometheus(control: FakeControl) -> None:
    latencies = Latencies()
    latencies.observe("put", 1.0)
    text = PoolMetrics(control, latencies, Traffic()).snapshot()().decode()
    for family in text_string_to_metric_families(text):
        if not family.name.startswith("kvrelay_"):
            assert family.name.startswith("process_")
            continue
        assert re.fullmatch(r"kvrelay_pool_[a-z]+(_[a-z]+)*", family.name)
        assert family.documentation
        assert not family.documentation.endswith(".")
        assert not re.search(r"_(total|count|sum|bucket|ms|kb|mb)$", family.name), family.name
        assert family.type in {"gauge", "counter", "histogram"}


def test_fragmentation_is_the_share_of_what_is_free_that_one_object_can_have(control: FakeControl) -> None:
    name = ("kvrelay_pool_largest_free_ratio", ())
    control.values |= {"free_bytes": 1000, "largest_free_bytes": 250}
    assert samples(control)[name] == 0.25
    control.values |= {"free_bytes": 0, "largest_free_bytes": 0}
    assert samples(control)[name] == 1.0


def test_tenants_and_tiers_have_series_of_their_own_and_none_for_what_has_no_bound(control: FakeControl) -> None:
    control.tenants_by_name["b"].objects = {b"k": 77}
    found = samples(control)
    assert found["kvrelay_pool_tenant_used_bytes", (("tenant", "b"),)] == 77
    assert found["kvrelay_pool_tenant_quota_bytes", (("tenant", "b"),)] == 1 << 20
    assert ("kvrelay_pool_tenant_quota_bytes", (("tenant", "default"),)) not in found
    assert found["kvrelay_pool_tenant_connections", (("tenant", "b"),)] == 2
    assert found["kvrelay_pool_tenant_max_connections", (("tenant", "b"),)] == 7
    assert ("kvrelay_pool_tenant_max_objects", (("tenant", "b"),)) not in found
    assert found["kvrelay_pool_tier_hits_total", (("tier", "ssd"),)] == 5
    assert found["kvrelay_pool_tier_throttled_seconds_total", (("tier", "ssd"),)] == 0.125
    assert ("kvrelay_pool_tier_capacity_bytes", (("tier", "ssd"),)) not in found


def test_latencies_become_a_cumulative_histogram(control: FakeControl) -> None:
    latencies = Latencies()
    for seconds in (10e-6, 25e-6, 26e-6, 0.3, 99.0):
        latencies.observe("get", seconds)
    found = samples(control, latencies)

    def below(bound: str) -> float:
        return found["kvrelay_pool_request_seconds_bucket", (("le", bound), ("operation", "get"))]

    assert [below("2.5e-05"), below("5e-05"), below("0.25"), below("0.5"), below("10.0"), below("+Inf")] == [
        2, 3, 3, 4, 4, 5,
    ]  # fmt: skip
    assert found["kvrelay_pool_request_seconds_count", (("operation", "get"),)] == 5
    assert found["kvrelay_pool_request_seconds_sum", (("operation", "get"),)] == sum((10e-6, 25e-6, 26e-6, 0.3, 99.0))
    assert list(BOUNDS_S) == sorted(set(BOUNDS_S))


def test_bytes_are_told_by_direction_and_transport(control: FakeControl) -> None:
    traffic = Traffic()
    traffic.received["tls"] = 7
    traffic.sent["unix"] = 9
    found = samples(control, traffic=traffic)
    moved = {labels: value for (name, labels), value in found.items() if name == "kvrelay_pool_bytes_total"}
    assert len(moved) == 6
    assert {labels: value for labels, value in moved.items() if value} == {
        (("direction", "received"), ("transport", "tls")): 7,
        (("direction", "sent"), ("transport", "unix")): 9,
    }


async def test_a_scrape_asks_the_pool_once(api: httpx.AsyncClient, control: FakeControl) -> None:
    answer = await api.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=")
    assert control.calls == 1
