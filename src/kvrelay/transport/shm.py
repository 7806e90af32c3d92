"""The arena: one shared-memory mapping that the pool and the clients of its host copy from and to."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from typing import Self

from kvrelay.errors import ConfigError, KvRelayError, PoolUnavailableError
from kvrelay.sizes import format_size
from kvrelay.transport.memory import Backing, free_huge_pages, from_nodes, huge_flags, huge_pages_mend, lock

# fcntl's file-sealing constants, which Python 3.11 does not name (linux/fcntl.h).
_F_ADD_SEALS = 1_033
_F_SEAL_SEAL, _F_SEAL_SHRINK, _F_SEAL_GROW = 0x1, 0x2, 0x4


def seal_size(fd: int) -> None:
    """Let no holder of a descriptor change the file's size, ever."""
    fcntl.fcntl(fd, _F_ADD_SEALS, _F_SEAL_SHRINK | _F_SEAL_GROW | _F_SEAL_SEAL)


class Arena:
    """``size`` bytes of shared memory behind the descriptor ``fd``, mapped read-write as ``view``.

    The size is sealed: no holder of the descriptor can truncate it under another's feet.
    """

    def __init__(self, fd: int, size: int) -> None:
        self.fd = fd
        self.size = size
        try:
            # Touched now, all of it: page faults at the first use of each page would halve the speed of copies.
            self._mapping = mmap.mmap(fd, size, mmap.MAP_SHARED | mmap.MAP_POPULATE, mmap.PROT_READ | mmap.PROT_WRITE)
        except (OSError, ValueError) as error:
            os.close(fd)
            raise KvRelayError(f"cannot map an arena of {size} bytes: {error}") from error
        self.view = memoryview(self._mapping)

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
                arena = cls(fd, size)
        except KvRelayError as error:
            if page and isinstance(error.__cause__, OSError):
                raise _no_memory(size, page, error.__cause__) from error
            raise
        if backing.locked:
            try:
                lock(arena._mapping, size)
            except ConfigError:
                arena.close()
                raise
        return arena

    @classmethod
    def attach(cls, fd: int, size: int) -> Self:
        """Map an arena whose descriptor a pool sent. ``fd`` is taken over, also when this fails."""
        actual = os.fstat(fd).st_size
        if actual < size:
            os.close(fd)
            raise PoolUnavailableError(f"the pool announced an arena of {size} bytes and sent one of {actual}")
        return cls(fd, size)

    def close(self) -> None:
        """Give the descriptor and the mapping back. The mapping stays as long as somebody holds a view of it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            with contextlib.suppress(BufferError):  # a caller's view is alive: it unmaps when that is gone
                self.view.release()
                self._mapping.close()


def _no_memory(size: int, page: int, error: OSError) -> KvRelayError:
    if not page:
        return KvRelayError(f"cannot make an arena of {size} bytes: {error}")
    return ConfigError(
        f"huge_pages = {format_size(page)}: {size // page} are needed for {format_size(size)} and "
        f"{free_huge_pages(page)} are free ({error.strerror}); reserve them: {huge_pages_mend(page, size // page)}"
    )
