"""Section ``crowd``: many clients at once, each a process of its own, beside a single one doing the same.

Over bare sockets too: what is lost there is lost to the kernel, and to caches that do not hold everybody's batches.
"""

from __future__ import annotations

import multiprocessing
import secrets
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvrelay.bench.report import median
from kvrelay.bench.section import Goal, Section
from kvrelay.client.blocking import PoolClient
from kvrelay.testing.pool import pool_process
from pool_bench.floors import cut
from pool_bench.raw_crowd import exchange, raw_client, raw_server

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.queues import Queue
    from multiprocessing.synchronize import Barrier

OBJECT_BYTES = 64 << 10
BATCH_BYTES = 1 << 20
ROUNDS = 3
START_S = 60.0
RAW = "raw socket"

Blocks = list[memoryview]
Exchange = Callable[[Blocks], None]


@dataclass(frozen=True)
class CrowdSettings:
    """``clients`` at once, each for ``seconds``."""

    clients: int
    seconds: float


@contextmanager
def _of_pool(address: str, target: Blocks) -> Iterator[Exchange]:
    with PoolClient.connect(address, name="crowd", timeout_s=START_S) as client:

        def exchange_batch(source: Blocks) -> None:
            keys = [secrets.token_bytes(32) for _ in source]
            client.put_many(list(zip(keys, source, strict=True)))
            if client.get_many(keys, target) != len(keys):
                raise AssertionError("a client of the crowd did not get back what it put")
            client.delete(keys)

        yield exchange_batch


@contextmanager
def _of_raw(port: str, target: Blocks) -> Iterator[Exchange]:
    with raw_client(port) as sock:
        yield lambda source: exchange(sock, source, target)


def _client(over: str, address: str, seconds: float, start: Barrier, moved: Queue[float]) -> None:
    sources = [cut(memoryview(bytearray(secrets.token_bytes(BATCH_BYTES))), OBJECT_BYTES) for _ in range(2)]
    target = cut(memoryview(bytearray(BATCH_BYTES)), OBJECT_BYTES)
    lasts = [bytes(source[-1]) for source in sources]
    count = 0
    with (_of_raw if over == RAW else _of_pool)(address, target) as exchange_batch:
        for source in sources:
            exchange_batch(source)
            if target != source:
                raise AssertionError("a client of the crowd got other bytes than it put")
        start.wait(START_S)
        begun = time.monotonic()
        while (now := time.monotonic()) < begun + seconds or not count:
            exchange_batch(sources[count % 2])
            # Views are compared item by item: one block took a tenth of a client's time. It is another each time.
            if bytes(target[-1]) != lasts[count % 2]:
                raise AssertionError("a client of the crowd got other bytes than it put")
            count += 1
        moved.put(2 * count * BATCH_BYTES / (now - begun))


def _rates(over: str, address: str, clients: int, seconds: float) -> list[float]:
    """Bytes a second, put and got, of each of so many clients at once."""
    start = multiprocessing.Barrier(clients)
    moved: Queue[float] = multiprocessing.Queue()
    processes = [
        multiprocessing.Process(target=_client, args=(over, address, seconds, start, moved), daemon=True)
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
    single: dict[str, list[float]] = {}
    total: dict[str, list[float]] = {}
    slowest: dict[str, list[float]] = {}
    with (
        tempfile.TemporaryDirectory() as directory,
        pool_process(Path(directory), size="512MiB") as pool,
        raw_server(BATCH_BYTES) as port,
    ):
        for _ in range(ROUNDS):
            for name, address in (("shm", pool.unix), ("tcp", pool.tcp), (RAW, port)):
                single.setdefault(name, []).extend(_rates(name, address, 1, settings.seconds / 2))
                rates = _rates(name, address, settings.clients, settings.seconds)
                total.setdefault(name, []).append(sum(rates))
                slowest.setdefault(name, []).append(min(rates) * len(rates) / sum(rates))
    for name, alone in single.items():
        best, all_of_them, fair = max(alone), median(total[name]), min(slowest[name])
        share = all_of_them / best
        section.rows.append([name, f"{best / 1e9:.2f}", f"{all_of_them / 1e9:.2f}", f"{share:.2f}", f"{fair:.2f}"])
        section.figures[name] = {
            "best single GB/s": round(best / 1e9, 3),
            "crowd GB/s": round(all_of_them / 1e9, 3),
            "slowest / mean": round(fair, 3),
        }
        if name != RAW:
            section.goals += [
                Goal(f"{name}: {settings.clients} clients together / best single client", 0.9, share),
                Goal(f"{name}: slowest client / mean", 0.25, fair),
            ]
    return section
