"""What is told of a machine before a pool starts on it, and the command that mends each thing."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

from kvrelay import hostmemory
from kvrelay.hostmemory import Limit
from kvrelay.pool.config import resolve
from kvrelay.pool.preflight import Finding, HostFacts, check, look

if TYPE_CHECKING:
    from pathlib import Path

    from kvrelay.pool.config import PoolConfig

GIB = 1 << 30


def a_host(**changes: Any) -> HostFacts:
    """A machine on which nothing is wrong."""
    host = HostFacts(
        memory=Limit(64 * GIB, "this machine"),
        lock_bytes=None,
        files=1 << 20,
        free_huge_pages={2 << 20: 0, GIB: 0},
        numa_nodes={0: 64 * GIB},
        dev_shm_bytes=32 * GIB,
        tcp_buffers={"tcp_rmem": 32 << 20, "tcp_wmem": 32 << 20},
        modules=frozenset(),
        has_nvidia=False,
        has_rdma=False,
        tier_room={},
    )
    return host._replace(**changes)


def found(flags: dict[str, Any], host: HostFacts) -> list[Finding]:
    return [finding for finding in check(resolve(flags, {}), host) if finding.level != "ok"]


def test_a_good_machine_gets_no_complaint() -> None:
    assert found({}, a_host()) == []
    assert {finding.name for finding in check(resolve({}, {}), a_host())} == {
        "memory", "catalog", "NUMA", "locked memory", "open files", "TCP buffers", "shared memory",
    }  # fmt: skip


def catalog_of(flags: dict[str, Any], host: HostFacts, objects: int | None = None, text: str = "") -> Finding:
    (finding,) = (f for f in check(resolve(flags, {}, text), host, objects) if f.name == "catalog")
    return finding


def test_what_is_kept_of_objects_beside_the_arena_is_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("kvrelay.pool.preflight.native", object())
    flags = {"unix": str(tmp_path / "s"), "size": "1GiB"}
    host = a_host(memory=Limit(2 * GIB, "this machine"))
    assert catalog_of(flags, host).told.startswith("16384 objects take 2.3 MiB, their index 368 KiB; 1 GiB are left")
    assert "their index 0" in catalog_of(flags | {"index": False}, host).told
    assert "their index 0" in catalog_of({"size": "1GiB"}, host).told, "nobody to send it to"
    full = catalog_of(flags, host, 10_000_000)
    assert (full.level, full.mend.split(",")[0]) == ("warning", "give a smaller --size")
    assert catalog_of(flags | {"huge_pages": "1GiB"}, host, 10_000_000).level == "ok", "the arena is not of that memory"
    token = tmp_path / "token"
    token.write_text("t")
    tenant = f'[[tenants]]\nname = "a"\ntoken_file = "{token}"\nmax_objects = 1000\n'
    assert catalog_of(flags, host, text=tenant).told.startswith("1000 objects take 141.6 KiB, their index 0")
    monkeypatch.setattr("kvrelay.pool.preflight.native", None)
    assert "16384 objects take 9.5 MiB, their index 0" in catalog_of(flags, host).told


@pytest.mark.parametrize(
    ("flags", "changes", "level", "told", "mend"),
    [
        ({}, {"memory": Limit(GIB, "this machine")}, "error", "4 GiB asked for, 1 GiB available", "smaller --size"),
        ({}, {"memory": Limit(GIB, "the control group /x")}, "error", "(the control group /x)", "docker run --memory"),
        ({"huge_pages": "2MiB"}, {}, "error", "2048 of 2 MiB needed, 0 free", "echo 2048 > /sys/kernel/mm/"),
        ({"huge_pages": "1GiB"}, {"free_huge_pages": {GIB: 3}}, "error", "4 of 1 GiB needed, 3 free", "echo 4 > "),
        ({"numa_nodes": "3"}, {}, "error", "no node 3 here", "name some of 0"),
        ({"numa_nodes": "0"}, {"numa_nodes": {0: GIB}}, "warning", "1 GiB free on node 0, 4 GiB asked", "--numa-nodes"),
        ({}, {"numa_nodes": {0: GIB, 1: GIB}}, "warning", "2 nodes (0, 1) and none is named", "--numa-nodes 0"),
        ({"mlock": True}, {"lock_bytes": 8 << 20}, "error", "8 MiB may be locked, mlock needs 4 GiB", "ulimit -l"),
        ({"nixl": True}, {"lock_bytes": 8 << 20}, "warning", "RDMA pins all 4 GiB", "ulimit -l unlimited"),
        ({}, {"files": 1024}, "warning", "1024 at most", "ulimit -Hn 8192"),
        ({}, {"tcp_buffers": {"tcp_rmem": 1 << 20, "tcp_wmem": 8 << 20}}, "warning", "rmem up to 1 MiB", "sysctl"),
        ({"nixl": True}, {"dev_shm_bytes": 64 << 20}, "warning", "64 MiB at /dev/shm", "remount,size=1G"),
        ({"nixl": True}, {"has_nvidia": True, "has_rdma": True}, "warning", "neither nvidia_peermem nor", "modprobe"),
        ({"listen": "0.0.0.0:1"}, {}, "warning", "whoever reaches it may read and delete all", "--token-file"),
        ({"listen": "localhost.example:1"}, {}, "warning", "whoever reaches it may read", "--token-file"),
        ({"listen": "0.0.0.0:1", "token_file": "TOKEN"}, {}, "warning", "in the clear", "--tls-cert"),
    ],
)  # fmt: skip
def test_each_problem_is_told_with_its_mend(
    flags: dict[str, Any], changes: dict[str, Any], level: str, told: str, mend: str, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text("t")
    flags = {name: str(tmp_path / "token") if value == "TOKEN" else value for name, value in flags.items()}
    (finding,) = found(flags, a_host(**changes))
    assert finding.level == level
    assert told in finding.told
    assert mend in finding.mend
    assert str(finding) == f"{finding.name}: {finding.told}; {finding.mend}"


def test_a_tier_that_its_disk_cannot_hold_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies in it already counts as room: it is the tier's own."""
    facts = os.statvfs(tmp_path)
    monkeypatch.setattr(os, "statvfs", lambda _: facts)
    path = str(tmp_path / "tier")
    free = facts.f_frsize * facts.f_bavail
    flags = {"tiers": [{"kind": "disk", "path": path, "size": str(free + 100)}]}
    config = resolve(flags, {})
    (finding,) = found(flags, look_at_tier(config))
    assert (finding.level, finding.name) == ("warning", "tier")
    assert "give the tier less" in finding.mend
    write(tmp_path, {"tier/region": "x" * 100})
    assert look_at_tier(config).tier_room == {path: free + 100}
    assert found(flags, look_at_tier(config)) == []


