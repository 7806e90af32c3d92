"""What the kernel says about processes."""

from __future__ import annotations

import subprocess
import sys
import time

SAY = "from kvrelay.launch import kernel; print(kernel.began_at())"
APART_S = 0.1
"""Clock ticks, twice."""


def test_a_process_knows_when_it_began() -> None:
    before = time.time()
    said = subprocess.run([sys.executable, "-c", SAY], check=True, capture_output=True, text=True, timeout=60)
    assert before - APART_S <= float(said.stdout) <= time.time()
