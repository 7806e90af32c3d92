"""Sections ``tcp`` and ``shm``: put and get of batches, beside peers and floors, interleaved.

A contestant's turn is two rounds, of which the second is timed: in the first it meets caches full of another's bytes,
and processes that the kernel has yet to spread over the processors. Who begins changes from repeat to repeat.
"""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kvrelay.bench.report import median, spread
from kvrelay.bench.section import Goal, Section, ratio
from kvrelay.client.blocking import PoolClient
from kvrelay.testing.pool import pool_process
from pool_bench.floors import Memcpy, RawStream, cut, timed
from pool_bench.peer import Peers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pool_bench.peer import Peer

KIB = 1 << 10
OURS = "kvrelay"
INFINISTORE = "does not start without an RDMA device, in its TCP mode either (version 0.2.35)"

Speeds = dict[str, list[float]]


class Step(Enum):
    """What a round is for."""

    VERIFY = auto()
    WARM = auto()
    TIME = auto()


Round = Callable[[Step], None]


@dataclass(frozen=True)
class TransferSettings:
    """``sizes`` and ``batch_bytes`` in bytes; ``repeats`` timed rounds after one that verifies."""

    sizes: list[int]
    batch_bytes: int
    repeats: int
    peers: bool


class Bench:
    """One object size: buffers, and what was measured."""

    def __init__(self, size: int, batch_bytes: int) -> None:
        self.size = size
        self.count = batch_bytes // size
        self.bytes = self.count * size
        self.source = cut(memoryview(bytearray(secrets.token_bytes(self.bytes))), size)
        self.target = cut(memoryview(bytearray(b"\x01" * self.bytes)), size)
        self.speeds: Speeds = {}

    def note(self, name: str, seconds: float) -> None:
        """Take a timing, as GB/s."""
        self.speeds.setdefault(name, []).append(self.bytes / seconds / 1e9)

    def both(self, name: str, put: Callable[[], object], get: Callable[[], object], *, step: Step) -> None:
        """A put and a get, which are verified, or timed, or neither."""
        for view in self.target:
            view[: self.size // 2 + 1 : self.size // 2] = b"\0\0"
        seconds = timed(put), timed(get)
        if step is Step.VERIFY and self.target != self.source:
            raise AssertionError(f"{name}: wrong bytes at {self.size} bytes an object")
        if step is Step.TIME:
            self.note(f"{name} put", seconds[0])
            self.note(f"{name} get", seconds[1])

    def ours(self, client: PoolClient, step: Step) -> None:
        """A round of the pool itself."""
        keys = [secrets.token_bytes(32) for _ in self.source]
        items = list(zip(keys, self.source, strict=True))
        self.both(OURS, lambda: client.put_many(items), lambda: client.get_many(keys, self.target), step=step)
        client.delete(keys)

    def raw(self, stream: RawStream, step: Step) -> None:
        """A round of the raw stream."""
        self.both("raw socket", lambda: stream.put(self.source), lambda: stream.get(self.target), step=step)

    def memcpy(self, floor: Memcpy, step: Step) -> None:
        """A scattered copy, which is a put and a get."""
        seconds = timed(floor.copy)
        if step is Step.TIME:
            self.note("memcpy put", seconds)
            self.note("memcpy get", seconds)

    def peer(self, peers: Peers, peer: Peer, step: Step) -> None:
        """A round of a peer."""
        if peer not in peers.running:
            return
        keys = [secrets.token_hex(16) for _ in range(self.count)]
        try:
            seconds = peer.call("transfer", keys=keys, size=self.size, verify=step is Step.VERIFY)
        except RuntimeError as error:
            peers.drop(peer, error)
            return
        if step is Step.TIME:
            self.note(f"{peer.label} put", seconds["put"])
            self.note(f"{peer.label} get", seconds["get"])

    def run(self, floors: Sequence[Round], peers: Peers, repeats: int) -> None:
        """Verify everybody once, then let them take turns. ``floors``: whoever is no peer."""
        for repeat in range(repeats + 1):
            contestants: list[tuple[Round, Peer | None]] = [(floor, None) for floor in floors]
            contestants += [(partial(self.peer, peers, peer), peer) for peer in peers.running]
            first = repeat % len(contestants)
            for round_of, peer in contestants[first:] + contestants[:first]:
                with nullcontext() if peer is None else peer.turn():
                    for step in (Step.WARM, Step.TIME) if repeat else (Step.VERIFY,):
                        round_of(step)

    def median(self, name: str) -> float | None:
        """GB/s, None if it was not measured."""
        return median(self.speeds[name]) if name in self.speeds else None

    def cell(self, name: str) -> str:
        """GB/s with its spread."""
        value = self.median(name)
        return "-" if value is None else f"{value:.2f} ±{spread(self.speeds[name]):.0%}"


def _rows(section: Section, bench: Bench, labels: list[str]) -> None:
    kib = f"{bench.size // KIB} KiB"
    figures: dict[str, float | None] = {}
    for what in ("put", "get"):
        mine = bench.median(f"{OURS} {what}")
        cells = [kib, what]
        for label in labels:
            value = bench.median(f"{label} {what}")
            share = ratio(mine, value)
            cells.append(bench.cell(f"{label} {what}") + ("" if label == OURS or share is None else f" ({share:.2f}x)"))
            figures[f"{label} {what} GB/s"] = value and round(value, 3)
        section.rows.append(cells)
    section.figures[kib] = figures


def run_tcp(settings: TransferSettings) -> Section:
    """TCP on loopback against Mooncake Store, Redis, NIXL and a raw stream."""
    labels = [OURS, "raw socket", "Mooncake", "Redis raw", "redis-py", "NIXL tcp"]
    section = Section("TCP on loopback, GB/s (kvrelay over it)", ["object", "", *labels])
    arena = f"{4 * settings.batch_bytes >> 20}MiB"
    with (
        Peers() as peers,
        tempfile.TemporaryDirectory() as directory,
        pool_process(Path(directory), size=arena) as pool,
    ):
        raw = RawStream(settings.batch_bytes)
        if settings.peers:
            peers.add("Mooncake", "mooncake", settings.batch_bytes)
            peers.add("Redis raw", "redis", settings.batch_bytes, client="raw")
            peers.add("redis-py", "redis", settings.batch_bytes, client="redis-py")
            peers.add("NIXL tcp", "nixl", settings.batch_bytes, transports="tcp")
        with PoolClient.connect(pool.tcp, name="bench") as client:
            for size in settings.sizes:
                bench = Bench(size, settings.batch_bytes)
                bench.run([partial(bench.ours, client), partial(bench.raw, raw)], peers, settings.repeats)
                _rows(section, bench, labels)
                _tcp_goals(section, bench)
        raw.close()
        section.absent = {**peers.absent, "InfiniStore": INFINISTORE}
        section.versions = peers.versions
    return section


def _tcp_goals(section: Section, bench: Bench) -> None:
    kib = f"{bench.size // KIB} KiB"
    over_mooncake = {16 * KIB: 5.0, 64 * KIB: 3.0, 256 * KIB: 2.0}.get(bench.size)
    for what in ("put", "get"):
        mine = bench.median(f"{OURS} {what}")
        if over_mooncake is not None:
            share = ratio(mine, bench.median(f"Mooncake {what}"))
            section.goals.append(Goal(f"tcp {what} {kib} / Mooncake", over_mooncake, share))
        redis = [value for name in ("Redis raw", "redis-py") if (value := bench.median(f"{name} {what}")) is not None]
        share = ratio(mine, max(redis, default=None))
        section.goals.append(Goal(f"tcp {what} {kib} / best Redis client", 2.0, share))
        if bench.size >= 256 * KIB:
            share = ratio(mine, bench.median(f"raw socket {what}"))
            section.goals.append(Goal(f"tcp {what} {kib} / raw socket", 0.85, share))


def run_shm(settings: TransferSettings) -> Section:
    """Shared memory against a scattered copy and NIXL."""
    labels = [OURS, "memcpy", "NIXL shm"]
    section = Section("Shared memory, GB/s (kvrelay over it)", ["object", "", *labels])
    ways: dict[str, str] = {}
    arena = f"{4 * settings.batch_bytes >> 20}MiB"
    with (
        Peers() as peers,
        tempfile.TemporaryDirectory() as directory,
        pool_process(Path(directory), size=arena) as pool,
    ):
        if settings.peers:
            peers.add("NIXL shm", "nixl", settings.batch_bytes, transports="sm,tcp")
        with PoolClient.connect(pool.unix, name="bench") as client:
            for size in settings.sizes:
                bench = Bench(size, settings.batch_bytes)
                floor = Memcpy(bench.source, seed=size)
                floor.check()
                ways[f"{size // KIB} KiB"] = floor.way
                bench.run([partial(bench.ours, client), partial(bench.memcpy, floor)], peers, settings.repeats)
                _rows(section, bench, labels)
                _shm_goals(section, bench)
        section.absent = peers.absent
        section.versions = peers.versions
    section.notes.append("memcpy is called through " + ", ".join(f"{way} at {size}" for size, way in ways.items()))
    section.figures["memcpy called through"] = ways
    return section


def _shm_goals(section: Section, bench: Bench) -> None:
    kib = f"{bench.size // KIB} KiB"
    over_memcpy = 0.6 if bench.size < 64 * KIB else 0.8
    for what, over_nixl in (("put", 1.5), ("get", 1.2)):
        mine = bench.median(f"{OURS} {what}")
        section.goals.append(
            Goal(f"shm {what} {kib} / memcpy", over_memcpy, ratio(mine, bench.median(f"memcpy {what}")))
        )
        if bench.size == 64 * KIB:
            share = ratio(mine, bench.median(f"NIXL shm {what}"))
            section.goals.append(Goal(f"shm {what} {kib} / NIXL shm", over_nixl, share))
