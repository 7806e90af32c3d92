"""The memory of a pool's lookup indexes: for each tenant two files without a name, shared with clients of this host.

The **table** says what the tenant has. Its pool writes it; the descriptor that clients are given lets them read only,
and open it anew for writing only if they run as the pool's user or as root, who could write to the pool's own memory.
In the **marks** clients note what they found and count their lookups. Both are sparse, as large as the index could ever
become, and their sizes are sealed. What lies in them: ``src/native/index.h``.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from pathlib import Path
from typing import TYPE_CHECKING, Self

from kvrelay.native import native
from kvrelay.transport.shm import seal_size

if TYPE_CHECKING:
    from collections.abc import Sequence

LEAST_OBJECT_BYTES = 64
"""An object takes no less of an arena."""
LEAST_BITS, MOST_BITS = 6, 28
BUCKET_BYTES = 64
BUCKET_OBJECTS = 5.6
"""How many names a bucket of the largest table has, on average, when the arena is full of the smallest objects."""


def clock() -> str:
    """Which steady clock this process sees; that of another time namespace has another name."""
    try:
        return str(Path("/proc/self/ns/time").readlink())
    except OSError:
        return ""


def mapped(fd: int, size: int, *, writable: bool) -> memoryview:
    """A file's memory, mapped for as long as somebody has a view of it, where huge pages of it can be.

    Raises:
        OSError: the system does not let us.
    """
    assert native is not None
    return memoryview(native.Mapping(fd, size, writable))


class IndexMemory:
    """A tenant's two files, as its pool has them: mapped read-write as ``table`` and ``marks``."""

    def __init__(self, descriptors: tuple[int, int], sizes: tuple[int, int], views: Sequence[memoryview]) -> None:
        self.descriptors = descriptors
        """To be sent to clients: of the table, read-only, and of the marks."""
        self.sizes = sizes
        self.table, self.marks = views

    @classmethod
    def create(cls, arena_bytes: int) -> Self:
        """Make files for all the objects there could be in an arena.

        Only where the native module is: without it nobody keeps an index.

        Raises:
            OSError: the system does not let us.
        """
        buckets = max(1, int(arena_bytes // LEAST_OBJECT_BYTES / BUCKET_OBJECTS))
        bits = min(max(buckets.bit_length(), LEAST_BITS), MOST_BITS)
        sizes = BUCKET_BYTES << (bits + 1), max(1 << (bits + 1), mmap.PAGESIZE)
        with contextlib.ExitStack() as undo:
            views: list[memoryview] = []
            descriptors: list[int] = []
            for name, size in zip(("kvrelay-table", "kvrelay-marks"), sizes, strict=True):
                fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
                undo.callback(os.close, fd)
                os.ftruncate(fd, size)
                seal_size(fd)
                os.fchmod(fd, 0o400)  # a descriptor for reading is not opened anew, by other users, for writing
                views.append(mapped(fd, size, writable=True))
                descriptors.append(fd)
            reading = os.open(f"/proc/self/fd/{descriptors[0]}", os.O_RDONLY | os.O_CLOEXEC)
            undo.pop_all()
        os.close(descriptors[0])
        return cls((reading, descriptors[1]), sizes, views)

    def close(self) -> None:
        """Give the descriptors back. The memory stays for as long as somebody has it mapped."""
        for fd in self.descriptors:
            os.close(fd)
        self.descriptors = (-1, -1)
