"""A launcher of fake processes, as a subprocess that can be signalled and killed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvrelay.launch.host import free_ports
from kvrelay.launch.kernel import descendants, signal_each

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

DEADLINE_S = 30.0


class FakeUp:
    """One run of ``fake_up.py``."""

    def __init__(self, run_dir: Path, *specs: str, ready_timeout: float = DEADLINE_S, on_exit: str = "keep") -> None:
        script = str(Path(__file__).with_name("fake_up.py"))
        self.run_dir = run_dir
        self.process = subprocess.Popen(
            [sys.executable, script, str(run_dir), str(ready_timeout), on_exit, *specs],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.ready = threading.Event()
        self.messages: list[str] = []
        self._readers = [
            threading.Thread(target=self._read, args=(self.process.stdout, lambda _: self.ready.set())),
            threading.Thread(target=self._read, args=(self.process.stderr, self.messages.append)),
        ]
        for reader in self._readers:
            reader.start()

    @staticmethod
    def _read(stream: Any, take: Callable[[str], object]) -> None:
        with stream:
            for line in stream:
                take(line.rstrip("\n"))

    def wait_ready(self) -> None:
        assert self.ready.wait(DEADLINE_S), "\n".join(self.messages)

    def until(self, condition: Callable[[], Any], what: str) -> None:
        """Poll until ``condition`` holds; fails after a deadline."""
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, "\n".join([f"not in time: {what}", *self.messages])
            time.sleep(0.02)

    def said(self, text: str) -> bool:
        return any(text in line for line in self.messages)

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = json.loads((self.run_dir / "stack.json").read_text())
        return state

    def pid(self, name: str) -> int:
        pid: int = self.state()["processes"][name]["pid"]
        return pid

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        status = self.process.wait(DEADLINE_S)
        self.close()
        return status

    def close(self) -> None:
        for reader in self._readers:
            reader.join(DEADLINE_S)


@pytest.fixture
def start_up(tmp_path: Path) -> Iterator[Callable[..., FakeUp]]:
    """Start a run of fakes; whatever is left of it at the end of the test is killed."""
    runs: list[FakeUp] = []

    def start(*specs: str, run_dir: Path = tmp_path, **options: Any) -> FakeUp:
        run_dir.mkdir(exist_ok=True)
        runs.append(FakeUp(run_dir, *specs, **options))
        return runs[-1]

    yield start
    for run in runs:
        if run.process.poll() is None:
            signal_each(descendants(run.process.pid) | {run.process.pid}, signal.SIGKILL)
            run.process.wait()
        run.close()


@pytest.fixture
def ports() -> Callable[[int], list[int]]:
    """Ports nobody listens on."""
    return lambda count: list(free_ports(count, taken=set()))
