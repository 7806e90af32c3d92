"""The index a native catalog keeps for clients of its host says what the catalog would say itself."""

from __future__ import annotations

import math
import os
import socket
import time
from array import array
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from kvrelay.client.index import SharedIndex
from kvrelay.native import native
from kvrelay.pool.core.catalog import Catalog, LookedUp
from kvrelay.transport.index import IndexMemory, clock, mapped
from kvrelay.wire import limits
from kvrelay.wire import messages as m

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

pytestmark = pytest.mark.skipif(native is None, reason="the native module was not built")

ARENA_BYTES = 1 << 20


class Shown(NamedTuple):
    """A catalog, its index, and a socket that stands for the connection to its pool."""

    catalog: Any
    memory: IndexMemory
    fd: int

    def put(self, keys: Sequence[bytes], size: int = 64, expires: float = math.inf, *, tenant: int = 0) -> bytes:
        """Store objects; their rows."""
        column = self.begin(keys, size, tenant=tenant)
        self.catalog.publish(column, bytes(8 * len(keys)), expires)
        return column

    def begin(self, keys: Sequence[bytes], size: int = 64, *, tenant: int = 0) -> bytes:
        """Begin objects; their rows."""
        column: bytes = self.catalog.reserve(tenant, keys, array("Q", [size] * len(keys)).tobytes())[1]
        return column

    def counted(self, keys: Sequence[bytes], *, whole: bool = False) -> tuple[int, int] | None:
        """Present and sealed."""
        assert native is not None
        found: tuple[int, int] | None = native.index_count(self.memory.table, self.memory.marks, self.fd, keys, whole)
        return found

    def exists(self, keys: Sequence[bytes]) -> list[bool] | None:
        """Which are sealed."""
        assert native is not None
        flags: list[bool] | None = native.index_exists(self.memory.table, self.memory.marks, self.fd, keys)
        return flags


def show(catalog: Any, fd: int, arena_bytes: int = ARENA_BYTES, *, tenant: int = 0) -> Shown:
    memory = IndexMemory.create(arena_bytes)
    assert catalog.show(tenant, memory.table, memory.marks)
    return Shown(catalog, memory, fd)


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    with one, other:
        yield one, other


@pytest.fixture
def shown(ends: tuple[socket.socket, socket.socket]) -> Iterator[Shown]:
    assert native is not None
    made = show(native.Catalog(ARENA_BYTES), ends[0].fileno())
    yield made
    made.memory.close()


def names(count: int, first: int = 0) -> list[bytes]:
    return [b"key %d" % number for number in range(first, first + count)]


def test_what_is_begun_is_present_and_what_is_published_is_sealed(shown: Shown) -> None:
    keys = names(4)
    assert shown.counted(keys) == (0, 0)
    rows = shown.begin(keys[:3])
    assert shown.counted(keys) == (3, 0)
    shown.catalog.publish(rows[:8], bytes(16), math.inf)
    assert shown.counted(keys) == (3, 2)
    assert shown.exists(keys) == [True, True, False, False]


def test_whatever_takes_a_name_takes_it_out_of_the_index(shown: Shown) -> None:
    keys = names(5)
    rows = memoryview(shown.put(keys)).cast("I")
    shown.catalog.forget(rows[0])
    assert shown.exists(keys) == [False, True, True, True, True]
    shown.catalog.set_expiry(rows[1], 1.0)
    assert shown.counted(keys[1:]) is None  # something is due: the pool may not have got to it yet
    shown.catalog.expire(2.0, 10)
    assert shown.exists(keys) == [False, False, True, True, True]
    assert shown.catalog.trim(64)[0] == 1
    assert sum(shown.exists(keys) or ()) == 2
    shown.catalog.trim(1 << 40, 0)
    assert shown.exists(keys) == [False] * 5
    shown.catalog.check_integrity()


def test_an_object_that_never_was_whole_leaves_nothing(shown: Shown) -> None:
    rows = shown.begin(names(2))
    shown.catalog.forget_rows(rows)
    assert shown.counted(names(2)) == (0, 0)
    shown.catalog.unhold_rows(rows)
    shown.put(names(2))
    assert shown.counted(names(2)) == (2, 2)


