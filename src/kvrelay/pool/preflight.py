"""What can be known to be wrong, or slow, before a pool starts: each with the command that mends it.

`look` reads the machine, `check` judges it for one configuration; `kvrelay pool check` prints the findings, and
`kvrelay pool serve` refuses to start on an error and logs the warnings.
"""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from kvrelay import hostmemory
from kvrelay.hosts import is_loopback
from kvrelay.native import native
from kvrelay.pool.core.pool import DEFAULT_TENANT
from kvrelay.sizes import format_size, parse_size
from kvrelay.transport.address import parse_host_port
from kvrelay.transport.memory import LOCK_MEND, huge_pages_mend, lock_limit

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kvrelay.pool.config import PoolConfig
    from kvrelay.pool.tiers.config import TierConfig

GOOD_TCP_BUFFER_BYTES = 4 << 20
"""Below this, one connection does not fill a fast link with a round trip of a millisecond."""
NIXL_SHM_BYTES = 256 << 20
"""UCX keeps its queues in /dev/shm; containers get 64 MiB unless they ask."""
GOOD_FILES = 8_192
ROW_BYTES, PURE_ROW_BYTES = 145, 610
"""What the catalog keeps of an object, with and without the native module."""
NAME_BYTES = 23
"""What an object takes of a shared index, at most."""
USUAL_OBJECT_BYTES = 64 << 10
"""Of what size objects are taken to be at least: KV of some tokens is larger."""
PEERMEM = ("nvidia_peermem", "nv_peer_mem")
"""The module that lets a network card read a GPU's memory, under its newer and its older name."""
Level = Literal["ok", "warning", "error"]


class Finding(NamedTuple):
    """One thing looked at. ``mend``: what to do about it; empty where nothing is wrong."""

    level: Level
    name: str
    told: str
    mend: str = ""

    def __str__(self) -> str:
        return f"{self.name}: {self.told}" + (f"; {self.mend}" if self.mend else "")


class HostFacts(NamedTuple):
    """What `look` found on the machine. Sizes in bytes; None: could not be read, or has no limit (``lock_bytes``)."""

    memory: hostmemory.Limit
    lock_bytes: int | None
    files: int
    free_huge_pages: dict[int, int]
    """By the page's size."""
    numa_nodes: dict[int, int | None]
    """Node to its free memory."""
    dev_shm_bytes: int | None
    tcp_buffers: dict[str, int]
    """The most one connection's buffer grows to, by sysctl's name."""
    modules: frozenset[str]
    has_nvidia: bool
    has_rdma: bool
    tier_room: dict[str, int]
    """What may lie in a disk tier's directory: what does, and what the file system has left, by its path."""


def look(root: Path = hostmemory.ROOT, *, tiers: Iterable[TierConfig] = ()) -> HostFacts:
    """Read the machine, and the disks of its ``tiers``. ``root``: where ``proc``, ``sys`` and ``dev`` are."""
    rooms = {tier.path: _tier_room(Path(tier.path)) for tier in tiers if tier.kind == "disk"}
    _, hard_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    return HostFacts(
        memory=hostmemory.available(root),
        lock_bytes=lock_limit(root),
        files=1 << 30 if hard_files == resource.RLIM_INFINITY else hard_files,
        free_huge_pages=dict(_huge_pages(root / "sys/kernel/mm/hugepages")),
        numa_nodes=dict(_nodes(root / "sys/devices/system/node")),
        dev_shm_bytes=_file_system_bytes(root / "dev/shm"),
        tcp_buffers=dict(_tcp_buffers(root / "proc/sys/net/ipv4")),
        modules=frozenset(line.split()[0] for line in _lines(root / "proc/modules")),
        has_nvidia=(root / "proc/driver/nvidia").exists(),
        has_rdma=any((root / "sys/class/infiniband").glob("*")),
        tier_room={path: room for path, room in rooms.items() if room is not None},
    )


def check(config: PoolConfig, host: HostFacts, objects: int | None = None) -> list[Finding]:
    """Judge the machine for a pool of this configuration. ``objects``: how many it is to hold, if that is known."""
    return [
        *_memory(config, host),
        *_catalog(config, host, objects),
        *_huge(config, host),
        *_numa(config, host),
        *_lock(config, host),
        *_files(host),
        *_tcp(config, host),
        *_dev_shm(config, host),
        *_peermem(config, host),
        *_tiers(config, host),
        *_tokens(config),
    ]


