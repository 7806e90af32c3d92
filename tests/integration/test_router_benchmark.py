"""The router's benchmark at a small size: it verifies what it measures, and says it in a closing JSON line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "bench_router.py"

pytestmark = pytest.mark.skipif(
    shutil.which("cc") is None or len(os.sched_getaffinity(0)) < 2, reason="needs a C compiler and two cores"
)


def run(section: str, *arguments: str) -> dict[str, Any]:
    """The section's part of the closing line."""
    command = [sys.executable, str(SCRIPT), "--section", section, "--no-peers", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    results = json.loads(done.stdout.splitlines()[-1])["results"]
    assert set(results) == {section}
    found: dict[str, Any] = results[section]
    return found


def test_requests_through_the_router_are_verified_and_timed_beside_the_engines_alone() -> None:
    found = run("spread", "--sizes", "2,512", "--connections", "3", "--rounds", "1", "--seconds", "0.2")
    for size in ("2KiB x3", "512KiB x3"):
        assert set(found[size]) == {"engines alone", "kvrelay"}
        assert found[size]["kvrelay"]["rate"] > 0
        assert found[size]["kvrelay"]["p99_us"] >= found[size]["kvrelay"]["p50_us"] > 0


def test_two_workers_are_timed_beside_one() -> None:
    found = run("workers", "--rounds", "1", "--seconds", "0.2")
    assert found["1"]["rate"] > 0
    assert found["2"]["rate"] == pytest.approx(found["two / one"] * found["1"]["rate"])


def test_streams_that_are_held_open_are_counted_with_their_memory() -> None:
    found = run("streams", "--streams", "20", "--hold", "1.2")
    assert found["streams"] == 20
    assert found["rss_mb"] > 1


def test_memory_is_watched_over_many_requests() -> None:
    found = run("flat", "--requests", "300", "--connections", "4")
    assert found["requests"] == 300
    assert found["growth"] > 0