def look_at_tier(config: PoolConfig) -> HostFacts:
    """A good machine with the disk of this one."""
    return a_host(tier_room=look(tiers=config.tiers).tier_room)


@pytest.mark.parametrize("module", ["nvidia_peermem", "nv_peer_mem"])
def test_gpudirect_is_there_under_either_name_of_its_module(module: str) -> None:
    host = a_host(modules=frozenset({module}), has_nvidia=True, has_rdma=True)
    assert found({"nixl": True}, host) == []


def test_clients_certificates_are_as_good_as_a_token(tmp_path: Path) -> None:
    pem = tmp_path / "any.pem"
    pem.write_text("")
    flags = {"listen": "0.0.0.0:1", "tls.cert": str(pem), "tls.client_ca": str(pem)}
    assert found(flags, a_host()) == []
    del flags["tls.client_ca"]
    assert [finding.name for finding in found(flags, a_host())] == ["access"]


def test_small_buffers_of_tcp_do_not_matter_without_tcp() -> None:
    assert found({"listen": "none", "unix": "/x"}, a_host(tcp_buffers={"tcp_rmem": 1})) == []


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


MEMINFO = {"proc/meminfo": "MemTotal: 999 kB\nMemAvailable:   4194304 kB\n"}


def test_the_tightest_of_all_control_groups_bounds_the_memory_in_version_2(tmp_path: Path) -> None:
    root = write(tmp_path, {
        **MEMINFO,
        "proc/self/cgroup": "0::/outer/inner\n",
        "sys/fs/cgroup/outer/memory.max": str(2 * GIB),
        "sys/fs/cgroup/outer/memory.current": str(GIB),
        "sys/fs/cgroup/outer/memory.stat": f"anon 1\ninactive_file {GIB // 4}\n",
        "sys/fs/cgroup/outer/inner/memory.max": "max\n",
        "sys/fs/cgroup/outer/inner/memory.current": "0",
        "sys/fs/cgroup/outer/inner/memory.stat": "",
    })  # fmt: skip
    assert hostmemory.available(root) == Limit(GIB + GIB // 4, "the control group /sys/fs/cgroup/outer")


def test_version_1_and_a_container_that_sees_only_its_own_group_are_understood(tmp_path: Path) -> None:
    root = write(tmp_path, {
        **MEMINFO,
        "proc/self/cgroup": "9:name=systemd:/x\n5:cpu,memory:/docker/abc\n0::/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": str(GIB),
        "sys/fs/cgroup/memory/memory.usage_in_bytes": str(GIB // 2),
        "sys/fs/cgroup/memory/memory.stat": "inactive_file 7\ntotal_inactive_file 100\n",
    })  # fmt: skip
    assert hostmemory.available(root).left_bytes == GIB // 2 + 100


def test_without_a_limit_the_machine_bounds_it(tmp_path: Path) -> None:
    root = write(tmp_path, {
        **MEMINFO,
        "proc/self/cgroup": "4:memory:/a\n",
        "sys/fs/cgroup/memory/a/memory.limit_in_bytes": "9223372036854771712",
        "sys/fs/cgroup/memory/a/memory.usage_in_bytes": "1",
        "sys/fs/cgroup/memory/a/memory.stat": "",
    })  # fmt: skip
    assert hostmemory.available(root) == Limit(4 * GIB, "this machine")


def test_a_machine_is_read(tmp_path: Path) -> None:
    root = write(tmp_path, {
        **MEMINFO,
        "proc/self/status": "CapEff:\t0000000000004000\n",
        "proc/modules": "nvidia_peermem 16384 0 - Live 0x0\nxt 1 2\n",
        "proc/driver/nvidia/version": "",
        "proc/sys/net/ipv4/tcp_rmem": "4096\t131072\t6291456\n",
        "proc/sys/net/ipv4/tcp_wmem": "4096\t16384\t4194304\n",
        "sys/class/infiniband/mlx5_0/board_id": "",
        "sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages": "12\n",
        "sys/devices/system/node/node0/meminfo": "Node 0 MemTotal: 9 kB\nNode 0 MemFree:   2048 kB\n",
        "sys/devices/system/node/node1/meminfo": "Node 1 MemFree:   4096 kB\n",
        "dev/shm/x": "",
    })  # fmt: skip
    host = look(root)
    assert host.free_huge_pages == {2 << 20: 12}
    assert host.numa_nodes == {0: 2 << 20, 1: 4 << 20}
    assert host.tcp_buffers == {"tcp_rmem": 6291456, "tcp_wmem": 4194304}
    assert (host.lock_bytes, host.has_nvidia, host.has_rdma) == (None, True, True)
    assert "nvidia_peermem" in host.modules
    assert host.dev_shm_bytes


def test_this_machine_can_be_read() -> None:
    assert look().memory.left_bytes > 0
