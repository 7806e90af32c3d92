"""``kvrelay router serve`` as a process, with a real pool beside it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

WAIT_S = 30


@pytest.fixture
def no_blocking() -> None:
    """These tests are blocking ones, without an event loop."""


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.kill()
        process.communicate(timeout=WAIT_S)


def start(processes: list[subprocess.Popen[str]], *args: str) -> tuple[subprocess.Popen[str], str]:
    """A process and its first line, which it prints when it is ready."""
    process = subprocess.Popen(
        [sys.executable, "-m", *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ}
    )
    processes.append(process)
    assert process.stdout is not None
    return process, process.stdout.readline()


def start_stack(processes: list[subprocess.Popen[str]], *more: str) -> tuple[subprocess.Popen[str], str]:
    urls = [start(processes, "kvrelay.testing.fake_engine")[1].split()[-1] for _ in range(2)]
    process, line = start(
        processes, "kvrelay.cli.router_main", "--prefill", urls[0], "--decode", urls[1], "--port", "0", *more
    )
    found = re.search(r"ready: (http://127\.0\.0\.1:\d+)", line)
    assert found is not None, process.communicate(timeout=WAIT_S)
    return process, found[1]
