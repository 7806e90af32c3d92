"""The arena: one shared-memory mapping that the pool and the clients of its host copy from and to."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import threading
from typing import Self
from weakref import WeakValueDictionary

from kvrelay.errors import ConfigError, KvRelayError, PoolUnavailableError
from kvrelay.sizes import format_size
from kvrelay.transport.memory import Backing, free_huge_pages, from_nodes, huge_flags, huge_pages_mend, lock, touch

# fcntl's file-sealing constants, which Python 3.11 does not name (linux/fcntl.h).
_F_ADD_SEALS = 1_033
_F_SEAL_SEAL, _F_SEAL_SHRINK, _F_SEAL_GROW = 0x1, 0x2, 0x4


def seal_size(fd: int) -> None:
    """Let no holder of a descriptor change the file's size, ever."""
    fcntl.fcntl(fd, _F_ADD_SEALS, _F_SEAL_SHRINK | _F_SEAL_GROW | _F_SEAL_SEAL)


class Arena:
    """``size`` bytes of shared memory, mapped read-write as ``view``.

    ``fd``: the descriptor, in the process that made it; -1 elsewhere. The size is sealed: no holder of a descriptor
    can truncate it under another's feet.
    """

    def __init__(self, fd: int, mapping: mmap.mmap) -> None:
        self.fd = fd
        self.size = len(mapping)
        self.view = memoryview(mapping)

    @classmethod
    def create(cls, size: int, backing: Backing | None = None) -> Self:
        """Make a new arena, all of it touched; with huge pages, ``size`` is rounded up to whole ones.

        Raises:
            ConfigError: there is no memory such as ``backing`` asks for; says how to get it.
        """
        backing = backing or Backing()
        page = backing.huge_page_bytes
        size += -size % page if page else 0
        try:
            fd = os.memfd_create("kvrelay-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | huge_flags(page))
        except OSError as error:
            raise _no_memory(size, page, error) from error
        try:
            os.ftruncate(fd, size)
            seal_size(fd)
        except OSError as error:
            os.close(fd)
            raise _no_memory(size, page, error) from error
        try:
            with from_nodes(backing.numa_nodes):
                mapping = _mapped(fd, size)
            if backing.locked:
                lock(mapping, size)
        except (OSError, ValueError) as error:
            os.close(fd)
            raise _no_memory(size, page, error) from error
        except ConfigError:
            os.close(fd)
            raise
        return cls(fd, mapping)

    @classmethod
    def attach(cls, fd: int, size: int) -> Self:
        """Map an arena whose descriptor a pool sent, once in a process for all who ask; may take 0.2 s a GiB.

        ``fd`` is taken over, also when this fails.

        Raises:
            PoolUnavailableError: it is smaller than ``size`` bytes.
            KvRelayError: it cannot be mapped.
        """
        try:
            status = os.fstat(fd)
            if status.st_size < size:
                raise PoolUnavailableError(
                    f"the pool announced an arena of {size} bytes and sent one of {status.st_size}"
                )
            which = status.st_dev, status.st_ino, size
            with _attaching:
                mapping = _attached.get(which)
                if mapping is None:
                    mapping = _attached[which] = _mapped(fd, size)
        except (OSError, ValueError) as error:
            raise KvRelayError(f"cannot map an arena of {size} bytes: {error}") from error
        finally:
            os.close(fd)
        return cls(-1, mapping)

    def close(self) -> None:
        """Give the descriptor and the mapping back. The mapping stays as long as somebody holds a view of it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        with contextlib.suppress(BufferError):  # a caller's view is alive: it unmaps when that is gone
            self.view.release()


_attached: WeakValueDictionary[tuple[int, int, int], mmap.mmap] = WeakValueDictionary()
"""Mappings of pools' arenas, by device, inode and size: page tables for each connection would be 2 MiB a GiB."""
_attaching = threading.Lock()


def _mapped(fd: int, size: int) -> mmap.mmap:
    """All of it, touched: page faults at the first use of each page would halve the speed of copies."""
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    mapping = mmap.mmap(fd, size, mmap.MAP_SHARED, protection)
    try:
        touch(mapping, size)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        # Linux before 5.14. Other threads of Python wait meanwhile.
        mapping = mmap.mmap(fd, size, mmap.MAP_SHARED | mmap.MAP_POPULATE, protection)
    return mapping


def _no_memory(size: int, page: int, error: OSError | ValueError) -> KvRelayError:
    if not page:
        return KvRelayError(f"cannot make an arena of {size} bytes: {error}")
    return ConfigError(
        f"huge_pages = {format_size(page)}: {size // page} are needed for {format_size(size)} and "
        f"{free_huge_pages(page)} are free ({error}); reserve them: {huge_pages_mend(page, size // page)}"
    )
