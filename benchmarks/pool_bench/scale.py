"""Section ``scale``: many small objects in one pool. What each costs the server, and what they cost a lookup.

Two servers: one holds few objects, one many; lookups of random keys go to them in turn, from the index and, apart,
asked of the pool. The server's memory is what is its own (``RssAnon``; the arena is shared memory and not in it), its
index for clients' lookups, which is shared memory too, and what the arena loses to rounding. Apart from both, single
insertions are timed while a catalog fills (`pool_bench.growth`).
"""

from __future__ import annotations

import hashlib
import random
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvrelay.bench.report import median, percentile
from kvrelay.bench.section import Goal, Section
from kvrelay.client.blocking import PoolClient
from kvrelay.testing.pool import pool_process
from pool_bench.floors import timed
from pool_bench.growth import insertions
from pool_bench.lookup import num_sealed

if TYPE_CHECKING:
    from collections.abc import Mapping

OBJECT_BYTES = 64
FEW = 10_000
BATCH = 8_192
KEYS = 512
LOOKUPS = 400
TRIAL = 100_000
"""Objects after which the memory of all is foretold, and the run given up if the machine lacks it."""


@dataclass(frozen=True)
class ScaleSettings:
    """``objects`` in the pool that holds many."""

    objects: int


def key_of(number: int) -> bytes:
    """The key of an object; its content is the key, twice."""
    return hashlib.blake2b(number.to_bytes(8, "little"), digest_size=32).digest()


def anonymous_bytes(pid: int) -> int:
    """Memory of a process that is its own: neither files nor shared memory."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise RuntimeError(f"no RssAnon of process {pid}")


def available_bytes() -> int:
    """Memory the machine has left."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    raise RuntimeError("no MemAvailable")


def _store(client: PoolClient, first: int, last: int) -> None:
    for start in range(first, last, BATCH):
        keys = [key_of(number) for number in range(start, min(last, start + BATCH))]
        client.put_many([(key, memoryview(key + key)) for key in keys])


def _check(client: PoolClient, keys: list[bytes]) -> None:
    buffers = [memoryview(bytearray(OBJECT_BYTES)) for _ in keys]
    found = client.get_many(keys, buffers)
    if found != len(keys) or any(bytes(view) != key + key for view, key in zip(buffers, keys, strict=True)):
        raise AssertionError(f"{found} of {len(keys)} small objects came back, or with wrong bytes")


def run_scale(settings: ScaleSettings) -> Section:
    """Fill, check, weigh, look up."""
    count = settings.objects
    section = Section(f"{count:,} objects of {OBJECT_BYTES} bytes", ["figure", "value"])
    arena = f"{count * OBJECT_BYTES * 9 // 8 + (64 << 20) >> 20}MiB"
    with (
        tempfile.TemporaryDirectory() as one,
        tempfile.TemporaryDirectory() as other,
        pool_process(Path(one), size="64MiB") as few,
        pool_process(Path(other), size=arena) as many,
        PoolClient.connect(few.unix, name="bench") as small,
        PoolClient.connect(many.unix, name="bench") as large,
    ):
        _store(small, 0, min(FEW, count))
        empty = anonymous_bytes(many.process.pid)
        start = time.monotonic()
        trial = min(TRIAL, count)
        _store(large, 0, trial)
        expected = (anonymous_bytes(many.process.pid) - empty) / trial * count
        if expected > available_bytes() * 0.8:
            section.notes.append(
                f"given up after {trial:,} objects: all of them would take {expected / 2**30:.1f} GiB of the server"
            )
            section.rows.append(["bytes an object after the trial", f"{expected / count:.0f}"])
            section.goals = _goals(count, expected / count, None, None, None)
            return section
        _store(large, trial, count)
        seconds = time.monotonic() - start
        stat = large.stat()
        if stat["objects"] != count:
            raise AssertionError(f"{stat['objects']} of {count} objects are in the pool: {stat['evictions']} evicted")
        own = (anonymous_bytes(many.process.pid) - empty) / count
        index = stat["index_bytes"] / count
        slack = (stat["arena_bytes"] - stat["free_bytes"]) / count - OBJECT_BYTES
        times = _lookups({"few": (small, min(FEW, count)), "many": (large, count)})
        with (
            PoolClient.connect(few.unix, name="asking", transport="tcp") as few_asked,
            PoolClient.connect(many.unix, name="asking", transport="tcp") as many_asked,
        ):
            times |= _lookups({"few, asked": (few_asked, min(FEW, count)), "many, asked": (many_asked, count)})
    us = {name: median(seconds) * 1e6 for name, seconds in times.items()}
    section.figures = {
        "objects": count,
        "bytes an object, the server's own": round(own, 1),
        "bytes an object, in the index": round(index, 1),
        "bytes an object, lost to rounding": round(slack, 1),
        "objects stored a second": round(count / seconds),
        f"count_prefix of {KEYS} keys, {FEW:,} objects, us": round(us["few"], 1),
        f"count_prefix of {KEYS} keys, {count:,} objects, us": round(us["many"], 1),
        f"count_prefix p99, {count:,} objects, us": round(percentile(times["many"], 99) * 1e6, 1),
        f"the same asked of the pool, {FEW:,} objects, us": round(us["few, asked"], 1),
        f"the same asked of the pool, {count:,} objects, us": round(us["many, asked"], 1),
    }
    inserted = insertions(count, OBJECT_BYTES, key_of)
    if inserted is not None:
        section.figures |= {
            "one insertion, p50, us": round(inserted.p50, 1),
            "one insertion, p99.9, us": round(inserted.p99_9, 1),
            "one insertion, the longest, us": round(inserted.longest, 1),
            "objects there at the longest": inserted.longest_at,
        }
    section.rows = [[name, f"{value:,}"] for name, value in section.figures.items()]
    section.goals = _goals(
        count,
        own + index + slack,
        us["many"] / us["few"],
        us["many, asked"] / us["few, asked"],
        None if inserted is None else inserted.longest / 1e3,
    )
    return section


def _lookups(pools: Mapping[str, tuple[PoolClient, int]]) -> dict[str, list[float]]:
    """Seconds of lookups of random keys, the pools in turn, by the pool's name. ``pools``: clients, objects held."""
    rng = random.Random(1)
    times: dict[str, list[float]] = {name: [] for name in pools}
    for repeat in range(LOOKUPS + 1):
        for name, (client, held) in pools.items():
            keys = [key_of(rng.randrange(held)) for _ in range(KEYS)]
            if repeat == 0:
                _check(client, keys)
            times[name].append(timed(lambda: num_sealed(client, keys)))  # noqa: B023 - run at once
    return {name: seconds[1:] for name, seconds in times.items()}


def _goals(
    count: int, per_object: float, slowdown: float | None, asked: float | None, longest: float | None
) -> list[Goal]:
    return [
        Goal(f"server memory an object beyond its payload, {count:,} objects, bytes", 200, per_object, False),
        Goal(f"lookup among {count:,} / lookup among {FEW:,}", 1.3, slowdown, False),
        Goal(f"lookup asked of the pool among {count:,} / among {FEW:,}", 1.3, asked, False),
        Goal(f"the longest insertion up to {count:,} objects, ms", 2, longest, False),
    ]
