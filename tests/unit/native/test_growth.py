"""The tables of a native catalog grow a step an addition: at every step all is found, and what cannot grow refuses."""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
from array import array
from typing import TYPE_CHECKING

import pytest

from kvrelay.native import native
from kvrelay.pool.core.catalog import Catalog
from kvrelay.transport.index import IndexMemory

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.skipif(native is None, reason="the native module was not built")

ARENA_BYTES = 1 << 20
WHOLE, BEGUN, GONE = range(3)


@pytest.fixture
def connection() -> Iterator[int]:
    """A descriptor that stands for the connection to the pool."""
    ends = os.pipe()
    yield ends[0]
    for fd in ends:
        os.close(fd)


def key_of(number: int) -> bytes:
    return b"key %d" % number


def test_at_every_step_of_growth_each_name_is_what_it_was_made(connection: int) -> None:
    """The table of names grows at 768 and 1,536 of them, the index at 308, 616 and 1,232."""
    assert native is not None
    catalog, memory = native.Catalog(ARENA_BYTES), IndexMemory.create(ARENA_BYTES)
    assert catalog.show(0, memory.table, memory.marks)
    fates: list[int] = []
    rows: list[int] = []

    def check() -> None:
        catalog.check_integrity()
        keys = [key_of(number) for number in range(len(fates) + 20)]
        states = [2 if fate == WHOLE else 1 if fate == BEGUN else 0 for fate in fates] + [0] * 20
        assert list(catalog.lookup(0, keys)[0]) == states
        told = native.index_exists(memory.table, memory.marks, connection, keys)
        assert told == [state == 2 for state in states]

    for number in range(2_400):
        row = catalog.add(0, key_of(number), 64)
        fates.append(BEGUN)
        rows.append(row)
        if number % 3:
            catalog.seal(row, bytes(8), math.inf)
            fates[number] = WHOLE
        back = number * 7919 % (number + 1)  # somewhere in what is moved, or is not yet
        if number % 5 == 0 and fates[back] != GONE:
            catalog.forget(rows[back])
            fates[back] = GONE
        elif fates[back] == BEGUN:
            catalog.seal(rows[back], bytes(8), math.inf)
            fates[back] = WHOLE
        if number % 4 == 0:
            check()
    catalog.forget_rows(array("I", [row for row, fate in zip(rows, fates, strict=True) if fate != GONE]).tobytes())
    fates = [GONE] * len(fates)
    check()
    memory.close()


def test_a_large_index_gets_its_memory_beside_and_lookups_go_on(connection: int) -> None:
    assert native is not None
    catalog, memory = native.Catalog(16 << 20), IndexMemory.create(16 << 20)
    assert catalog.show(0, memory.table, memory.marks)
    sizes = {0}
    for first in range(0, 150_000, 500):
        keys = [key_of(number) for number in range(first, first + 500)]
        rows = catalog.reserve(0, keys, array("Q", [64] * 500).tobytes())[1]
        catalog.publish(rows, bytes(8 * 500), math.inf)
        early = [key_of(number) for number in range(0, first + 500, 37)]
        count = len(early)
        assert native.index_count(memory.table, memory.marks, connection, early, False) == (count, count)
        sizes.add(catalog.looked_up().index_bytes)
    assert max(sizes) > 1 << 21
    catalog.check_integrity()
    memory.close()


def test_what_is_evicted_is_the_same_in_both_catalogs_while_the_marks_of_the_evicted_move() -> None:
    """2,048 objects have room; thousands of marks are kept, dropped and taken back, and their tables replaced."""
    assert native is not None
    rng = random.Random(7)
    catalogs = [Catalog(128 << 10), native.Catalog(128 << 10)]
    for step in range(400):
        share = rng.choice([0.0, 0.3, 0.9])
        newest = 60 * step
        keys = [
            key_of(rng.randrange(max(0, newest - 6_000), newest + 1) if rng.random() < share else newest + number)
            for number in range(60)
        ]
        wanted = [key_of(rng.randrange(newest + 60)) for _ in range(30)]
        for catalog in catalogs:
            states, rows, _ = catalog.reserve(0, keys, array("Q", [64] * len(keys)).tobytes())
            new = [row for row, state in zip(memoryview(rows).cast("I"), states, strict=True) if not state]
            catalog.publish(array("I", new).tobytes(), bytes(8 * len(new)), math.inf)
            for key in wanted:
                catalog.prefix(0, [key], 2, 1)
        if step % 10 == 0:
            everything = [key_of(number) for number in range(newest + 60)]
            one, other = (catalog.lookup(0, everything)[0] for catalog in catalogs)
            assert one == other
    for catalog in catalogs:
        catalog.check_integrity()


EXHAUSTED = """
import math, resource
from kvrelay.native import native

catalog = native.Catalog(1 << 40)
held = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
most = resource.getrlimit(resource.RLIMIT_AS)[1]
resource.setrlimit(resource.RLIMIT_AS, (held + (48 << 20), most))
rows = []
while (row := catalog.add(0, b"%d" % len(rows), 64)) is not None:
    catalog.seal(row, bytes(8), math.inf)
    rows.append(row)
assert catalog.add(0, b"another", 64) is None
resource.setrlimit(resource.RLIMIT_AS, (most, most))
catalog.check_integrity()
assert all(catalog.find(0, b"%d" % number) == row for number, row in enumerate(rows))
for number in range(len(rows), 2 * len(rows)):
    assert catalog.add(0, b"%d" % number, 64) is not None
catalog.check_integrity()
print(len(rows))
"""


def test_without_memory_for_larger_tables_objects_are_refused_and_none_is_lost() -> None:
    done = subprocess.run([sys.executable, "-c", EXHAUSTED], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 10_000
