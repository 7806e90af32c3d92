"""Copies with checksums beside plain copies of the same blocks.

In one run, interleaved: a batch of blocks between a touched private buffer and shuffled places of a touched
shared-memory arena, put (into the arena) and get (out of it). Contestants: `memoryview` slices, numpy slices and a
native loop of plain memcpy, which do not hash; the native copies that do, with one and two threads; and their twin in
Python. Every contestant runs beside a plain native copy, and its ratio is to that one. Results are verified as they
are timed.
"""

from __future__ import annotations

import argparse
import random
import secrets
import time
from array import array
from typing import TYPE_CHECKING

import numpy as np

from kvrelay.bench.report import closing_line, median, spread, table
from kvrelay.native import native
from kvrelay.transport import pure
from kvrelay.transport.shm import Arena

if TYPE_CHECKING:
    from collections.abc import Callable

KIB = 1 << 10


class Batch:
    """Blocks of ``size`` bytes in ``buffer``, and as many shuffled places in the arena, others at every turn."""

    def __init__(self, arena: memoryview, batch_bytes: int, size: int) -> None:
        self.buffer = memoryview(bytearray(secrets.token_bytes(batch_bytes)))
        self.arena = arena
        self.size = size
        self.count = batch_bytes // size
        self.packed = array("Q", range(0, batch_bytes, size)).tobytes()
        places = list(range(0, arena.nbytes - size + 1, size))
        random.Random(1).shuffle(places)
        self._places = places
        self._turn = 0
        self.sums = pure.sums(self.buffer, self.packed, size)
        self.next_turn()

    def next_turn(self) -> None:
        """Go on to other places in the arena."""
        start = self._turn * self.count % (len(self._places) - self.count + 1)
        self.places = self._places[start : start + self.count]
        self.packed_places = array("Q", self.places).tobytes()
        self._turn += 1


def slices(batch: Batch, *, put: bool) -> None:
    size = batch.size
    for index, place in enumerate(batch.places):
        if put:
            batch.arena[place : place + size] = batch.buffer[index * size : (index + 1) * size]
        else:
            batch.buffer[index * size : (index + 1) * size] = batch.arena[place : place + size]


def numpy_slices(batch: Batch, *, put: bool) -> None:
    size = batch.size
    arena, buffer = np.frombuffer(batch.arena, np.uint8), np.frombuffer(batch.buffer, np.uint8)
    for index, place in enumerate(batch.places):
        if put:
            arena[place : place + size] = buffer[index * size : (index + 1) * size]
        else:
            buffer[index * size : (index + 1) * size] = arena[place : place + size]


def hashed(copies: object, batch: Batch, *, put: bool, threads: int = 1) -> None:
    if put:
        sums = copies.copy_sums(batch.arena, batch.packed_places, batch.buffer, batch.packed, batch.size, threads)  # type: ignore[attr-defined]
        if sums != batch.sums:
            raise AssertionError("wrong checksums")
        return
    bad = copies.copy_verify(  # type: ignore[attr-defined]
        batch.buffer, batch.packed, batch.arena, batch.packed_places, batch.size, batch.sums, threads
    )
    if bad is not None:
        raise AssertionError(f"block {bad} is wrong")


def plain(batch: Batch, *, put: bool) -> None:
    copy = pure.copy if native is None else native.copy
    if put:
        copy(batch.arena, batch.packed_places, batch.buffer, batch.packed, batch.size)
    else:
        copy(batch.buffer, batch.packed, batch.arena, batch.packed_places, batch.size)


def contestants() -> dict[str, Callable[..., None]]:
    found: dict[str, Callable[..., None]] = {"memoryview slices": slices, "numpy slices": numpy_slices}
    if native is not None:
        found["native, hashed"] = lambda batch, *, put: hashed(native, batch, put=put)
        found["native, hashed, 2 threads"] = lambda batch, *, put: hashed(native, batch, put=put, threads=2)
    found["python, hashed"] = lambda batch, *, put: hashed(pure, batch, put=put)
    return found


def timed(work: Callable[..., None], batch: Batch, *, put: bool) -> float:
    if put:
        batch.next_turn()
    start = time.perf_counter()
    work(batch, put=put)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="16,64,256,1024", help="block sizes in KiB (default %(default)s)")
    parser.add_argument("--batch-mib", type=int, default=64, help="bytes of a batch in MiB (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=15, help="timed repeats of each (default %(default)s)")
    args = parser.parse_args()
    batch_bytes = args.batch_mib << 20
    arena = Arena.create(4 * batch_bytes)
    rows: list[list[str]] = []
    results: dict[str, dict[str, float]] = {}
    for size in (int(text) * KIB for text in args.sizes.split(",")):
        batch = Batch(arena.view, batch_bytes, size)
        ratios: dict[str, list[float]] = {}
        floor: dict[str, list[float]] = {"put": [], "get": []}
        for _ in range(args.repeats):
            for name, work in contestants().items():
                before = [timed(plain, batch, put=put) for put in (True, False)]
                times = [timed(work, batch, put=put) for put in (True, False)]
                after = [timed(plain, batch, put=put) for put in (True, False)]
                for way, first, middle, last in zip(("put", "get"), before, times, after, strict=True):
                    ratios.setdefault(f"{way}: {name}", []).append((first + last) / 2 / middle)
                    floor[way].append(batch_bytes / ((first + last) / 2) / 1e9)
        named = {name: median(values) for name, values in sorted(ratios.items(), reverse=True)}
        results[f"{size // KIB} KiB"] = {name: round(value, 3) for name, value in named.items()}
        for name, value in named.items():
            way = name[:3]
            rows.append(
                [f"{size // KIB} KiB", name, f"{value:.2f} ±{spread(ratios[name]):.0%}", f"{median(floor[way]):.1f}"]
            )
    print(table(["block", "contestant", "of a plain memcpy", "memcpy GB/s"], rows))
    print(closing_line("copying", results, batch_mib=args.batch_mib, repeats=args.repeats))


if __name__ == "__main__":
    main()
