"""What a benchmark says about its figures."""

from __future__ import annotations

import json

import pytest

from kvrelay.bench.report import closing_line, median, median_interval, percentile, spread, table


@pytest.mark.parametrize(("percent", "expected"), [(0, 1), (1, 1), (50, 50), (99, 99), (99.5, 100), (100, 100)])
def test_a_percentile_is_a_value_that_was_measured(percent: float, expected: float) -> None:
    assert percentile([float(value) for value in range(100, 0, -1)], percent) == expected


def test_a_single_value_is_every_percentile_and_has_no_spread() -> None:
    assert percentile([7.0], 50) == percentile([7.0], 99) == median([7.0]) == 7.0
    assert spread([7.0]) == 0.0


def test_the_spread_is_half_the_interquartile_range_over_the_median() -> None:
    assert spread([10.0, 10.0, 10.0, 10.0]) == 0.0
    assert spread([8.0, 9.0, 10.0, 11.0, 12.0]) == pytest.approx(0.15)


def test_a_medians_interval_leaves_out_as_many_values_on_either_side() -> None:
    values = list(map(float, range(1, 101)))
    assert median_interval(values[::-1]) == (40.0, 61.0)  # the ranks that tables of the binomial distribution give
    assert median_interval([2.0, 1.0]) == (1.0, 2.0)
    assert median_interval([3.0]) == (3.0, 3.0)


def test_a_table_is_aligned_markdown() -> None:
    assert table(["a", "long"], [["wide", "b"]]) == "| a    | long |\n| ---- | ---- |\n| wide | b    |"


def test_the_closing_line_says_where_and_how_it_was_measured() -> None:
    line = json.loads(closing_line("name", {"figure": 1}, repeats=3))
    assert line["benchmark"] == "name"
    assert line["results"] == {"figure": 1}
    assert line["settings"] == {"repeats": 3}
    assert {"cpu", "cores", "kernel", "python", "kvrelay", "commit", "load"} <= set(line["host"])
