"""How long single insertions take while a catalog fills: its tables grow on the way, and nobody may wait for it.

A catalog of this process, with an index for clients' lookups, but without a server, a client or an arena's bytes: what
is timed is one object's beginning and sealing, as the pool's thread does both. Timed are all, so that none is missed.
"""

from __future__ import annotations

import math
import os
import time
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvrelay.native import native
from kvrelay.transport.index import IndexMemory

if TYPE_CHECKING:
    from collections.abc import Callable

TICK_NS = 100
TICKS = 1 << 17
"""Times are counted in ticks; what takes longer than all of these counts as the longest."""
SUM = bytes(8)


@dataclass(frozen=True)
class Insertions:
    """Microseconds of one insertion: median, 99.9th percentile, the longest, and how many objects were there then."""

    p50: float
    p99_9: float
    longest: float
    longest_at: int


def insertions(objects: int, object_bytes: int, key_of: Callable[[int], bytes]) -> Insertions | None:
    """Fill a catalog; None where there is no native one."""
    if native is None:
        return None
    arena = objects * object_bytes * 9 // 8 + (64 << 20)
    catalog, memory = native.Catalog(arena), IndexMemory.create(arena)
    catalog.show(0, memory.table, memory.marks)
    counts = array("Q", bytes(8 * TICKS))
    longest, longest_at = 0, 0
    for number in range(objects):
        key = key_of(number)
        start = time.perf_counter_ns()
        catalog.seal(catalog.add(0, key, object_bytes), SUM, math.inf)
        took = time.perf_counter_ns() - start
        counts[min(took // TICK_NS, TICKS - 1)] += 1
        if took > longest:
            longest, longest_at = took, number
    connection = os.memfd_create("connection")  # nothing ever comes of it, as of one that goes on
    sample = [key_of(number) for number in range(0, objects, max(1, objects // 512))]
    found = native.index_count(memory.table, memory.marks, connection, sample, False)
    os.close(connection)
    memory.close()
    if found is not None and found != (len(sample), len(sample)):
        raise AssertionError(f"{found} of {len(sample)} objects are in the index")
    return Insertions(_share(counts, 0.5, objects), _share(counts, 0.999, objects), longest / 1e3, longest_at)


def _share(counts: array[int], share: float, total: int) -> float:
    """Microseconds that a share of all insertions took at most."""
    seen = 0
    for tick, count in enumerate(counts):
        seen += count
        if seen >= share * total:
            return (tick + 1) * TICK_NS / 1e3
    raise AssertionError(f"{seen} of {total} insertions were counted")
