"""The benchmark of hand-overs, at its smallest size, on real vLLM."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "bench_handoff.py"


@pytest.mark.matrix
@pytest.mark.timeout(900)
def test_contestants_go_through_every_section_in_turns() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--quick", "--only", "kvrelay", "--only", "shared-storage"],
        capture_output=True,
        text=True,
        timeout=880,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout.splitlines()[-1])["results"]
    assert set(results) == {"ttft", "saving", "beside", "overlapped"}
    for section in results.values():
        assert section["absent"] == {}
        assert all(goal["value"] is not None for goal in section["goals"].values())
    assert results["ttft"]["kvrelay 257 0"]["handed_ms"] > 0
    for case in ("257 0", "257 4"):
        middle, low, high = results["ttft"][f"shared-storage {case}"]["handed_beyond_ms"]
        assert low <= middle <= high
    assert results["beside"]["shared-storage 257"]["handed_ratio"]
