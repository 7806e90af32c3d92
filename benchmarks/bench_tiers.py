"""Tiers by themselves: how fast objects go down and come up, by size; and what a busy tier costs reads of memory.

    python benchmarks/bench_tiers.py [--quick] [--dir DIRECTORY]

Every object that comes up is verified by the tier before it counts. Going down ends with the region files flushed
(disk) or not (folder: see docs/tiers.md). Coming up is measured with the page cache dropped, where that is allowed, and
warm; the arena's side is plain memory.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import struct
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from kvrelay.bench.report import closing_line, percentile
from kvrelay.client.blocking import PoolClient
from kvrelay.pool.tiers.core.tier import Item, Outcome, Shape, tier_key
from kvrelay.pool.tiers.disk import DiskTier
from kvrelay.pool.tiers.folder import FolderTier
from kvrelay.testing.pool import pool_process
from kvrelay.transport.checksum import checksum

if TYPE_CHECKING:
    from kvrelay.pool.tiers.core.tier import Tier

SIZES = (16 << 10, 64 << 10, 256 << 10, 1 << 20)
BATCH_BYTES = 8 << 20
LOADING_BATCH_BYTES = 4 << 20


def items_of(total: int, size: int) -> list[Item]:
    """Objects of random bytes."""
    memory = memoryview(bytearray(os.urandom(total)))
    found = []
    for number in range(total // size):
        data = memory[number * size : (number + 1) * size]
        sums = struct.pack("<Q", checksum(data))
        found.append(Item(tier_key("bench", number.to_bytes(32, "big")), Shape(size), sums, data))
    return found


def drop_cache() -> bool:
    """Have reads come from the medium; whether that was allowed."""
    with contextlib.suppress(OSError):
        os.sync()
        Path("/proc/sys/vm/drop_caches").write_text("1", encoding="ascii")
        return True
    return False


def move(tier: Tier, items: list[Item], size: int) -> dict[str, float]:
    """GB/s down, up cold, up warm."""
    total = size * len(items)
    batch = max(1, BATCH_BYTES // size)
    began = time.perf_counter()
    for at in range(0, len(items), batch):
        assert set(tier.store(items[at : at + batch])) == {Outcome.DONE}
    if isinstance(tier, DiskTier):
        tier.flush()
    found = {"down": total / (time.perf_counter() - began) / 1e9}
    into = memoryview(bytearray(total))
    wanted = [(item.key, into[n * size : (n + 1) * size]) for n, item in enumerate(items)]
    batch = max(1, LOADING_BATCH_BYTES // size)
    for name in ("up, cold", "up, warm"):
        if name == "up, cold" and not drop_cache():
            continue
        began = time.perf_counter()
        for at in range(0, len(wanted), batch):
            assert {one.outcome for one in tier.load(wanted[at : at + batch])} == {Outcome.DONE}
        found[name] = total / (time.perf_counter() - began) / 1e9
    return found


def raw(directory: Path, total: int) -> dict[str, float]:
    """GB/s of one file: written in large pieces and flushed, read cold and warm. What there is to reach."""
    data = memoryview(os.urandom(total))
    with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
        fd = file.fileno()
        began = time.perf_counter()
        for at in range(0, total, BATCH_BYTES):
            os.pwrite(fd, data[at : at + BATCH_BYTES], at)
        os.fdatasync(fd)
        found = {"down": total / (time.perf_counter() - began) / 1e9}
        into = memoryview(bytearray(total))
        for name in ("up, cold", "up, warm"):
            if name == "up, cold" and not drop_cache():
                continue
            began = time.perf_counter()
            for at in range(0, total, LOADING_BATCH_BYTES):
                os.preadv(fd, [into[at : at + LOADING_BATCH_BYTES]], at)
            found[name] = total / (time.perf_counter() - began) / 1e9
    return found


def tiers_alone(directory: Path, total: int) -> dict[str, dict[str, float]]:
    """A table of GB/s."""
    results: dict[str, dict[str, float]] = {"raw file": raw(directory, total)}
    for size in SIZES:
        items = items_of(total, size)
        for kind in ("disk", "folder"):
            with tempfile.TemporaryDirectory(dir=directory) as path:
                made: Tier = DiskTier(path, 4 * total) if kind == "disk" else FolderTier(path, name="bench")
                results[f"{kind} {size >> 10} KiB"] = move(made, items, size)
                made.close()
    return results


def latencies(client: PoolClient, seconds: float) -> list[float]:
    """Times of small reads of memory, one after the other, sorted, in ms."""
    times: list[float] = []
    end = time.perf_counter() + seconds
    while (began := time.perf_counter()) < end:
        assert client.get(b"hot") is not None
        times.append(1e3 * (time.perf_counter() - began))
    return sorted(times)


def pool_with_tier(directory: Path, seconds: float) -> dict[str, float]:
    """Reads of memory alone, and while objects go down and come up all the time."""
    with tempfile.TemporaryDirectory(dir=directory) as path:
        options = ("--tier", f"disk:{path}/ssd:4GiB")
        with (
            pool_process(Path(path), size="256MiB", options=options) as pool,
            PoolClient.connect(pool.unix, name="reader") as reader,
            PoolClient.connect(pool.unix, name="mover") as mover,
        ):
            reader.put(b"hot", os.urandom(64 << 10))
            reader.pin([b"hot"])
            alone = latencies(reader, seconds)
            size, count = 1 << 20, 512
            data = os.urandom(size)
            done, moved = threading.Event(), [0]

            def churn() -> None:
                number = 0
                view = memoryview(bytearray(size))
                while not done.is_set():
                    mover.put_many([(b"%d" % number, data)], partly=True)
                    moved[0] += size * mover.get_many([b"%d" % (number % count // 2)], [view], wait_s=1.0)
                    number = (number + 1) % (4 * count)

            thread = threading.Thread(target=churn)
            thread.start()
            busy = latencies(reader, 2 * seconds)
            done.set()
            thread.join(30)
            return {
                "alone p50 ms": statistics.median(alone), "alone p99 ms": percentile(alone, 99),
                "busy p50 ms": statistics.median(busy), "busy p99 ms": percentile(busy, 99), "busy max ms": busy[-1],
                "read beside it, GB/s": moved[0] / (2 * seconds) / 1e9,
            }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small, to see that it runs")
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="on the medium to be measured")
    args = parser.parse_args()
    total = (16 if args.quick else 128) << 20
    alone = tiers_alone(args.dir, total)
    pool = pool_with_tier(args.dir, 1.0 if args.quick else 5.0)
    for name, row in alone.items():
        print(f"{name:18}" + "".join(f"  {what} {value:6.2f} GB/s" for what, value in row.items()))
    for what, value in pool.items():
        print(f"{what:22} {value:8.3f}")
    print(closing_line("tiers", {"tiers": alone, "pool": pool}))


if __name__ == "__main__":
    main()
