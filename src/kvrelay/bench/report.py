"""Results of a benchmark: medians, ratios, a table for people and a closing JSON line for programs."""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def median(values: Sequence[float]) -> float:
    """The median of at least one value."""
    return statistics.median(values)


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest of at least one value that ``percent`` of all are no larger than."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Where the median of what at least one value was drawn from lies, at 95 %, whatever its distribution.

    The bounds are values whose ranks are 0.98 times the root of their number away from the middle one (the binomial
    distribution of how many are below the median, by its normal approximation).
    """
    ordered = sorted(values)
    reach = 0.98 * math.sqrt(len(ordered))
    low, high = math.floor(len(ordered) / 2 - reach) - 1, math.ceil(len(ordered) / 2 + reach)
    return ordered[max(0, low)], ordered[min(len(ordered) - 1, high)]


def spread(values: Sequence[float]) -> float:
    """Half the interquartile range relative to the median: how noisy the runs were. 0 for fewer than four values."""
    if len(values) < 4:
        return 0.0
    low, middle, high = statistics.quantiles(values, n=4)
    return (high - low) / 2 / middle if middle else 0.0


def host() -> dict[str, str | int | float]:
    """Where this ran: processor, cores, load of the last minute, kernel, Python and the commit."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
    cores = sum(line.startswith("processor") for line in lines)
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "cpu": model,
        "cores": cores,
        "load": round(os.getloadavg()[0], 2),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "kvrelay": version("kvrelay"),
        "commit": git.stdout.strip() or "unknown",
    }


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with aligned columns."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    lines = [header, ["-" * width for width in widths], *rows]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    )


def closing_line(name: str, results: Mapping[str, Any], **settings: Any) -> str:
    """The last line a benchmark prints."""
    return json.dumps({"benchmark": name, "host": host(), "settings": settings, "results": results})
