"""The router's metrics are rendered as prometheus_client would render its own."""

from __future__ import annotations

from typing import Any

import prometheus_client
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from kvrelay.router import metric_types

BUCKETS = (0.005, 0.1, 1.0, 2.5, 300.0)
AMOUNTS = st.lists(st.sampled_from([0.0, 0.004, 0.005, 0.0051, 0.1, 1.0, 7.5, 300.0, 301.0]), max_size=20)


def rendered(made: Any, amounts: list[float]) -> set[str]:
    """The lines of metrics made with the classes of ``made``, but for the times at which they were made."""
    registry = CollectorRegistry()
    plain = made.Counter("plain", "A plain one", registry=registry)
    counter = made.Counter("asked", "By name", ("who", "how"), registry=registry)
    gauge = made.Gauge("level", 'With "quotes"', ("where",), registry=registry)
    alone = made.Gauge("alone", "One series", registry=registry)
    histogram = made.Histogram("seconds", "Times", ("role",), buckets=BUCKETS, registry=registry)
    times = made.Histogram("times", "One series", buckets=BUCKETS, registry=registry)
    counter.labels("never", "touched")
    for index, amount in enumerate(amounts):
        plain.inc(amount)
        counter.labels(f'w"{index % 3}', "x\ny").inc()
        gauge.labels("here").set(amount)
        gauge.labels("there").inc(2)
        gauge.labels("there").dec()
        alone.inc()
        alone.dec(0.5)
        histogram.labels(f"r{index % 2}").observe(amount)
        times.observe(amount)
    lines = generate_latest(registry).decode().splitlines()
    return {line for line in lines if "_created" not in line}


@settings(deadline=None)
@given(AMOUNTS)
def test_they_are_rendered_alike(amounts: list[float]) -> None:
    assert rendered(metric_types, amounts) == rendered(prometheus_client, amounts)


def test_a_name_is_taken_once() -> None:
    registry = CollectorRegistry()
    metric_types.Counter("twice", "First", registry=registry)
    with pytest.raises(ValueError, match="twice"):
        metric_types.Gauge("twice", "Second", registry=registry)


def test_labels_are_as_many_as_were_named() -> None:
    counter = metric_types.Counter("labelled", "Two", ("a", "b"), registry=CollectorRegistry())
    with pytest.raises(ValueError, match="labelled"):
        counter.labels("one")


def test_a_removed_series_is_not_rendered() -> None:
    registry = CollectorRegistry()
    counter = metric_types.Counter("gone", "By engine", ("engine",), registry=registry)
    counter.labels("P0").inc()
    counter.labels("P1").inc()
    counter.remove("P0")
    text = generate_latest(registry).decode()
    assert 'engine="P1"' in text
    assert 'engine="P0"' not in text
