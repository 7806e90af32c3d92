"""Routers and fake engines as processes of a test."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import httpx

WAIT_S = 60.0
"""For what a process does at once, on a machine that does a lot besides."""


class Processes:
    """Started here; whatever still runs in the end is killed."""

    def __init__(self) -> None:
        """None runs yet."""
        self._started: list[subprocess.Popen[str]] = []

    def start(self, module: str, *args: str) -> tuple[subprocess.Popen[str], str]:
        """``python -m MODULE ...`` and its first line, which it prints when it is ready; empty if it ended."""
        process = subprocess.Popen(
            [sys.executable, "-m", module, *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self._started.append(process)
        assert process.stdout is not None
        return process, process.stdout.readline()

    def engines(self, count: int) -> list[str]:
        """URLs of fake engines."""
        return [self.start("kvrelay.testing.fake_engine")[1].split()[-1] for _ in range(count)]

    def serve(self, *args: str, engines: list[str] | None = None) -> tuple[subprocess.Popen[str], str]:
        """``kvrelay router serve`` on a free port and its first line. ``engines``: a P and a D; else none is there."""
        prefill, decode = engines or ["http://127.0.0.1:1", "http://127.0.0.1:2"]
        chosen = [] if "--port" in args else ["--port", "0"]
        return self.start("kvrelay", "router", "serve", "--prefill", prefill, "--decode", decode, *chosen, *args)

    def router(self, *args: str) -> tuple[subprocess.Popen[str], str]:
        """A router in front of two fake engines, and its URL."""
        process, line = self.serve(*args, engines=self.engines(2))
        return process, self.url_in(line, process)

    def url_in(self, line: str, process: subprocess.Popen[str]) -> str:
        """The URL a router says it serves at."""
        found = re.search(r"ready: (https?://[^\s,]+)", line)
        assert found is not None, process.communicate(timeout=WAIT_S)
        return found[1]

    def close(self) -> None:
        """Kill and reap them."""
        for process in self._started:
            process.kill()
            process.communicate(timeout=WAIT_S)


def children(process: subprocess.Popen[str]) -> set[int]:
    """Its child processes."""
    told = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text(encoding="ascii")
    return {int(pid) for pid in told.split()}


def ask(url: str) -> str:
    """Ask a router for a completion, over a connection of its own. The hand-over's id."""
    answer = httpx.post(f"{url}/v1/completions", json={"prompt": "a", "max_tokens": 2}, timeout=WAIT_S)
    assert answer.status_code == 200, answer.text
    return answer.headers["x-kvrelay-handover"]
