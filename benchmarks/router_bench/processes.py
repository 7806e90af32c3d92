"""Processes on a core of their own, what they use, and the two programs compiled for the benchmark."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from children import Child, end_with_parent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

ROUTER_CORE, LOAD_CORE = 0, 1
"""Places in the list of cores this process may use: the router has the first to itself."""
NATIVE = Path(__file__).parent / "native"
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


def on_core(place: int | None, priority: int) -> Callable[[], None]:
    """What a child does first: stay on that core (None: on both), at that nice value, and end with us."""
    allowed = cores() if place is None else [cores()[place]]

    def prepare() -> None:
        end_with_parent()
        os.setsid()
        os.sched_setaffinity(0, allowed)
        if priority:
            os.setpriority(os.PRIO_PROCESS, 0, priority)
            with suppress(OSError):  # where the kernel groups processes by session, a group's value counts
                Path("/proc/self/autogroup").write_text(str(priority), encoding="ascii")

    return prepare


class Process(Child):
    """A server on one core, or both, and what it uses."""

    def __init__(self, command: Sequence[str], directory: Path, *, place: int | None, priority: int) -> None:
        super().__init__(command, directory, prepare=on_core(place, priority))

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
        """End it, paused or not."""
        if self._process.poll() is None:
            self.resume()
        super().stop()


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
