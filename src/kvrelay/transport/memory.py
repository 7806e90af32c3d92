"""What the kernel can be asked about an arena's memory: huge pages, the NUMA node it comes from, locking."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import resource
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kvrelay.errors import ConfigError
from kvrelay.sizes import format_size

if TYPE_CHECKING:
    import mmap
    from collections.abc import Iterator, Sequence

_MPOL_DEFAULT, _MPOL_BIND, _MPOL_INTERLEAVE = 0, 2, 3
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
_MFD_HUGE_SHIFT = 26
_MAX_NODES = 1_024
_MADV_POPULATE_WRITE = 23
_CAP_IPC_LOCK = 1 << 14
NODES = Path("/sys/devices/system/node")
HUGE_PAGES = Path("/sys/kernel/mm/hugepages")


class Backing(NamedTuple):
    """What an arena's memory shall be made of. The default: the machine's ordinary pages, wherever they are free."""

    huge_page_bytes: int = 0
    """2 MiB or 1 GiB; 0: ordinary pages."""
    numa_nodes: tuple[int, ...] = ()
    """One: all of it from there. Several: interleaved, and from others where these are full."""
    locked: bool = False
    """Never swapped out."""


def huge_flags(page_bytes: int) -> int:
    """Flags of memfd_create for pages of this size; 0 for ordinary ones."""
    if not page_bytes:
        return 0
    return os.MFD_HUGETLB | (page_bytes.bit_length() - 1) << _MFD_HUGE_SHIFT


def free_huge_pages(page_bytes: int) -> int:
    """How many of this size are reserved and free; 0 where the machine has no such pages."""
    try:
        return int((HUGE_PAGES / f"hugepages-{page_bytes >> 10}kB/free_hugepages").read_text())
    except OSError:
        return 0


def huge_pages_mend(page_bytes: int, pages: int) -> str:
    """The command that reserves them."""
    return f"echo {pages} > {HUGE_PAGES}/hugepages-{page_bytes >> 10}kB/nr_hugepages (as root)"


@contextlib.contextmanager
def from_nodes(nodes: Sequence[int]) -> Iterator[None]:
    """Have the memory this thread touches meanwhile come from NUMA nodes; from anywhere if none is named.

    Raises:
        ConfigError: the kernel does not allow it, or there is no such node.
    """
    if not nodes:
        yield
        return
    _set_policy(_MPOL_BIND if len(nodes) == 1 else _MPOL_INTERLEAVE, nodes)
    try:
        yield
    finally:
        _set_policy(_MPOL_DEFAULT, ())


def _set_policy(mode: int, nodes: Sequence[int]) -> None:
    number = _SET_MEMPOLICY.get(platform.machine())
    shown = ",".join(map(str, nodes))
    if number is None:
        raise ConfigError(
            f"numa_nodes = {shown}: not supported on {platform.machine()}; "
            f"leave it out and start the pool with `numactl --membind={shown}`"
        )
    libc = ctypes.CDLL(None, use_errno=True)
    mask = (ctypes.c_ulong * (_MAX_NODES // (8 * ctypes.sizeof(ctypes.c_ulong))))()
    for node in nodes:
        mask[node // 64] |= 1 << node % 64
    given = ctypes.byref(mask) if nodes else None
    if libc.syscall(ctypes.c_long(number), ctypes.c_int(mode), given, ctypes.c_ulong(_MAX_NODES if nodes else 0)) == 0:
        return
    problem = ctypes.get_errno()
    if problem == errno.EPERM:
        why = "the kernel forbids it here; in a container allow it: docker run --cap-add SYS_NICE"
    elif problem == errno.EINVAL:
        why = f"this machine has the nodes {online_nodes()}; name some of these"
    else:
        why = os.strerror(problem)
    raise ConfigError(f"numa_nodes = {shown}: {why}")


def online_nodes() -> str:
    """The machine's NUMA nodes, as the kernel writes them: ``0-1``."""
    try:
        return (NODES / "online").read_text().strip()
    except OSError:
        return "0"


def lock(mapping: mmap.mmap, size: int) -> None:
    """Keep a mapping in memory.

    Raises:
        ConfigError: the limit on locked memory is too low.
    """
    if problem := _ask_kernel("mlock", mapping, size):
        raise ConfigError(
            f"mlock: {format_size(size)} cannot be locked in memory ({os.strerror(problem)}): this process may lock "
            f"{lockable()}; {LOCK_MEND}"
        )


def touch(mapping: mmap.mmap, size: int) -> None:
    """Give a mapping all of its pages now. Other threads go on meanwhile.

    Raises:
        OSError: there is not enough memory; EINVAL: Linux before 5.14 cannot be asked.
    """
    if problem := _ask_kernel("madvise", mapping, size, ctypes.c_int(_MADV_POPULATE_WRITE)):
        raise OSError(problem, os.strerror(problem))


def _ask_kernel(call: str, mapping: mmap.mmap, size: int, *more: ctypes.c_int) -> int:
    """Make a system call about a mapping, without Python's lock; the error number, 0 if it worked."""
    first = ctypes.c_char.from_buffer(mapping)
    libc = ctypes.CDLL(None, use_errno=True)
    while True:
        failed = libc[call](ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(size), *more) != 0
        problem = ctypes.get_errno() if failed else 0
        if problem != errno.EINTR:
            break
    del first  # it would keep the mapping from being closed
    return problem


LOCK_MEND = "allow more: `ulimit -l unlimited`, LimitMEMLOCK=infinity (systemd), --ulimit memlock=-1 (docker)"


def lock_limit(root: Path = Path("/")) -> int | None:
    """How many bytes this process may lock; None: any number. ``root``: where ``proc`` is."""
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = (root / "proc/self/status").read_text().splitlines()
        effective = int(next(line.split()[1] for line in lines if line.startswith("CapEff:")), 16)
        if effective & _CAP_IPC_LOCK:
            return None
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def lockable() -> str:
    """The same, for a reader."""
    limit = lock_limit()
    return "any number of bytes" if limit is None else format_size(limit)
