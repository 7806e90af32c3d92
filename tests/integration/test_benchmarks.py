"""The benchmarks and the soak, at a small size: they verify what they measure, and say it in a closing JSON line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def run(script: str, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Exit status and closing line of a script."""
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / script), *arguments], capture_output=True, text=True, timeout=180, check=False
    )
    lines = done.stdout.splitlines()
    assert lines, done.stderr
    try:
        return done.returncode, json.loads(lines[-1])
    except ValueError:
        raise AssertionError(f"{done.stdout}\n{done.stderr}") from None


@pytest.mark.parametrize(
    ("section", "arguments", "goal"),
    [
        ("tcp", ["--sizes", "16,256", "--batch-mib", "2"], "tcp put 256 KiB / raw socket"),
        ("shm", ["--sizes", "16,64", "--batch-mib", "2"], "shm get 64 KiB / memcpy"),
        ("lookup", ["--lookups", "20"], "count_prefix p99 / p50 beside tcp transfers"),
        ("scale", ["--objects", "30000"], "lookup among 30,000 / lookup among 10,000"),
        ("crowd", ["--clients", "4", "--seconds", "0.4"], "tcp: slowest client / mean"),
    ],
)
def test_a_section_measures_its_goals(section: str, arguments: list[str], goal: str) -> None:
    status, line = run("bench_pool.py", "--section", section, "--no-peers", "--repeats", "2", *arguments)
    assert status == 0
    assert set(line["results"]) == {section}
    assert line["results"][section]["goals"][goal]["value"] > 0
    assert {"cpu", "cores", "kernel", "python", "kvrelay", "commit"} <= set(line["host"])


@pytest.mark.timeout(240)
def test_a_short_soak_ends_with_nothing_left_and_no_wrong_byte() -> None:
    status, line = run("soak_pool.py", "--seconds", "20", "--processes", "3", "--kill-every", "2", "--size", "64MiB")
    assert line["results"]["violations"] == []
    assert status == 0
    assert line["results"]["counts"]["processes killed"] >= 5
    assert line["results"]["counts"]["bytes verified"] > 1 << 20


def test_moves_of_paged_kv_are_verified_and_measured_beside_others() -> None:
    pytest.importorskip("numpy")
    options = ("--layers", "2", "--tokens", "130", "--block-tokens", "32", "--repeats", "2")
    status, line = run("bench_paged.py", *options)
    assert status == 0
    moved = line["results"]["blocks of 32"]
    assert {"NumPy twin, native", "NumPy twin, canonical", "memcpy"} <= set(moved)
    assert all(figures["load ms"] > 0 and figures["save ms"] > 0 for figures in moved.values())


def test_kv_aware_choices_are_verified_and_measured() -> None:
    status, line = run("bench_kv_choice.py", "--quick", "--engines", "9", "--tokens", "700")
    assert status == 0
    assert len(line["results"]["cases"]) == 6
    assert all(case["median us"] > 0 for case in line["results"]["cases"].values())


def test_what_watching_costs_is_measured_and_what_comes_out_is_counted() -> None:
    status, line = run("bench_observing.py", "--requests", "100")
    assert status == 0
    assert (line["results"]["lines"], line["results"]["spans"]) == (100, 500)
    assert all(case["loop median us"] > 0 for case in line["results"]["cases"].values())