def _memory(config: PoolConfig, host: HostFacts) -> Iterator[Finding]:
    size = config.settings.size
    if config.settings.huge_pages is not None:
        return  # they were set aside already
    told = f"{format_size(size)} asked for, {format_size(host.memory.left_bytes)} available ({host.memory.name})"
    if size > host.memory.left_bytes:
        group = "" if host.memory.name == "this machine" else ", or raise that group's limit (docker run --memory)"
        yield Finding("error", "memory", told, f"give a smaller --size{group}")
    else:
        yield Finding("ok", "memory", told)


def _catalog(config: PoolConfig, host: HostFacts, objects: int | None) -> Iterator[Finding]:
    settings = config.settings
    objects = _expected_objects(config) if objects is None else objects
    catalog = objects * (ROW_BYTES if native is not None else PURE_ROW_BYTES)
    shown = native is not None and settings.index and settings.unix and any(tenant.shm for tenant in config.tenants)
    index = objects * NAME_BYTES if shown else 0
    arena = 0 if settings.huge_pages is not None else settings.size
    left = max(0, host.memory.left_bytes - arena)
    told = (
        f"{objects} objects take {format_size(catalog)}, their index {format_size(index)}; "
        f"{format_size(left)} are left beside the arena"
    )
    if catalog + index > left and arena <= host.memory.left_bytes:
        mend = "give a smaller --size, bound the tenants with max_objects, or say how many there will be: --objects N"
        yield Finding("warning", "catalog", told, mend)
    else:
        yield Finding("ok", "catalog", told)


def _expected_objects(config: PoolConfig) -> int:
    most = [tenant.quota.max_objects for tenant in config.tenants]
    fit = config.settings.size // USUAL_OBJECT_BYTES
    return fit if None in most else min(fit, sum(filter(None, most)))


