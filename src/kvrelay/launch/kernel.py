"""What the Linux kernel knows about processes: who is below whom, who inherits orphans, who dies with whom."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
PARENT, SESSION, BEGAN = 1, 3, 19
"""Fields of ``/proc/PID/stat`` after the parenthesised name: state, parent, group, session, ..., clock ticks."""


def descendants(root: int) -> set[int]:
    """Ids of all processes below ``root``, orphans handed to it included."""
    parents = dict(_all_with(PARENT))
    found: set[int] = set()
    fresh = {root}
    while fresh:
        fresh = {pid for pid, parent in parents.items() if parent in fresh} - found
        found |= fresh
    return found


def session_members(leader: int) -> set[int]:
    """Ids of all processes of the session that ``leader`` began, whether or not it lives."""
    return {pid for pid, session in _all_with(SESSION) if session == leader}


def signal_each(pids: set[int], number: int) -> None:
    """Send a signal to those that still exist."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def began_at() -> float:
    """When this process began: Unix seconds, by the clock as it is now."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[BEGAN])
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))


def adopt_orphans() -> None:
    """Become the child subreaper: orphans below this process become its children."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(number: int) -> None:
    """Get signal ``number`` when the parent (the thread that started this process) ends."""
    _prctl(PR_SET_PDEATHSIG, number)


def stop_with_parent() -> None:
    """Get SIGTERM when the parent ends, or now if it has: an orphan belongs to another process."""
    parent = os.getppid()
    die_with_parent(signal.SIGTERM)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)


def _all_with(field: int) -> Iterator[tuple[int, int]]:
    """Each process with one of its numeric fields; processes may come and go meanwhile."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError, IndexError):
                # "17 (name, which may hold anything) S 4 ...": the fields follow the last parenthesis
                yield int(entry.name), int((entry / "stat").read_text().rpartition(")")[2].split()[field])


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")
