"""Servers a benchmark starts: quiet, logged to a file, ended with it.

Standard library only: the peers' drivers, which run in an environment of their own, start theirs with it too.
"""

from __future__ import annotations

import ctypes
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

START_S = 30.0
STOP_S = 10.0
_PR_SET_PDEATHSIG = 1


def free_ports(count: int) -> list[int]:
    """Ports of the loopback address that nobody listens on now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(sock.getsockname()[1]) for sock in sockets]
    for sock in sockets:
        sock.close()
    return ports


def end_with_parent() -> None:
    """What a child does first: be killed when the one that started it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Child:
    """A server process; its output goes to a file that an error quotes."""

    def __init__(
        self,
        command: Sequence[str],
        directory: str | Path,
        *,
        environment: dict[str, str] | None = None,
        prepare: Callable[[], None] = end_with_parent,
    ) -> None:
        """``prepare``: what the child does before it is the command."""
        self.log = Path(tempfile.mkstemp(prefix="child-", suffix=".log", dir=directory)[1])
        with self.log.open("wb") as output:
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=directory,
                env=environment,
                preexec_fn=prepare,  # noqa: PLW1509 - no threads here yet
            )

    def wait_until(self, ready: Callable[[], bool], what: str) -> None:
        """Ask ``ready`` until it says yes.

        Raises:
            RuntimeError: the process ended, or was not ready in time.
        """
        end = time.monotonic() + START_S
        while not ready():
            if self._process.poll() is not None or time.monotonic() > end:
                tail = self.log.read_text(errors="replace")[-600:]
                raise RuntimeError(f"{what} did not start (status {self._process.poll()}): {tail}")
            time.sleep(0.05)

    def stop(self) -> None:
        """End it; may be called twice."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(STOP_S)


def answers(port: int) -> bool:
    """Whether somebody listens on a loopback port."""
    try:
        socket.create_connection(("127.0.0.1", port), 1.0).close()
    except OSError:
        return False
    return True