@pytest.mark.parametrize("count", [1, 63, 64, 65, 127, 128, 129, 300])
def test_a_prefix_ends_at_the_first_key_that_is_missing_wherever_that_is(shown: Shown, count: int) -> None:
    keys = names(count)
    rows = memoryview(shown.put(keys)).cast("I")
    assert shown.counted(keys) == (count, count)
    there = [True] * count
    for gone in sorted({0, 63 % count, 64 % count, count // 2, count - 1}, reverse=True):
        shown.catalog.forget(rows[gone])
        there[gone] = False
        assert shown.counted(keys) == (gone, gone)
        assert shown.exists(keys) == there


@pytest.mark.parametrize("begun", [0, 63, 64, 127, 128, 199])
def test_an_unsealed_key_ends_what_is_sealed_and_not_what_is_present(shown: Shown, begun: int) -> None:
    keys = names(200)
    shown.put(keys[:begun])
    shown.begin([keys[begun]])
    shown.put(keys[begun + 1 :])
    assert shown.counted(keys) == (200, begun)
    assert shown.exists(keys) == [number != begun for number in range(200)]


def test_growing_loses_nothing_and_marks_stay(shown: Shown) -> None:
    before = shown.catalog.looked_up().index_bytes
    shown.put(names(100))
    assert shown.counted(names(100)) == (100, 100)
    for first in range(100, 10_000, 100):
        shown.put(names(100, first))
        assert shown.counted(names(first + 100)) == (first + 100, first + 100)
    shown.catalog.check_integrity()
    assert shown.catalog.looked_up().index_bytes > 10 * before
    assert shown.exists([b"another", *names(3)]) == [False, True, True, True]


def test_what_was_there_before_it_was_shown_is_in_the_index(ends: tuple[socket.socket, socket.socket]) -> None:
    assert native is not None
    catalog = native.Catalog(ARENA_BYTES)
    early = Shown(catalog, IndexMemory.create(64), -1)
    early.put(names(1_000))
    early.begin(names(10, 1_000))
    rows = early.put(names(1, 5_000), expires=0.0)
    late = show(catalog, ends[0].fileno())
    assert late.counted(names(1_020)) is None  # an object is due
    catalog.forget_rows(rows)
    assert late.counted(names(1_020)) == (1_010, 1_000)
    catalog.check_integrity()
    for made in (early, late):
        made.memory.close()


def test_the_pool_is_asked_while_an_object_is_due_and_not_when_it_is_kept(shown: Shown) -> None:
    keys = names(2)
    rows = memoryview(shown.put(keys, expires=time.monotonic() + 3_600)).cast("I")
    assert shown.counted(keys) == (2, 2)
    shown.catalog.set_expiry(rows[1], time.monotonic())
    assert shown.counted(keys) is None
    assert shown.exists(keys[:1]) is None
    shown.catalog.keep(rows[1], True)
    assert shown.counted(keys) == (2, 2)
    shown.catalog.keep(rows[1], False)
    assert shown.counted(keys) is None


def test_the_pool_is_asked_when_the_connection_has_ended(
    shown: Shown, ends: tuple[socket.socket, socket.socket]
) -> None:
    shown.put(names(1))
    ends[1].sendall(b"an answer on its way")
    assert shown.counted(names(1)) == (1, 1)
    ends[1].close()
    assert shown.counted(names(1)) is None
    assert shown._replace(fd=-1).exists(names(1)) is None


@pytest.mark.parametrize("wrong", [b"", bytes(limits.MAX_KEY_BYTES + 1), "text", bytearray(b"key 0"), None])
def test_the_pool_is_asked_about_keys_that_are_none(shown: Shown, wrong: Any) -> None:
    assert shown.counted([b"key 0", wrong]) is None
    assert shown.exists([wrong]) is None
    assert shown.counted([b"k" * limits.MAX_KEY_BYTES]) == (0, 0)


def test_the_pool_is_asked_for_what_lower_tiers_may_hold(shown: Shown) -> None:
    shown.put(names(2))
    assert shown.counted(names(2), whole=True) == (2, 2)
    assert shown.counted(names(3), whole=True) is None
    assert shown.catalog.looked_up()[1:] == (1, 2, 0)


def test_lookups_are_counted_and_those_that_only_tell_count_no_keys(shown: Shown) -> None:
    shown.put(names(2))
    shown.counted(names(3))
    shown.counted([])
    shown.exists(names(3))
    assert shown.catalog.looked_up() == LookedUp(shown.catalog.looked_up().index_bytes, 3, 2, 1)


@pytest.mark.parametrize("pages", [256, 1_000])  # of the latter the index grows while it is looked at
def test_what_was_looked_up_is_spared_as_what_the_pool_was_asked_for(pages: int) -> None:
    """The same fills and the same lookups, of which one catalog answers all and of the other the index."""
    assert native is not None
    one, other = socket.socketpair()
    with one, other:
        asked = Shown(native.Catalog(pages * 4_096), IndexMemory.create(ARENA_BYTES), -1)
        looked = show(native.Catalog(pages * 4_096), one.fileno())
        for turn in range(pages // 8):
            keys = names(20, 20 * turn)
            for made in (asked, looked):
                made.put(keys, 4_096)
            wanted = [key for key in names(20 * turn) if key[-1] in b"37"]
            for key in wanted:
                found = asked.catalog.count_prefix(0, [key])
                assert looked.counted([key]) == found
        for made in (asked, looked):
            made.catalog.check_integrity()
            made.memory.close()
        kept = [catalog.page(0, 0, 1 << 14, b"")[0] for catalog in (asked.catalog, looked.catalog)]
        assert kept[0] == kept[1]


@pytest.mark.parametrize("batch", [1, 400])  # of a batch the last is the first to go
@pytest.mark.parametrize("filled", range(296, 400, 4))
def test_what_was_looked_up_while_the_index_grows_is_spared_and_once_only(
    ends: tuple[socket.socket, socket.socket], filled: int, batch: int
) -> None:
    """It begins to grow at 308 names; some are looked up and some of these spared at any step of that, and after it."""
    assert native is not None
    asked = Shown(native.Catalog(ARENA_BYTES), IndexMemory.create(ARENA_BYTES), -1)
    looked = show(native.Catalog(ARENA_BYTES), ends[0].fileno())
    for made in (asked, looked):
        for first in range(0, filled, batch):
            made.put(names(min(batch, filled - first), first))
    for step, last in enumerate((filled + 6, 430, 470, 520)):
        wanted = names(230)[step :: 3 + step]
        for key in wanted:
            assert looked.counted([key]) == asked.catalog.count_prefix(0, [key])
        for made in (asked, looked):
            made.catalog.trim(64 * 25)
            made.put(names(last - filled, 1_000 * (step + 1)))
            made.catalog.trim(64 * 25)
        filled = last
        kept = [made.catalog.lookup(0, names(filled))[0] for made in (asked, looked)]
        assert kept[0] == kept[1]
    for made in (asked, looked):
        made.catalog.check_integrity()
        made.memory.close()


def test_tenants_have_indexes_of_their_own(ends: tuple[socket.socket, socket.socket]) -> None:
    assert native is not None
    catalog = native.Catalog(ARENA_BYTES)
    one, two = (show(catalog, ends[0].fileno(), tenant=tenant) for tenant in (1, 2))
    one.put(names(2), tenant=1)
    two.put(names(1), tenant=2)
    assert (one.counted(names(2)), two.counted(names(2))) == ((2, 2), (1, 1))
    assert bytes(one.memory.table[16:32]) != bytes(two.memory.table[16:32])  # nor do their hashes tell of one another
    catalog.trim(1 << 40, 1)
    assert (one.counted(names(2)), two.counted(names(2))) == ((0, 0), (1, 1))
    for made in (one, two):
        made.memory.close()


def test_an_index_that_cannot_grow_ends_and_the_pool_is_asked(ends: tuple[socket.socket, socket.socket]) -> None:
    assert native is not None
    made = show(native.Catalog(ARENA_BYTES), ends[0].fileno(), arena_bytes=64)
    made.put(names(300))
    assert made.counted(names(300)) == (300, 300)
    made.put(names(300, 300))
    assert made.counted(names(300)) is None
    made.catalog.forget_rows(made.put(names(300, 600)))
    made.catalog.check_integrity()
    made.memory.close()


def test_memory_that_is_none_for_an_index_is_refused(shown: Shown) -> None:
    other = IndexMemory.create(ARENA_BYTES)
    with pytest.raises(ValueError, match="tenant 0 is shown already"):
        shown.catalog.show(0, other.table, other.marks)
    for table, marks in (
        (other.table[:-4096], other.marks),
        (other.table, other.marks[:64]),
        (other.table[1:], other.marks),
    ):
        with pytest.raises(ValueError, match="no index fits"):
            shown.catalog.show(1, table, marks)
    with pytest.raises(BufferError):
        shown.catalog.show(1, memoryview(bytes(4096)), other.marks)
    other.close()


def test_the_catalog_in_python_keeps_none() -> None:
    assert not Catalog(ARENA_BYTES).show(0, memoryview(b""), memoryview(b""))
    assert Catalog(ARENA_BYTES).looked_up() == LookedUp(0, 0, 0, 0)


def test_clients_can_read_the_table_only(shown: Shown) -> None:
    table, marks = shown.memory.descriptors
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(table, b"x", 0)
    for fd in (table, marks):
        with pytest.raises(OSError, match=r"Operation not permitted|Invalid argument"):
            os.ftruncate(fd, 0)


def test_a_file_is_mapped_for_reading_or_for_both_and_for_as_long_as_it_is_looked_at(shown: Shown) -> None:
    fd, size = shown.memory.descriptors[1], shown.memory.sizes[1]
    one, other = mapped(fd, size, writable=True), mapped(fd, size, writable=False)
    one[-1] = 7
    assert other[-1] == 7
    assert other.readonly
    assert len(other) == size
    part = one[-1:]
    del one
    assert part[0] == 7
    with pytest.raises(OSError, match="Permission denied"):
        mapped(shown.memory.descriptors[0], shown.memory.sizes[0], writable=True)
    with pytest.raises(OSError, match="Bad file descriptor"):
        mapped(-1, size, writable=False)
    with pytest.raises(ValueError, match="no whole pages"):
        mapped(fd, 100, writable=False)


def test_an_index_of_another_clock_or_size_is_not_used(shown: Shown) -> None:
    table, marks = shown.memory.sizes

    def attach(*reply: Any) -> SharedIndex | None:
        return SharedIndex.attach([os.dup(fd) for fd in shown.memory.descriptors], m.IndexMapped(0, *reply))

    shown.put(names(1))
    mapped = attach(table, marks, clock(), False)
    assert mapped is not None
    assert mapped.count_prefix(shown.fd, names(2)) == (1, 1, 1)
    assert attach(table, marks, "time:[another]", False) is None
    assert attach(table + 1, marks, clock(), False) is None
    assert (
        SharedIndex.attach([os.dup(shown.memory.descriptors[0])], m.IndexMapped(0, table, marks, clock(), False))
        is None
    )
