"""Section ``lookup``: how long a prefix of keys is there, one request, idle and beside transfers."""

from __future__ import annotations

import multiprocessing
import secrets
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvrelay.bench.report import percentile
from kvrelay.bench.section import Goal, Section, ratio
from kvrelay.client.blocking import PoolClient
from kvrelay.testing.pool import pool_process
from pool_bench.floors import cut, timed
from pool_bench.peer import Peers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.synchronize import Event

KEYS = 512
OBJECT_BYTES = 4096
LOAD_OBJECT_BYTES = 64 << 10
LOAD_BATCH_BYTES = 16 << 20
PEER_LOAD_S = 8.0
PACE_S = 1e-3
"""As many lookups as were asked for take at least this long each, all together: else they would see one moment only."""
CALLS = ("match_prefix", "count_prefix")
"""``count_prefix`` does the work of Mooncake's ``batch_is_exist``: neither leases, as ``match_prefix`` does."""


@dataclass(frozen=True)
class LookupSettings:
    """``repeats`` timed lookups of each kind."""

    repeats: int
    peers: bool


def num_sealed(client: PoolClient, keys: list[bytes]) -> int:
    """How many of the keys, from the first on, are whole: the cheapest way to ask for a prefix."""
    return client.count_prefix(keys).sealed


def _load(address: str, ready: Event, stop: Event) -> None:
    """Put, get and delete batches until told to stop."""
    source = cut(memoryview(bytearray(secrets.token_bytes(LOAD_BATCH_BYTES))), LOAD_OBJECT_BYTES)
    target = cut(memoryview(bytearray(LOAD_BATCH_BYTES)), LOAD_OBJECT_BYTES)
    with PoolClient.connect(address, name="load") as client:
        while not stop.is_set():
            keys = [secrets.token_bytes(32) for _ in source]
            client.put_many(list(zip(keys, source, strict=True)))
            client.get_many(keys, target)
            client.delete(keys)
            ready.set()


@contextmanager
def load(address: str) -> Iterator[None]:
    """Transfers by another process for the length of a ``with`` block."""
    ready, stop = multiprocessing.Event(), multiprocessing.Event()
    process = multiprocessing.Process(target=_load, args=(address, ready, stop), daemon=True)
    process.start()
    try:
        if not ready.wait(30):
            raise RuntimeError("the load did not start")
        yield
    finally:
        stop.set()
        process.join(30)


def _times(ask: Callable[[list[bytes]], int], keys: list[bytes], repeats: int) -> list[float]:
    """One lookup after the other, more of them if they are fast."""
    times: list[float] = []
    end = time.monotonic() + repeats * PACE_S
    while len(times) < repeats or time.monotonic() < end:
        times.append(timed(lambda: ask(keys)))
    return times


def goals(p50: dict[str, float], p99: dict[str, float]) -> list[Goal]:
    """Of each call. Times go by who asked, the call, and what went on beside: ``kvrelay count_prefix nothing``."""
    theirs = p50.get("Mooncake batch_is_exist nothing")
    found: list[Goal] = []
    for call in CALLS:
        share = ratio(p50[f"kvrelay {call} nothing"], theirs)
        found.append(Goal(f"{call} p50 / Mooncake batch_is_exist p50", 0.1, share, at_least=False))
        for beside in ("tcp transfers", "shm transfers"):
            case = f"kvrelay {call} {beside}"
            found.append(Goal(f"{call} p99 / p50 beside {beside}", 3.0, p99[case] / p50[case], at_least=False))
    return found


def run_lookup(settings: LookupSettings) -> Section:
    """Ours over the UNIX socket, Mooncake Store's ``batch_is_exist`` against its master on loopback."""
    section = Section(
        f"Lookup of {KEYS} keys, microseconds", ["who", "call", "beside", "p50", "p99", "p99.9", "p99 / p50"]
    )
    p50: dict[str, float] = {}
    p99: dict[str, float] = {}

    def note(who: str, call: str, beside: str, seconds: list[float]) -> None:
        low, high, highest = (percentile(seconds, share) * 1e6 for share in (50, 99, 99.9))
        p50[f"{who} {call} {beside}"], p99[f"{who} {call} {beside}"] = low, high
        section.rows.append([who, call, beside, f"{low:.0f}", f"{high:.0f}", f"{highest:.0f}", f"{high / low:.1f}"])
        section.figures[f"{who} {call}, {beside}"] = {
            "p50 us": round(low, 1),
            "p99 us": round(high, 1),
            "p99.9 us": round(highest, 1),
        }

    with (
        tempfile.TemporaryDirectory() as directory,
        pool_process(Path(directory), size="256MiB") as pool,
        PoolClient.connect(pool.unix, name="bench") as client,
    ):
        keys = [secrets.token_bytes(32) for _ in range(KEYS)]
        blocks = cut(memoryview(bytearray(secrets.token_bytes(KEYS * OBJECT_BYTES))), OBJECT_BYTES)
        client.put_many(list(zip(keys, blocks, strict=True)))
        asks: list[Callable[[list[bytes]], int]] = [
            lambda keys: len(client.match_prefix(keys)),
            lambda keys: num_sealed(client, keys),
        ]
        for call, ask in zip(CALLS, asks, strict=True):
            if ask(keys) != KEYS:
                raise AssertionError(f"{call} found {ask(keys)} of {KEYS} keys")
            times = _times(ask, keys, settings.repeats)
            note("kvrelay", call, "nothing", times)
            for name, address in (("tcp transfers", pool.tcp), ("shm transfers", pool.unix)):
                with load(address):
                    times = _times(ask, keys, settings.repeats)
                note("kvrelay", call, name, times)
    if settings.peers:
        _mooncake(section, settings, note)
    section.goals = goals(p50, p99)
    return section


def _mooncake(section: Section, settings: LookupSettings, note: Callable[[str, str, str, list[float]], None]) -> None:
    with Peers() as peers:
        peer = peers.add("Mooncake", "mooncake", LOAD_BATCH_BYTES)
        if peer is not None:
            keys = [secrets.token_hex(16) for _ in range(KEYS)]
            try:
                with peer.turn():
                    peer.call("fill", keys=keys, size=OBJECT_BYTES)
                    seconds = peer.call("lookups", keys=keys, repeats=settings.repeats, present=KEYS)
                    note("Mooncake", "batch_is_exist", "nothing", seconds)
                    loader = peers.add("Mooncake's load", "mooncake", LOAD_BATCH_BYTES, join=peer.versions["ports"])
                    if loader is not None:
                        with loader.turn():
                            count = LOAD_BATCH_BYTES // LOAD_OBJECT_BYTES
                            load_keys = [secrets.token_hex(12) for _ in range(count)]
                            loader.send("load", keys=load_keys, size=LOAD_OBJECT_BYTES, seconds=PEER_LOAD_S)
                            seconds = peer.call("lookups", keys=keys, repeats=settings.repeats, present=KEYS)
                            loader.receive()
                        note("Mooncake", "batch_is_exist", "tcp transfers", seconds)
            except RuntimeError as error:
                peers.drop(peer, error)
        section.absent = peers.absent
        section.versions = peers.versions
