"""The dashboard and the alert rules name metrics and labels that there are."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from kvrelay.router.core.observing.log_line import LogLine
from kvrelay.router.core.observing.timings import Timings
from kvrelay.router.counting import Counter, Gauge, Histogram
from kvrelay.router.metrics import RouterMetrics

if TYPE_CHECKING:
    from pathlib import Path

    from tests.unit.docs.conftest import Tables

PAGE = "docs/router-observability.md"
METRIC = re.compile(r"\b(kvrelay_router_\w+)(?:\{([^}]*)\})?")
GROUPING = re.compile(r"\bby \(([^)]*)\)")


@pytest.fixture(scope="module")
def series() -> dict[str, set[str]]:
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


def expressions(root: Path) -> dict[str, list[str]]:
    """Of each file."""
    rules = yaml.safe_load((root / "examples/monitoring/router-alerts.yaml").read_text())
    dashboard = json.loads((root / "examples/monitoring/router-dashboard.json").read_text())
    return {
        "alerts": [rule["expr"] for group in rules["groups"] for rule in group["rules"]],
        "dashboard": [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]],
    }


@pytest.mark.parametrize("name", ["alerts", "dashboard"])
def test_expressions_name_series_and_labels_that_there_are(root: Path, series: dict[str, set[str]], name: str) -> None:
    for expression in expressions(root)[name]:
        named = METRIC.findall(expression)
        assert named, expression
        for metric, selector in named:
            assert metric in series, expression
            labels = set(re.findall(r"(\w+)\s*=~?\s*\"", selector)) - {"job"}
            assert labels <= series[metric], expression
        for grouping in GROUPING.findall(expression):
            labels = {label.strip() for label in grouping.split(",")} - {"job"}
            assert all(labels <= series[metric] for metric, _ in named), expression


def test_every_histogram_of_durations_is_on_the_dashboard(root: Path) -> None:
    shown = " ".join(expressions(root)["dashboard"])
    assert [family.name for family in Timings() if f"{family.name}_bucket" not in shown] == [
        "kvrelay_router_leg_seconds"
    ]


def test_the_dashboard_can_be_loaded(root: Path) -> None:
    dashboard: dict[str, Any] = json.loads((root / "examples/monitoring/router-dashboard.json").read_text())
    variables = {variable["name"] for variable in dashboard["templating"]["list"]}
    assert set(re.findall(r"\$\{?(\w+)\}?", json.dumps(dashboard))) - {"__rate_interval", "__all"} == variables
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in dashboard["panels"]]
    assert len(places) == len(set(places))


def test_every_alert_says_what_it_is_about_and_where_to_look(root: Path) -> None:
    rules = yaml.safe_load((root / "examples/monitoring/router-alerts.yaml").read_text())
    for rule in rules["groups"][0]["rules"]:
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
