"""Processes a driver starts: quiet, logged to a file, ended with it."""

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


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Child:
    """A server process; its output goes to a file that an error quotes."""

    def __init__(self, command: Sequence[str], directory: str, environment: dict[str, str] | None = None) -> None:
        self.log = Path(tempfile.mkstemp(prefix="child-", suffix=".log", dir=directory)[1])
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=directory,
                env=environment,
                preexec_fn=_die_with_parent,  # noqa: PLW1509 - no threads here yet
            )

    def wait_until(self, ready: Callable[[], bool], what: str) -> None:
        """Ask ``ready`` until it says yes.

        Raises:
            RuntimeError: the process ended, or was not ready in time.
        """
        end = time.monotonic() + START_S
        while not ready():
            if self.process.poll() is not None or time.monotonic() > end:
                tail = self.log.read_text(errors="replace")[-400:]
                raise RuntimeError(f"{what} did not start (status {self.process.poll()}): {tail}")
            time.sleep(0.05)

    def stop(self) -> None:
        """End it."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(STOP_S)


def answers(port: int) -> bool:
    """Whether somebody listens on a loopback port."""
    try:
        socket.create_connection(("127.0.0.1", port), 1.0).close()
    except OSError:
        return False
    return True
