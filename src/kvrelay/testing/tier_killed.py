"""Run as a process of its own: children that work on a tier, each killed at another of its system or index calls.

``killed.py KIND DIRECTORY``: child number N works in ``DIRECTORY/N`` and dies at its call number N, a write halfway
through; the last one ends before its call. In ``DIRECTORY/N.said`` a line a `store` that was acknowledged, the numbers
of the objects that were. Prints how many children were killed.
"""

from __future__ import annotations

import os
import signal
import sqlite3
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvrelay.pool.tiers.core.tier import Outcome
from kvrelay.pool.tiers.disk import DiskTier
from kvrelay.pool.tiers.folder import FolderTier
from kvrelay.testing.tier_media import item

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvrelay.pool.tiers.core.tier import Item, Tier

COUNT = 24
MOST_STEPS = 2_000
DELETED = range(0, 8, 3)
WATCHED = (
    "open",
    "pwritev",
    "fdatasync",
    "ftruncate",
    "posix_fadvise",
    "close",
    "replace",
    "rename",
    "unlink",
    "mkdir",
)


def objects() -> list[Item]:
    """What is stored, in order: more than fits."""
    return [item(f"object {number}", 50_000 + 700 * number) for number in range(COUNT)]


class Steps:
    """Counts calls, and dies at one."""

    def __init__(self, last: int) -> None:
        self.left = last

    def watch(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """``call``, counted."""

        def watched(*args: Any, **kwargs: Any) -> Any:
            self.left -= 1
            if self.left == 0:
                if name == "pwritev":
                    fd, buffers, at = args
                    half = b"".join(buffers)
                    os.pwrite(fd, half[: len(half) // 2], at)
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return watched


def work(kind: str, directory: Path, step: int) -> None:
    """Fill a tier in ``directory`` and die at call number ``step``."""
    steps = Steps(step)
    said = directory.with_suffix(".said").open("w", buffering=1)

    class Connection(sqlite3.Connection):
        execute = steps.watch("execute", sqlite3.Connection.execute)
        executemany = steps.watch("executemany", sqlite3.Connection.executemany)
        close = steps.watch("close", sqlite3.Connection.close)

    connect = sqlite3.connect
    sqlite3.connect = lambda *args, **kwargs: connect(*args, factory=Connection, **kwargs)  # type: ignore[assignment]
    for name in WATCHED:
        setattr(os, name, steps.watch(name, getattr(os, name)))

    tier: Tier
    if kind == "disk":
        tier = DiskTier(directory, 1 << 20, region_bytes=200_000)
    else:
        tier = FolderTier(directory, 1 << 20, name="killed")
    items = objects()
    for first in range(0, COUNT, 4):
        batch = range(first, first + 4)
        outcomes = tier.store([items[number] for number in batch])
        stored = [number for number, outcome in zip(batch, outcomes, strict=True) if outcome is Outcome.DONE]
        said.write(" ".join(map(str, stored)) + "\n")
        if first == 8:
            tier.delete([items[number].key for number in DELETED])
            said.write("deleted\n")
    tier.close()


def main(kind: str, directory: str) -> int:
    """Fork the children, one after the other; the status of the last one."""
    for step in range(1, MOST_STEPS):
        child = os.fork()
        if not child:
            work(kind, Path(directory, str(step)), step)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status):
            sys.stdout.write(f"{step - 1}\n")
            return os.waitstatus_to_exitcode(status)
    return 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
