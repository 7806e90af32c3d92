"""The disk tier's data: records appended to region files, which are dropped whole.

A region is written from its beginning to its end, once; what it holds is never moved or overwritten, so a place in it
is valid as long as the file is there. No descriptor is kept but that of the region being filled: reading opens and
closes, and meets a dropped region as a missing file.
"""

from __future__ import annotations

import contextlib
import os
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

MOST_BUFFERS = 1_000
"""In one system call (IOV_MAX is 1,024)."""
_NAME = re.compile(r"region-([0-9a-f]{8})\.kv")


class Regions:
    """Region files in ``directory``. ``sync``: a full region is flushed to the medium when it is closed."""

    def __init__(self, directory: Path, *, sync: bool = True) -> None:
        self._directory = directory
        self._sync = sync
        self._fd = -1
        self.current: int | None = None
        """The region being filled."""
        self.end = 0
        """Where the next record goes in it."""

    def path(self, region: int) -> Path:
        """The file of a region."""
        return self._directory / f"region-{region:08x}.kv"

    def sizes(self) -> dict[int, int]:
        """The regions that have a file, and the files' sizes."""
        found: dict[int, int] = {}
        with os.scandir(self._directory) as entries:
            for entry in entries:
                match = _NAME.fullmatch(entry.name)
                if match is not None:
                    found[int(match[1], 16)] = entry.stat().st_size
        return found

    def begin(self, region: int) -> None:
        """Start filling a new region."""
        assert self.current is None
        self._fd = os.open(self.path(region), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self.current, self.end = region, 0

    def write(self, buffers: Sequence[bytes | memoryview]) -> int:
        """Write records behind what has been accepted; where they end. `accept` makes it so, the next write else."""
        at = self.end
        try:
            for first in range(0, len(buffers), MOST_BUFFERS):
                at = write_fully(self._fd, buffers[first : first + MOST_BUFFERS], at)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self.end)  # on a full disk, what was half written is room for another try
            raise
        return at

    def accept(self, end: int) -> None:
        """What was written up to ``end`` stays."""
        self.end = end

    def finish(self) -> None:
        """Close the region being filled.

        Raises:
            OSError: the medium did not take it: nothing of the region can be relied on.
        """
        if self.current is None:
            return
        fd, self._fd, self.current = self._fd, -1, None
        try:
            if self._sync:
                os.fdatasync(fd)
                # The arena is the memory for what is hot; the page cache shall not keep a second copy.
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def reading(self, region: int) -> Iterator[int]:
        """A descriptor to read a region with. Raises FileNotFoundError when it has been dropped."""
        fd = os.open(self.path(region), os.O_RDONLY | os.O_CLOEXEC)
        try:
            yield fd
        finally:
            os.close(fd)

    def drop(self, region: int) -> None:
        """Give a region's room back. It must not be the one being filled."""
        assert region != self.current
        with contextlib.suppress(FileNotFoundError):
            self.path(region).unlink()


def write_fully(fd: int, buffers: Sequence[bytes | memoryview], at: int) -> int:
    """Write all of ``buffers``, at most `MOST_BUFFERS`, at ``at``; where they end."""
    rest: list[bytes | memoryview] = list(buffers)
    while rest:
        written = os.pwritev(fd, rest, at)
        at += written
        while rest and written >= len(rest[0]):
            written -= len(rest.pop(0))
        if written:
            rest[0] = memoryview(rest[0])[written:]
    return at


def read_fully(fd: int, header: bytearray, data: memoryview, at: int) -> bool:
    """Read a header and the bytes behind it; whether there were so many."""
    rest = [memoryview(header), data]
    while rest:
        if not rest[0].nbytes:
            del rest[0]
            continue
        count = os.preadv(fd, rest, at)
        if not count:
            return False
        at += count
        while rest and count >= rest[0].nbytes:
            count -= rest.pop(0).nbytes
        if count:
            rest[0] = rest[0][count:]
    return True
