"""A real stack to test against: ``kvrelay up`` as a subprocess, its processes by name, and what its engines count.

The launcher runs with ``--stop-with-parent``, so nothing outlives a test run that is killed. Its engines rest while
they are idle: see `kvrelay.testing.resting`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from typing import TYPE_CHECKING, Any, Self

from prometheus_client.parser import text_string_to_metric_families

from kvrelay.errors import DeadlineError, KvRelayError
from kvrelay.launch.local import STATE_FILE
from kvrelay.testing.resting import environment

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

POLL_S = 0.05
STOP_S = 120.0
NOTICE_S = 15.0
SCRAPE_S = 10.0


class RunningStack:
    """One run of ``kvrelay up``. A context manager: it is stopped on exit, whatever happened."""

    def __init__(self, model: Path, run_dir: Path, arguments: Sequence[str], *, quiet: bool = True) -> None:
        """Start it and return at once; `wait_ready` waits.

        ``run_dir`` takes the logs (keep its path short: a UNIX socket goes there too). ``arguments``: more flags of
        ``kvrelay up``. With ``quiet`` its messages go to ``run_dir/up.log``, else where this process's go.
        """
        run_dir.mkdir(parents=True, exist_ok=True)
        self.run_dir = run_dir
        self._messages = run_dir / "up.log"
        command = [sys.executable, "-m", "kvrelay", "up", str(model), "--run-dir", str(run_dir), "--stop-with-parent"]
        environ = {name: value for name, value in environment().items() if not name.startswith("KVRELAY_")}
        with self._messages.open("ab") as log:
            output = log if quiet else None
            self._process = subprocess.Popen([*command, *arguments], stdout=log, stderr=output, env=environ)

    def __enter__(self) -> Self:
        """Nothing more to do."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stop it."""
        self.stop()

    @property
    def launcher(self) -> subprocess.Popen[bytes]:
        """The launcher's own process."""
        return self._process

    @property
    def base_url(self) -> str:
        """Where clients go: the router, or a plain engine."""
        url: str = self._state()["endpoint"]
        return url

    @property
    def pools(self) -> dict[str, str]:
        """Addresses of the pools that prefill engines run, by these, where several do."""
        pools: dict[str, str] = self._state()["pools"]
        return pools

    @property
    def model_name(self) -> str:
        """The model's name in requests."""
        name: str = self._state()["model"]
        return name

    @property
    def pool_address(self) -> str:
        """The pool's address; raises `KvRelayError` when there is none."""
        address: str | None = self._state()["pool"]
        if address is None:
            raise KvRelayError("this stack has no pool")
        return address

    @property
    def prefill_urls(self) -> list[str]:
        """The prefill engines, P0 first."""
        return self._urls("prefill")

    @property
    def decode_urls(self) -> list[str]:
        """The decode engines, D0 first."""
        return self._urls("decode")

    def process(self, name: str) -> int:
        """Process id of ``pool``, ``router``, ``P0``, ``D0``, ..."""
        pid: int = self._state()["processes"][name]["pid"]
        return pid

    def is_running(self, name: str) -> bool:
        """Whether the launcher has not seen it end."""
        return self._state()["processes"][name]["status"] is None

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        """Signal one process and wait until the launcher has seen it end."""
        pid = self.process(name)
        os.kill(pid, number)
        self._until(lambda: self.has_ended(name, pid), NOTICE_S, f"the end of {name}")

    def suspend(self) -> None:
        """Halt all processes but the launcher and its guards, those that others ask last; `resume` undoes it.

        A stack that is stopped meanwhile, or whose launcher is killed, ends as any other: the guards continue it.
        """
        self._signal_groups(signal.SIGSTOP, reverse=True)

    def resume(self) -> None:
        """Let all processes run, those that others ask first."""
        self._signal_groups(signal.SIGCONT)

    def _signal_groups(self, number: int, *, reverse: bool = False) -> None:
        try:
            processes = list(self._state()["processes"].values())
        except FileNotFoundError:  # it has ended, or has started nothing yet
            return
        for process in reversed(processes) if reverse else processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process["pid"], number)

    def has_ended(self, name: str, pid: int) -> bool:
        """Whether the launcher has seen the end of the process that had this id, even if it has started another."""
        state = self._state()["processes"][name]
        return state["status"] is not None or state["pid"] != pid

    def revive(self, timeout_s: float) -> None:
        """Have everything that died started again, and wait until all is ready.

        A launcher that has nothing to start is not told to: it might hear it only after the next process died.
        """
        names = list(self._state()["processes"])
        if all(map(self.is_running, names)):
            return
        self._process.send_signal(signal.SIGUSR1)
        self._until(lambda: all(map(self.is_running, names)), timeout_s, "the revival")

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until it serves. Raises `KvRelayError` with the launcher's messages when it ended or is late."""
        self._until(lambda: (self.run_dir / STATE_FILE).exists() and self._state()["ready"], timeout_s, "readiness")

    def log(self, name: str) -> str:
        """Output of one process so far; of the launcher itself: ``up``."""
        path = self.run_dir / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def logs(self) -> dict[str, str]:
        """Output of every process that has a log."""
        return {path.stem: path.read_text(errors="replace") for path in sorted(self.run_dir.glob("*.log"))}

    def stop(self) -> int:
        """Stop everything; returns the launcher's exit status. May be called twice."""
        if self._process.poll() is None:
            self._process.terminate()
        try:
            return self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()  # the guards end the rest
            return self._process.wait()

    def _urls(self, role: str) -> list[str]:
        return [process["url"] for process in self._state()["processes"].values() if process["role"] == role]

    def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = json.loads((self.run_dir / STATE_FILE).read_text())
        return state

    def _until(self, condition: Callable[[], bool], timeout_s: float, what: str) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            status = self._process.poll()
            if status is not None:
                raise KvRelayError(f"kvrelay up ended with status {status}:\n{self.log('up')}")
            if time.monotonic() >= deadline:
                raise DeadlineError(f"no {what} within {timeout_s:.0f} s:\n{self.log('up')}")
            time.sleep(POLL_S)


class Counters:
    """What an engine or a router counts, at one moment."""

    def __init__(self, base_url: str) -> None:
        """Read ``base_url/metrics``. Raises OSError when it does not answer."""
        with urllib.request.urlopen(f"{base_url}/metrics", timeout=SCRAPE_S) as answer:  # noqa: S310 - http, ours
            families = text_string_to_metric_families(answer.read().decode())
            self._samples = [sample for family in families for sample in family.samples]

    def total(self, name: str, **labels: str) -> float:
        """Sum of all samples called ``name`` with these labels; 0 if there is none."""
        return sum(
            sample.value for sample in self._samples if sample.name == name and labels.items() <= sample.labels.items()
        )

    @property
    def running(self) -> int:
        """Requests the engine is computing."""
        return int(self.total("vllm:num_requests_running"))

    @property
    def waiting(self) -> int:
        """Requests that wait for the engine, those loading KV included."""
        return int(self.total("vllm:num_requests_waiting"))

    @property
    def idle(self) -> bool:
        """Whether the engine has no request."""
        return self.running + self.waiting == 0
