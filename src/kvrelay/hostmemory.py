"""How much memory this process may still use: what the machine has, or less where a control group allows less."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path("/")


class Limit(NamedTuple):
    """A bound on memory: bytes left under it, and who sets it."""

    left_bytes: int
    name: str


class _Kind(NamedTuple):
    """Where a version of control groups keeps its numbers."""

    mount: str
    limit: str
    used: str
    reclaimable: str


_KINDS = {
    "": _Kind("sys/fs/cgroup", "memory.max", "memory.current", r"^inactive_file (\d+)"),
    "memory": _Kind(
        "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", r"^total_inactive_file (\d+)"
    ),
}
"""By the controller's name in /proc/self/cgroup: version 2 has none there."""


def available(root: Path = ROOT) -> Limit:
    """The tightest of all bounds. ``root``: where ``proc`` and ``sys`` are."""
    text = (root / "proc/meminfo").read_text(encoding="ascii")
    match = re.search(r"MemAvailable:\s+(\d+) kB", text)
    assert match is not None  # every Linux since 3.14
    return min([Limit(int(match[1]) * 1024, "this machine"), *group_limits(root)])


def group_limits(root: Path = ROOT) -> Iterator[Limit]:
    """What every control group this process is in leaves, the outer ones too. Version 1 and 2.

    In a container its own group often is the root of what is mounted, whatever /proc/self/cgroup says.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        kind = next((_KINDS[name] for name in controllers.split(",") if name in _KINDS), None)
        if kind is None:
            continue
        mount = root / kind.mount
        group = mount / path.lstrip("/")
        for directory in (group, *group.parents):
            if not directory.is_relative_to(mount):
                break
            limit = _left(directory, kind)
            if limit is not None:
                shown = "/" + str(directory.relative_to(root))
                yield Limit(limit, f"the control group {shown}")


def _left(directory: Path, kind: _Kind) -> int | None:
    try:
        limit = int((directory / kind.limit).read_text())
        used = int((directory / kind.used).read_text())
        reclaimable = re.search(kind.reclaimable, (directory / "memory.stat").read_text(), re.MULTILINE)
    except (OSError, ValueError):  # no such group here; "max", no limit
        return None
    if limit >= 1 << 60:  # version 1's way to say: no limit
        return None
    return max(0, limit - used + (int(reclaimable[1]) if reclaimable else 0))
