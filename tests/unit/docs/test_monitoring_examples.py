"""The dashboards and the alert rules name metrics and labels that there are."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from kvrelay.pool import metrics as pool_metrics
from kvrelay.pool.latency import Latencies
from kvrelay.pool.metrics import PoolMetrics
from kvrelay.pool.traffic import Traffic
from kvrelay.router.core.observing.log_line import LogLine
from kvrelay.router.core.observing.timings import Timings
from kvrelay.router.metric_types import Counter, Gauge, Histogram
from kvrelay.router.metrics import RouterMetrics
from kvrelay.testing.fake_control import FakeControl

if TYPE_CHECKING:
    from pathlib import Path

    from tests.unit.docs.conftest import Tables

    from kvrelay.pool.admin.control import TierState

PAGE = "docs/router-observability.md"
METRIC = re.compile(r"\b(kvrelay_(?:router|pool)_\w+)(?:\{([^}]*)\})?")
TARGET = {"job", "instance"}
"""Labels Prometheus adds."""
PARTS = ["router", "pool"]
GROUPING = re.compile(r"\bby \(([^)]*)\)")


def series_of_a_router() -> dict[str, set[str]]:
    """Name of every series a router shows, with its labels."""
    metrics = RouterMetrics([])
    known: dict[str, set[str]] = {}
    histograms = [(family.name, set(family.labels)) for family in metrics.timings]
    for metric in vars(metrics).values():
        if isinstance(metric, Counter):
            known[f"{metric.name}_total"] = set(metric.labelnames)
        elif isinstance(metric, Gauge):
            known[metric.name] = set(metric.labelnames)
        elif isinstance(metric, Histogram):
            histograms.append((metric.name, set(metric.labelnames)))
    for name, labels in histograms:
        known |= {f"{name}_bucket": labels | {"le"}, f"{name}_count": labels, f"{name}_sum": labels}
    return known


class Bounded(FakeControl):
    """A pool whose tier has a bound."""

    def tiers(self) -> list[TierState]:
        return [replace(tier, capacity_bytes=1) for tier in super().tiers()]


def series_of_a_pool() -> dict[str, set[str]]:
    """The same of a pool, as a scrape shows them: with tenants, their bounds, and a tier."""
    control = Bounded()
    control.set_quota("b", quota_bytes=1, max_objects=1, max_connections=1)
    latencies = Latencies()
    latencies.observe("put", 1.0)
    text = PoolMetrics(control, latencies, Traffic()).snapshot()().decode()
    families = list(text_string_to_metric_families(text))
    return {sample.name: set(sample.labels) for family in families for sample in family.samples}


SERIES = {"router": series_of_a_router, "pool": series_of_a_pool}


def alerts(root: Path, part: str) -> list[dict[str, Any]]:
    """The rules of a part."""
    groups = yaml.safe_load((root / f"examples/monitoring/{part}-alerts.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def dashboard_of(root: Path, part: str) -> dict[str, Any]:
    """The dashboard of a part."""
    loaded: dict[str, Any] = json.loads((root / f"examples/monitoring/{part}-dashboard.json").read_text())
    return loaded


def expressions(root: Path, part: str) -> dict[str, list[str]]:
    """Of each file."""
    panels = dashboard_of(root, part)["panels"]
    return {
        "alerts": [rule["expr"] for rule in alerts(root, part)],
        "dashboard": [target["expr"] for panel in panels for target in panel["targets"]],
    }


@pytest.mark.parametrize("name", ["alerts", "dashboard"])
@pytest.mark.parametrize("part", PARTS)
def test_expressions_name_series_and_labels_that_there_are(root: Path, part: str, name: str) -> None:
    series = SERIES[part]()
    for expression in expressions(root, part)[name]:
        named = METRIC.findall(expression)
        assert named, expression
        for metric, selector in named:
            assert metric in series, expression
            labels = set(re.findall(r"(\w+)\s*=~?\s*\"", selector)) - TARGET
            assert labels <= series[metric], expression
        for grouping in GROUPING.findall(expression):
            labels = {label.strip() for label in grouping.split(",")} - TARGET
            assert any(labels <= series[metric] for metric, _ in named), expression


@pytest.mark.parametrize("part", PARTS)
def test_what_an_alert_tells_to_look_at_is_there(root: Path, part: str) -> None:
    families = {re.sub("_(bucket|count|sum)$", "", name) for name in SERIES[part]()} | set(SERIES[part]())
    for rule in alerts(root, part):
        told = METRIC.findall(rule["annotations"]["description"])
        assert {metric for metric, _ in told} <= families, rule["alert"]


def test_every_metric_of_a_pool_but_its_version_is_on_its_dashboard(root: Path) -> None:
    shown = " ".join(expressions(root, "pool")["dashboard"])
    absent = {name for name in pool_metrics.described() if not re.search(rf"\b{name}(_bucket|\b)", shown)}
    assert absent == {
        "kvrelay_pool_info", "kvrelay_pool_requests_total", "kvrelay_pool_sealed_total", "kvrelay_pool_index_bytes",
        "kvrelay_pool_largest_free_bytes", "kvrelay_pool_tenant_max_connections", "kvrelay_pool_tier_objects",
    }  # fmt: skip


def test_every_histogram_of_durations_is_on_the_dashboard(root: Path) -> None:
    shown = " ".join(expressions(root, "router")["dashboard"])
    assert [family.name for family in Timings() if f"{family.name}_bucket" not in shown] == [
        "kvrelay_router_leg_seconds"
    ]


@pytest.mark.parametrize("part", PARTS)
def test_the_dashboard_can_be_loaded(root: Path, part: str) -> None:
    dashboard = dashboard_of(root, part)
    variables = {variable["name"] for variable in dashboard["templating"]["list"]}
    assert set(re.findall(r"\$\{?(\w+)\}?", json.dumps(dashboard))) - {"__rate_interval", "__all"} == variables
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in dashboard["panels"]]
    assert len(places) == len(set(places))


@pytest.mark.parametrize("part", PARTS)
def test_every_alert_says_what_it_is_about_and_where_to_look(root: Path, part: str) -> None:
    rules = alerts(root, part)
    assert len({rule["alert"] for rule in rules}) == len(rules)
    for rule in rules:
        assert re.fullmatch(r"\d+m", rule["for"])
        assert rule["labels"]["severity"] in {"page", "ticket"}
        assert set(rule["annotations"]) == {"summary", "description"}


def test_fields_of_the_access_log(tables: Tables) -> None:
    told = [name for row in tables.rows(PAGE, "The access log") for name in re.findall(r"`(\w+)`", row[0])]
    assert sorted(told) == sorted(LogLine.__struct_fields__)


def test_histograms_of_durations(tables: Tables) -> None:
    rows = tables.rows(PAGE, "Durations")
    told = {row[0].strip("`"): tuple(re.findall(r"\w+", row[1])) for row in rows}
    assert told == {family.name: family.labels for family in Timings() if family.name != "kvrelay_router_leg_seconds"}
