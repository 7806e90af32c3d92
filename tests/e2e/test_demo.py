"""The demo, as a newcomer runs it. In a module of its own: its engines and another module's do not fit side by side."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEMO_S = 540


@pytest.mark.usefixtures("real_model")
def test_the_demo_ends_well_and_shows_its_proof() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "demo.py")],
        capture_output=True, text=True, timeout=DEMO_S, check=False, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Paris" in done.stdout
    assert "Proof, as the decode engine's connector reported it" in done.stdout