def _huge(config: PoolConfig, host: HostFacts) -> Iterator[Finding]:
    if config.settings.huge_pages is None:
        return
    page = parse_size(config.settings.huge_pages)
    needed, free = -(-config.settings.size // page), host.free_huge_pages.get(page, 0)
    told = f"{needed} of {format_size(page)} needed, {free} free"
    if needed > free:
        yield Finding("error", "huge pages", told, f"reserve them: {huge_pages_mend(page, needed)}")
    else:
        yield Finding("ok", "huge pages", told)


def _numa(config: PoolConfig, host: HostFacts) -> Iterator[Finding]:
    asked, known = config.settings.numa_nodes, host.numa_nodes
    shown = ", ".join(map(str, sorted(known))) or "0"
    absent = [node for node in asked if known and node not in known]
    if absent:
        yield Finding("error", "NUMA", f"no node {absent[0]} here", f"name some of {shown} with --numa-nodes")
        return
    free = sum(known.get(node) or 0 for node in asked)
    if asked and known and free < config.settings.size:
        told = (
            f"{format_size(free)} free on node {', '.join(map(str, asked))}, {format_size(config.settings.size)} asked"
        )
        yield Finding("warning", "NUMA", told, "give a smaller --size or more --numa-nodes: one node alone runs out")
    elif not asked and len(known) > 1:
        told = f"{len(known)} nodes ({shown}) and none is named: the arena lies where memory was free"
        yield Finding("warning", "NUMA", told, "name the network card's node (--numa-nodes 0), or all to interleave")
    else:
        yield Finding("ok", "NUMA", f"nodes: {shown}; the arena on {', '.join(map(str, asked)) or 'any'}")


def _lock(config: PoolConfig, host: HostFacts) -> Iterator[Finding]:
    limit, settings = host.lock_bytes, config.settings
    told = "no limit" if limit is None else f"{format_size(limit)} may be locked"
    if (limit is None or limit >= settings.size) or not (settings.mlock or settings.nixl):
        yield Finding("ok", "locked memory", told)
    elif settings.mlock:
        yield Finding("error", "locked memory", f"{told}, mlock needs {format_size(settings.size)}", LOCK_MEND)
    else:
        yield Finding("warning", "locked memory", f"{told}, RDMA pins all {format_size(settings.size)}", LOCK_MEND)


def _files(host: HostFacts) -> Iterator[Finding]:
    if host.files < GOOD_FILES:
        mend = f"allow more: `ulimit -Hn {GOOD_FILES}`, LimitNOFILE={GOOD_FILES} (systemd), --ulimit nofile (docker)"
        yield Finding("warning", "open files", f"{host.files} at most: that many clients, about", mend)
    else:
        yield Finding("ok", "open files", f"{host.files} at most")


def _tcp(config: PoolConfig, host: HostFacts) -> Iterator[Finding]:
    if config.settings.listen == "none" or not host.tcp_buffers:
        return
    told = ", ".join(f"{name} up to {format_size(size)}" for name, size in sorted(host.tcp_buffers.items()))
    small = [name for name, size in sorted(host.tcp_buffers.items()) if size < GOOD_TCP_BUFFER_BYTES]
    if small:
        mend = " and ".join(f"`sysctl -w net.ipv4.{name}='4096 131072 16777216'`" for name in small)
        yield Finding("warning", "TCP buffers", told, f"for links faster than 10 Gbit/s: {mend}")
    else:
        yield Finding("ok", "TCP buffers", told)


def _dev_shm(config: PoolConfig, host: HostFacts) -> Iterator[Finding]:
    if host.dev_shm_bytes is None:
        return
    told = format_size(host.dev_shm_bytes)
    if config.settings.nixl and host.dev_shm_bytes < NIXL_SHM_BYTES:
        mend = "make it larger: `mount -o remount,size=1G /dev/shm`, --shm-size 1g (docker)"
        yield Finding("warning", "shared memory", f"{told} at /dev/shm: NIXL's may not fit", mend)
    else:
        yield Finding("ok", "shared memory", f"{told} at /dev/shm (the arena itself does not need it)")


def _peermem(config: PoolConfig, host: HostFacts) -> Iterator[Finding]:
    if not (config.settings.nixl and host.has_nvidia and host.has_rdma):
        return
    loaded = [name for name in PEERMEM if name in host.modules]
    if loaded:
        yield Finding("ok", "GPUDirect", f"module {loaded[0]} is loaded")
    else:
        told = f"neither {PEERMEM[0]} nor {PEERMEM[1]} is loaded: RDMA does not reach GPU memory"
        yield Finding("warning", "GPUDirect", told, f"`modprobe {PEERMEM[0]}` (older drivers: `modprobe {PEERMEM[1]}`)")


def _tiers(config: PoolConfig, host: HostFacts) -> Iterator[Finding]:
    for tier in config.tiers:
        room = host.tier_room.get(tier.path)
        if room is None or tier.size_bytes is None:
            continue
        told = f"{format_size(tier.size_bytes)} for {tier.path}, {format_size(room)} on that disk"
        if tier.size_bytes > room:
            yield Finding("warning", "tier", told, "give the tier less: on a full disk it holds less than it was given")
        else:
            yield Finding("ok", "tier", told)


def _tokens(config: PoolConfig) -> Iterator[Finding]:
    settings = config.settings
    if settings.listen != "none" and not is_loopback(parse_host_port(settings.listen).host):
        if not config.needs_token and settings.tls.client_ca is None:
            mend = "give --token-file FILE, or keep --listen on loopback"
            yield Finding("warning", "access", f"{settings.listen}: whoever reaches it may read and delete all", mend)
        elif settings.tls.cert is None:
            mend = "give --tls-cert FILE, or use a network of your own"
            yield Finding("warning", "access", f"{settings.listen}: tokens and KV travel in the clear", mend)
    for tenant in config.tenants:
        if tenant.shm and tenant.name != DEFAULT_TENANT and len(config.tenants) > 1 and settings.unix:
            told = f"tenant {tenant.name!r} has shared memory: it can read and change every tenant's bytes"
            yield Finding("warning", "access", told, "set shm = false unless you trust it with them")


def _huge_pages(directory: Path) -> Iterator[tuple[int, int]]:
    for entry in directory.glob("hugepages-*kB"):
        kib = int(entry.name.removeprefix("hugepages-").removesuffix("kB"))
        yield kib << 10, int("".join(_lines(entry / "free_hugepages")) or 0)


def _nodes(directory: Path) -> Iterator[tuple[int, int | None]]:
    for entry in directory.glob("node[0-9]*"):
        free = [line.split() for line in _lines(entry / "meminfo") if " MemFree:" in line]
        yield int(entry.name.removeprefix("node")), int(free[0][3]) << 10 if free else None


def _tcp_buffers(directory: Path) -> Iterator[tuple[str, int]]:
    for name in ("tcp_rmem", "tcp_wmem"):
        for line in _lines(directory / name):
            yield name, int(line.split()[2])


def _file_system_bytes(directory: Path) -> int | None:
    try:
        facts = os.statvfs(directory)
    except OSError:
        return None
    return facts.f_frsize * facts.f_blocks


def _tier_room(directory: Path) -> int | None:
    at = directory.absolute()
    try:
        held = sum(file.stat().st_size for file in at.rglob("*") if file.is_file()) if at.is_dir() else 0
        facts = os.statvfs(next(place for place in (at, *at.parents) if place.exists()))
    except OSError:
        return None
    return held + facts.f_frsize * facts.f_bavail


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
