"""Section ``crowd``: many clients at once, each a process of its own, beside a single one doing the same."""

from __future__ import annotations

import multiprocessing
import secrets
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvrelay.bench.report import median
from kvrelay.bench.section import Goal, Section
from kvrelay.client.blocking import PoolClient
from kvrelay.testing.pool import pool_process
from pool_bench.floors import cut

if TYPE_CHECKING:
    from multiprocessing.queues import Queue
    from multiprocessing.synchronize import Barrier

OBJECT_BYTES = 64 << 10
BATCH_BYTES = 1 << 20
ROUNDS = 3
START_S = 60.0


@dataclass(frozen=True)
class CrowdSettings:
    """``clients`` at once, each for ``seconds``."""

    clients: int
    seconds: float


def _client(address: str, seconds: float, start: Barrier, moved: Queue[float]) -> None:
    source = cut(memoryview(bytearray(secrets.token_bytes(BATCH_BYTES))), OBJECT_BYTES)
    target = cut(memoryview(bytearray(BATCH_BYTES)), OBJECT_BYTES)
    count = 0
    with PoolClient.connect(address, name="crowd", timeout_s=START_S) as client:
        start.wait(START_S)
        begun = time.monotonic()
        while (now := time.monotonic()) < begun + seconds or not count:
            keys = [secrets.token_bytes(32) for _ in source]
            client.put_many(list(zip(keys, source, strict=True)))
            if client.get_many(keys, target) != len(keys) or target[-1] != source[-1]:
                raise AssertionError("a client of the crowd did not get back what it put")
            client.delete(keys)
            count += 1
        moved.put(2 * count * BATCH_BYTES / (now - begun))


def _rates(address: str, clients: int, seconds: float) -> list[float]:
    """Bytes a second, put and got, of each of so many clients at once."""
    start = multiprocessing.Barrier(clients)
    moved: Queue[float] = multiprocessing.Queue()
    processes = [
        multiprocessing.Process(target=_client, args=(address, seconds, start, moved), daemon=True)
        for _ in range(clients)
    ]
    for process in processes:
        process.start()
    rates = [moved.get(timeout=START_S + seconds) for _ in processes]
    for process in processes:
        process.join(START_S)
    return rates


def run_crowd(settings: CrowdSettings) -> Section:
    """Single clients and crowds in turn, over both transports."""
    section = Section(
        f"{settings.clients} clients at once, put and get of 16 x 64 KiB, GB/s",
        ["over", "best single client", "all of the crowd", "ratio", "slowest / mean"],
    )
    with tempfile.TemporaryDirectory() as directory, pool_process(Path(directory), size="512MiB") as pool:
        for name, address in (("shm", pool.unix), ("tcp", pool.tcp)):
            single: list[float] = []
            total: list[float] = []
            slowest: list[float] = []
            for _ in range(ROUNDS):
                single += _rates(address, 1, settings.seconds / 2)
                rates = _rates(address, settings.clients, settings.seconds)
                total.append(sum(rates))
                slowest.append(min(rates) * len(rates) / sum(rates))
            share, fair = median(total) / max(single), min(slowest)
            section.rows.append(
                [name, f"{max(single) / 1e9:.2f}", f"{median(total) / 1e9:.2f}", f"{share:.2f}", f"{fair:.2f}"]
            )
            section.figures[name] = {
                "best single GB/s": round(max(single) / 1e9, 3),
                "crowd GB/s": round(median(total) / 1e9, 3),
                "slowest / mean": round(fair, 3),
            }
            section.goals += [
                Goal(f"{name}: {settings.clients} clients together / best single client", 0.9, share),
                Goal(f"{name}: slowest client / mean", 0.25, fair),
            ]
    return section
