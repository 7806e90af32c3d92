"""Arenas of memory of a certain kind: what one gets, and what one is told where there is none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvrelay.errors import ConfigError
from kvrelay.transport.memory import Backing, free_huge_pages, lock_limit
from kvrelay.transport.shm import Arena

HUGE = 2 << 20


def locked_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmLck:"))


def test_a_locked_arena_is_locked_until_it_is_closed() -> None:
    before = locked_bytes()
    arena = Arena.create(1 << 20, Backing(locked=True))
    assert locked_bytes() == before + (1 << 20)
    arena.close()
    assert locked_bytes() == before


def test_more_than_may_be_locked_is_refused_with_the_command_that_allows_it() -> None:
    """In a process of its own: limits and capabilities cannot be given back."""
    code = """
import ctypes, resource
resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
libc = ctypes.CDLL(None)
class Header(ctypes.Structure): _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]
libc.capset(ctypes.byref(Header(0x20080522, 0)), (ctypes.c_uint32 * 6)())
from kvrelay.errors import ConfigError
from kvrelay.transport.memory import Backing, lock_limit
from kvrelay.transport.shm import Arena
assert lock_limit() == 65536
try:
    Arena.create(1 << 20, Backing(locked=True))
except ConfigError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert "1 MiB cannot be locked" in done.stdout
    assert "this process may lock 64 KiB; allow more: `ulimit -l unlimited`" in done.stdout


def arenas() -> dict[str, str]:
    """What the kernel says of this process's mappings of arenas, by address; other tests may have left some."""
    lines = Path("/proc/self/numa_maps").read_text().splitlines()
    return {line.split()[0]: line for line in lines if "kvrelay-arena" in line}


def test_memory_of_a_node_is_of_that_node() -> None:
    before = arenas()
    try:
        arena = Arena.create(1 << 20, Backing(numa_nodes=(0,)))
    except ConfigError as error:
        pytest.skip(str(error))
    (line,) = [line for address, line in arenas().items() if address not in before]
    assert " N0=256 " in line
    arena.close()


def test_a_node_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(ConfigError, match=r"numa_nodes = 1000: (this machine has the nodes 0|the kernel forbids)"):
        Arena.create(1 << 20, Backing(numa_nodes=(1000,)))


@pytest.mark.skipif(free_huge_pages(HUGE) > 0, reason="this machine has huge pages")
def test_huge_pages_that_are_not_there_are_refused_with_the_command_that_reserves_them() -> None:
    with pytest.raises(ConfigError, match=r"2 are needed for 4 MiB and 0 are free .*; reserve them: echo 2 > /sys"):
        Arena.create(3 << 20, Backing(huge_page_bytes=HUGE))


@pytest.mark.skipif(free_huge_pages(HUGE) < 2, reason="this machine has no huge pages reserved")
def test_an_arena_of_huge_pages_has_whole_ones_and_can_be_mapped_by_a_client() -> None:
    import os

    arena = Arena.create((2 << 20) + 1, Backing(huge_page_bytes=HUGE))
    assert arena.size == 4 << 20
    client = Arena.attach(os.dup(arena.fd), arena.size)
    client.view[-1] = 7
    assert arena.view[-1] == 7
    client.close()
    arena.close()


def test_without_wishes_an_arena_is_as_before() -> None:
    arena = Arena.create(4096)
    assert (arena.size, arena.view.nbytes, lock_limit() != 0) == (4096, 4096, True)
    arena.close()
