"""The benchmarks of eviction and of the allocator, at a size that only shows that they run and what they print."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


def run(name: str, *arguments: str) -> tuple[str, dict[str, Any]]:
    """What a benchmark prints, and the results in its closing line."""
    command = [sys.executable, str(BENCHMARKS / name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    closing = json.loads(done.stdout.splitlines()[-1])
    assert closing["benchmark"] == name.removeprefix("bench_").removesuffix(".py")
    return done.stdout, closing["results"]


def test_the_eviction_benchmark_compares_policies_and_draws_them(tmp_path: Path) -> None:
    trace, plot = tmp_path / "trace.jsonl", tmp_path / "plots/eviction.png"
    requests = [[0, 1], [0, 1, 2], [5, 6, 7, 8], [0, 1, 2, 3]] * 10
    trace.write_text("".join(json.dumps({"timestamp": 0, "hash_ids": ids}) + "\n" for ids in requests))
    printed, results = run("bench_eviction.py", str(trace), "--requests", "40", "--plot", str(plot))
    assert "40 requests ask for 130 chunks, 8 different ones" in printed
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert len(results) == 4
    for curves in results.values():
        assert {"LRU", "SIEVE", "the pool", "in hindsight"} <= set(curves)
        for curve in curves.values():
            assert all(0 <= usable <= found for usable, found in zip(curve["usable"], curve["objects"], strict=True))
        assert len({curve["usable"][-1] for curve in curves.values()}) == 1, "a pool that holds all finds the same"
    of_conversations = results["conversations: prefix reuse only"]
    assert of_conversations["LRU"]["usable"][-1] == round((130 - 8) / 130, 4)


def test_the_allocator_benchmark_fills_churns_and_times_every_candidate() -> None:
    printed, results = run(
        "bench_allocator.py", "--arena-mib", "64", "--turnover", "1", "--objects", "10000", "--pairs", "1000"
    )
    assert "blocks, windows" in printed
    assert set(results) == {"refill", "churn in order", "churn at random", "usable", "cost"}
    for line in results["refill"].values():
        assert all(0 < refill["again"] <= 1 >= refill["full"] > 0 for refill in line.values())
    for found in (results["churn in order"], results["churn at random"]):
        assert all(0 < phase["least"] <= phase["steady"] <= 1 for line in found.values() for phase in line)
    assert all(0 < goal["value"] <= 1 for goal in results["usable"].values())
    assert all(seconds > 0 for line in results["cost"].values() for pair in line.values() for seconds in pair)
