"""Processes on a core of their own, what they use, and the two programs compiled for the benchmark."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

ROUTER_CORE, LOAD_CORE = 0, 1
"""Places in the list of cores this process may use: the router has the first to itself."""
NATIVE = Path(__file__).parent / "native"
START_S, STOP_S = 30.0, 10.0
_PR_SET_PDEATHSIG = 1
_TICKS = os.sysconf("SC_CLK_TCK")


def build(directory: Path) -> dict[str, Path]:
    """Compile the mock engines and the load generator.

    Raises:
        SystemExit: there is no C compiler, or it does not take them.
    """
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise SystemExit("bench-router compiles its mock engines and load generator: install a C compiler (cc)")
    built = {}
    for name in ("engines", "load"):
        built[name] = directory / name
        command = [compiler, "-O2", "-D_GNU_SOURCE", "-o", str(built[name]), str(NATIVE / f"{name}.c")]
        subprocess.run(command, check=True)
    return built


def cores() -> list[int]:
    """The two that are used.

    Raises:
        SystemExit: there is only one.
    """
    found = sorted(os.sched_getaffinity(0))
    if len(found) < 2:
        raise SystemExit("bench-router needs two cores: one for the router alone, one for engines and load")
    return found[:2]


def free_ports(count: int) -> list[int]:
    """Ports of the loopback address that nobody listens on now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(sock.getsockname()[1]) for sock in sockets]
    for sock in sockets:
        sock.close()
    return ports


def on_core(place: int, priority: int) -> Callable[[], None]:
    """What a child does first: stay on that core, at that nice value, and end with us."""
    core = cores()[place]

    def prepare() -> None:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        os.setsid()
        os.sched_setaffinity(0, {core})
        if priority:
            os.setpriority(os.PRIO_PROCESS, 0, priority)
            with suppress(OSError):  # where the kernel groups processes by session, a group's value counts
                Path("/proc/self/autogroup").write_text(str(priority), encoding="ascii")

    return prepare


class Process:
    """A server on one core; its output goes to a file that an error quotes."""

    def __init__(self, name: str, command: Sequence[str], directory: Path, *, place: int, priority: int) -> None:
        self.log = directory / f"{name}.log"
        with self.log.open("wb") as output:
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                preexec_fn=on_core(place, priority),  # noqa: PLW1509 - no threads here
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

    def cpu_s(self) -> float:
        """Processor time of the process and those below it, so far."""
        return sum(_cpu_ticks(pid) for pid in _tree(self._process.pid)) / _TICKS

    def rss_bytes(self) -> int:
        """Resident memory of the process and those below it."""
        return sum(_rss_bytes(pid) for pid in _tree(self._process.pid))

    def pause(self) -> None:
        """Stop it and those below it (SIGSTOP) while it is not their turn."""
        for pid in _tree(self._process.pid):
            os.kill(pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let them go on."""
        for pid in _tree(self._process.pid):
            os.kill(pid, signal.SIGCONT)

    def stop(self) -> None:
        """End it."""
        if self._process.poll() is None:
            self.resume()
            self._process.terminate()
            try:
                self._process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(STOP_S)


def _tree(pid: int) -> Iterator[int]:
    yield pid
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
        children = [(thread / "children").read_text(encoding="ascii") for thread in threads]
    except OSError:
        return  # it has ended
    for child in " ".join(children).split():
        yield from _tree(int(child))


def _cpu_ticks(pid: int) -> int:
    """User and system time, and that of children that have been waited for: fields 14 to 17 of `/proc/PID/stat`."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return sum(int(field) for field in fields[11:15])


def _rss_bytes(pid: int) -> int:
    pages = Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
