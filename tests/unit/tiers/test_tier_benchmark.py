"""The benchmark of the tiers runs, small."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "bench_tiers.py"


def test_the_benchmark_moves_verified_bytes_and_ends_with_a_line_of_json(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--quick", "--dir", str(tmp_path)],
        capture_output=True, text=True, timeout=100, check=True,
    )  # fmt: skip
    closing = json.loads(done.stdout.splitlines()[-1])
    assert closing["benchmark"] == "tiers"
    tiers = closing["results"]["tiers"]
    assert {"raw file", "disk 16 KiB", "folder 1024 KiB"} <= set(tiers)
    assert all(speed > 0 for row in tiers.values() for speed in row.values())
    assert closing["results"]["pool"]["busy p50 ms"] > 0
