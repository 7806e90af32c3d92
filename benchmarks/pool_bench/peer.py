"""A peer of the pool as the benchmark sees it: a driver process in the peers' environment, commanded over a pipe.

While it is not its turn a peer is stopped with all its processes (``SIGSTOP``): several keep threads spinning, and none
of them shall take a core from what is being timed.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from children import end_with_parent

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".peers" / "bin" / "python"
BENCHMARKS = ROOT / "benchmarks"
"""The driver finds there what it shares with us."""
ANSWER_S = 120.0
STOP_S = 20.0


class PeerAbsentError(Exception):
    """The peer does not run here; the message says why."""


class Peer:
    """The driver called ``driver``, started with ``options``. ``label`` is how tables call it.

    Raises:
        PeerAbsentError: it does not start.
    """

    def __init__(self, label: str, driver: str, batch_bytes: int, **options: Any) -> None:
        self.label = label
        if not PYTHON.exists():
            raise PeerAbsentError("the peers are not installed: make peers")
        self._process = subprocess.Popen(
            [str(PYTHON), str(BENCHMARKS / "peers" / "driver.py"), driver],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "PYTHONPATH": str(BENCHMARKS)},
            start_new_session=True,  # a group of its own, to be stopped and continued as one
            preexec_fn=end_with_parent,  # noqa: PLW1509 - no threads here yet; stopped or not, as its servers with it
        )
        try:
            self._answer()
            self.versions: dict[str, str] = self.call("start", batch_bytes=batch_bytes, **options)
        except (RuntimeError, OSError) as error:
            self.close()
            raise PeerAbsentError(str(error)) from None
        except BaseException:
            self.close()
            raise
        self._pause()

    def _pause(self) -> None:
        os.killpg(self._process.pid, signal.SIGSTOP)

    def _continue(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGCONT)

    @contextlib.contextmanager
    def turn(self) -> Iterator[Self]:
        """Let its processes run for the length of a ``with`` block."""
        self._continue()
        try:
            yield self
        finally:
            self._pause()

    def send(self, method: str, **arguments: Any) -> None:
        """Command without waiting; `receive` gives the answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([method, arguments]) + "\n")
        self._process.stdin.flush()

    def receive(self, timeout_s: float = ANSWER_S) -> Any:
        """The answer to the oldest command.

        Raises:
            RuntimeError: it failed, or there is none in time.
        """
        return self._answer(timeout_s)

    def call(self, method: str, **arguments: Any) -> Any:
        """Command and wait. Only in its `turn`."""
        self.send(method, **arguments)
        return self.receive()

    def _answer(self, timeout_s: float = ANSWER_S) -> Any:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], timeout_s)[0]:
            raise RuntimeError(f"{self.label} did not answer within {timeout_s:g} s")
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.label}'s driver ended with status {self._process.wait(STOP_S)}")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["ok"]

    def close(self) -> None:
        """End it and all its processes. May be called twice."""
        self._continue()
        if self._process.poll() is None:
            with contextlib.suppress(OSError, RuntimeError):
                self.send("stop")
                self._process.wait(STOP_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(STOP_S)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()


class Peers:
    """The peers that run here, and why the others do not."""

    def __init__(self) -> None:
        self.running: list[Peer] = []
        self.absent: dict[str, str] = {}
        self.versions: dict[str, str] = {}

    def add(self, label: str, driver: str, batch_bytes: int, **options: Any) -> Peer | None:
        """Start a peer, or note why it does not."""
        try:
            peer = Peer(label, driver, batch_bytes, **options)
        except PeerAbsentError as error:
            self.absent[label] = str(error)
            return None
        self.running.append(peer)
        self.versions |= {
            name: value for name, value in peer.versions.items() if name not in ("client", "UCX_TLS", "ports")
        }
        return peer

    def drop(self, peer: Peer, why: Exception) -> None:
        """Leave a peer that failed out of the rest of the run."""
        self.running.remove(peer)
        self.absent[peer.label] = str(why)
        peer.close()

    def close(self) -> None:
        """End them all."""
        for peer in self.running:
            peer.close()
        self.running = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
