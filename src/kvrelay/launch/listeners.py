"""Who listens on a port of this machine, by what Linux tells in ``/proc/net/tcp`` and ``/proc/PID/fd``."""

from __future__ import annotations

import contextlib
import ipaddress
import struct
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
ADDRESS, STATE, INODE = 1, 3, 9
"""Columns of a table."""
LISTENING = "0A"
_Ip = ipaddress.IPv4Address | ipaddress.IPv6Address
_SOCKET = "socket:["
"""How the target of ``/proc/PID/fd/N`` begins: ``socket:[17]``, the inode between the brackets."""


def listening(address: str, port: int) -> set[int] | None:
    """Inodes of the sockets that connections to ``address`` (numeric) and ``port`` come to: there or on all addresses.

    A socket on ``::`` has those to an IPv4 address where no IPv4 socket is: the kernel does not tell of IPV6_V6ONLY.
    None where the kernel does not tell at all.
    """
    asked = _plain(ipaddress.ip_address(address.partition("%")[0]))
    found: set[int] = set()
    of_both_families: set[int] = set()
    told = False
    for table in TABLES:
        with contextlib.suppress(OSError):
            rows = table.read_text().splitlines()[1:]
            told = True
            for columns in map(str.split, rows):
                host, _, hex_port = columns[ADDRESS].partition(":")
                if columns[STATE] == LISTENING and int(hex_port, 16) == port:
                    local = _address(host)
                    if local == asked or (local.is_unspecified and local.version == asked.version):
                        found.add(int(columns[INODE]))
                    elif local.is_unspecified and asked.version == 4:
                        of_both_families.add(int(columns[INODE]))
    found = found or of_both_families
    return found if told and 0 not in found else None


def open_sockets(pids: Iterable[int]) -> set[int]:
    """Inodes of the sockets these processes have open; processes and descriptors may go meanwhile."""
    found: set[int] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    target = str(descriptor.readlink())
                    if target.startswith(_SOCKET):
                        found.add(int(target[len(_SOCKET) : -1]))
    return found


def _address(text: str) -> _Ip:
    """From 32-bit words in hexadecimal, each as this machine orders its bytes."""
    words = [int(text[start : start + 8], 16) for start in range(0, len(text), 8)]
    return _plain(ipaddress.ip_address(struct.pack(f"={len(words)}I", *words)))


def _plain(address: _Ip) -> _Ip:
    """An IPv4 address that is written as an IPv6 one, as the former."""
    return (address.version == 6 and address.ipv4_mapped) or address
