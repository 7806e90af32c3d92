"""What every implementation of the catalog does."""

from __future__ import annotations

import math
from array import array
from typing import TYPE_CHECKING

import pytest

from kvrelay.pool.core.catalog import Catalog, State
from kvrelay.testing.catalogs import CATALOGS
from kvrelay.wire import limits
from kvrelay.wire.bulk import Stored

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

PAGE = 4096
NEVER = math.inf
MANY = 1 << 16


@pytest.fixture(params=sorted(CATALOGS))
def make(request: pytest.FixtureRequest) -> type[Catalog]:
    return CATALOGS[request.param]


def u32(values: Iterable[int]) -> bytes:
    return array("I", values).tobytes()


def u64(values: Iterable[int]) -> bytes:
    return array("Q", values).tobytes()


def rows_of(column: bytes) -> list[int]:
    return memoryview(column).cast("I").tolist()


def names(count: int, start: int = 0) -> list[bytes]:
    return [number.to_bytes(32, "big") for number in range(start, start + count)]


def put(catalog: Catalog, *keys: bytes, size: int = PAGE, tenant: int = 0, expires: float = NEVER) -> list[int]:
    """Seal objects of one segment, one after the other, whose checksum is the first byte of their key."""
    states, rows, _ = catalog.reserve(tenant, keys, u64([size] * len(keys)))
    assert set(states) <= {Stored.STORED}, list(states)
    for row, key in zip(rows_of(rows), keys, strict=True):
        assert catalog.publish(u32([row]), u64([key[0]]), expires) == 1
    catalog.check_integrity()
    return rows_of(rows)


def there(catalog: Catalog, *keys: bytes, tenant: int = 0) -> list[bool]:
    return [state == State.SEALED for state in catalog.lookup(tenant, keys)[0]]


# --- one object ---


def test_an_object_is_found_from_its_beginning_to_its_end(make: Callable[[int], Catalog]) -> None:
    catalog = make(8 * PAGE)
    assert catalog.find(0, b"k") is None
    row = catalog.add(0, b"k", 2 * PAGE, layers=2, segments=4)
    assert row is not None
    assert catalog.find(0, b"k") == row
    assert catalog.state(row) == State.WRITING
    offset, *geometry = catalog.geometry(row)
    assert geometry == [2 * PAGE, 2, 4]
    assert offset % PAGE == 0
    catalog.seal(row, u64(range(8)), NEVER)
    assert catalog.state(row) == State.SEALED
    assert catalog.sums(row, 2, 5) == u64([2, 3, 4])
    assert catalog.info(row) == (0, b"k", State.SEALED, offset, 2 * PAGE, 2, 4, 0, False, False, False, NEVER)
    assert catalog.usage(0) == (1, 2 * PAGE)
    assert catalog.forget(row)
    assert catalog.find(0, b"k") is None
    assert catalog.state(row) == State.FREE
    assert catalog.usage(0) == (0, 0)
    catalog.check_integrity()


def test_a_handle_never_meets_the_next_object_of_its_row(make: Callable[[int], Catalog]) -> None:
    catalog = make(PAGE)
    seen = set()
    for _ in range(3):
        row = catalog.add(0, b"k", 1)
        assert row is not None
        handle = catalog.handle(row)
        assert 0 < handle < 1 << 62
        assert catalog.row_of(handle) == row
        assert handle not in seen
        seen.add(handle)
        catalog.forget(row)
        assert catalog.row_of(handle) is None
    assert catalog.row_of(1 << 40) is None
    assert catalog.row_of(0xFFFFFFFF) is None


@pytest.mark.parametrize("size", [0, limits.MAX_OBJECT_BYTES + 1])
def test_an_impossible_size_is_refused(make: Callable[[int], Catalog], size: int) -> None:
    catalog = make(8 * PAGE)
    with pytest.raises(ValueError, match=str(size)):
        catalog.add(0, b"k", size)
    with pytest.raises(ValueError, match=str(size)):
        catalog.reserve(0, [b"a", b"b"], u64([PAGE, size]))
    assert catalog.counts().writing == 0
    for sizes in (u64([PAGE]), u64([PAGE, PAGE])[:-1], b""):
        with pytest.raises(ValueError, match=f"{len(sizes)} bytes of sizes for 2 keys"):
            catalog.reserve(0, [b"a", b"b"], sizes)


def test_a_row_that_is_free_is_refused(make: Callable[[int], Catalog]) -> None:
    catalog = make(8 * PAGE)
    (row,) = put(catalog, b"k")
    catalog.forget(row)
    for method in (catalog.pin, catalog.unpin, catalog.forget, catalog.hold, catalog.touch, catalog.key, catalog.info):
        with pytest.raises(ValueError, match="free"):
            method(row)
        with pytest.raises(ValueError, match="free"):
            method(row + 1000)
    for bulk in (catalog.pin_rows, catalog.unpin_rows, catalog.forget_rows, catalog.describe, catalog.runs):
        with pytest.raises(ValueError, match="free"):
            bulk(u32([row]))
    assert catalog.state(row) == catalog.state(row + 1000) == State.FREE


def test_what_cannot_be_is_refused(make: Callable[[int], Catalog]) -> None:
    catalog = make(8 * PAGE)
    (row,) = put(catalog, b"k")
    with pytest.raises(ValueError, match="already"):
        catalog.add(0, b"k", 1)
    with pytest.raises(ValueError, match="SEALED"):
        catalog.seal(row, u64([1]), NEVER)
    with pytest.raises(ValueError, match="not pinned"):
        catalog.unpin(row)
    writing = catalog.add(0, b"two", PAGE, segments=2)
    assert writing is not None
    with pytest.raises(ValueError, match="8 bytes"):
        catalog.seal(writing, u64([1]), NEVER)
    with pytest.raises(ValueError, match="segment"):
        catalog.publish(u32([writing]), u64([1]), NEVER)
    with pytest.raises(ValueError, match="segments"):
        catalog.describe(u32([writing]))
    with pytest.raises(ValueError, match="WRITING"):
        catalog.keep(writing, True)
    catalog.check_integrity()


def test_a_pinned_object_loses_its_name_at_once_and_its_bytes_at_the_last_unpin(
    make: Callable[[int], Catalog],
) -> None:
    catalog = make(PAGE)
    (row,) = put(catalog, b"k")
    catalog.pin(row)
    catalog.pin(row)
    assert not catalog.forget(row)
    assert not catalog.forget(row), "it has no name to lose any more"
    assert catalog.find(0, b"k") is None
    assert (catalog.state(row), catalog.key(row), catalog.sums(row, 0, 1)) == (State.GONE, b"k", u64([ord("k")]))
    assert (catalog.counts().gone, catalog.counts().gone_bytes) == (1, PAGE)
    assert catalog.add(0, b"k", 1) is None
    assert not catalog.unpin(row)
    assert catalog.unpin(row)
    assert catalog.add(0, b"k", 1) is not None
    catalog.check_integrity()


def test_held_bytes_are_not_reused_and_sealing_lets_go_of_them(make: Callable[[int], Catalog]) -> None:
    catalog = make(PAGE)
    row = catalog.add(0, b"k", PAGE)
    assert row is not None
    catalog.hold(row)
    assert not catalog.forget(row)
    assert catalog.add(0, b"other", 1) is None
    assert catalog.unhold(row)
    row = catalog.add(0, b"k", PAGE)
    assert row is not None
    catalog.hold(row)
    catalog.seal(row, u64([1]), NEVER)
    assert not catalog.info(row).held
    assert catalog.forget(row)


def test_keys_of_different_tenants_never_meet(make: Callable[[int], Catalog]) -> None:
    catalog = make(8 * PAGE)
    put(catalog, b"k", tenant=1)
    assert there(catalog, b"k", tenant=1) == [True]
    assert there(catalog, b"k", tenant=2) == there(catalog, b"k") == [False]
    put(catalog, b"k", tenant=2)
    assert catalog.usage(1) == catalog.usage(2) == (1, PAGE)
    assert catalog.usage(3) == (0, 0)


@pytest.mark.parametrize("length", [1, 31, 32, 33, limits.MAX_KEY_BYTES])
def test_keys_of_any_length_are_told_apart(make: Callable[[int], Catalog], length: int) -> None:
    catalog = make(8 * PAGE)
    one, other = b"\0" * length, b"\0" * (length - 1) + b"\1"
    put(catalog, one, size=64)
    assert there(catalog, one, other) == [True, False]
    (row,) = put(catalog, other, size=64)
    assert catalog.key(row) == other


def test_small_objects_share_a_page_and_large_ones_begin_at_one(make: Callable[[int], Catalog]) -> None:
    catalog = make(4 * PAGE)
    rows = put(catalog, *names(PAGE // 64), size=1)
    assert catalog.usage(0)[1] == PAGE
    assert all(catalog.geometry(row)[0] % 64 == 0 for row in rows)
    (large,) = put(catalog, b"large", size=3 * PAGE - 1)
    assert catalog.geometry(large)[0] % PAGE == 0
    assert catalog.usage(0)[1] == 4 * PAGE
    assert catalog.counts().free_bytes == catalog.counts().largest_free_bytes == 0


# --- many objects ---


def test_a_batch_is_reserved_published_and_described_in_columns(make: Callable[[int], Catalog]) -> None:
    catalog = make(16 * PAGE)
    keys = names(3)
    states, rows, offsets = catalog.reserve(7, keys, u64([PAGE, 2 * PAGE, 100]))
    assert list(states) == [Stored.STORED] * 3
    assert all(catalog.info(row).held for row in rows_of(rows))
    assert catalog.count_prefix(7, keys) == (3, 0)
    assert catalog.publish(rows, u64([11, 12, (1 << 64) - 1]), 50.0) == 3
    assert catalog.count_prefix(7, keys) == (3, 3)
    assert catalog.describe(rows) == (offsets, u64([PAGE, 2 * PAGE, 100]), u64([11, 12, (1 << 64) - 1]))
    assert catalog.info(rows_of(rows)[2]).expires == 50.0
    assert catalog.prefix(7, keys, State.SEALED, 1) == rows
    catalog.check_integrity()


def test_a_batch_says_what_is_there_what_is_being_written_and_what_comes_twice(make: Callable[[int], Catalog]) -> None:
    catalog = make(8 * PAGE)
    (present,) = put(catalog, b"there")
    busy = catalog.add(0, b"busy", PAGE, segments=2)
    keys, sizes = [b"there", b"new", b"busy", b"new", b"there", b"busy"], [PAGE] * 4 + [1, 2 * PAGE]
    states, rows, offsets = catalog.reserve(0, keys, u64(sizes))
    assert list(states) == [Stored.PRESENT, Stored.STORED, *[Stored.BUSY] * 2, *[Stored.CONFLICT] * 2]
    new = rows_of(rows)[1]
    assert rows_of(rows) == [present, new, busy, new, present, busy]
    assert memoryview(offsets).cast("Q").tolist() == [0, catalog.geometry(new)[0], 0, 0, 0, 0]
    assert catalog.sums(new, 0, 1) == b"", "it has no checksum before it is sealed"
    catalog.check_integrity()


def test_a_batch_that_lost_names_publishes_the_rest(make: Callable[[int], Catalog]) -> None:
    catalog = make(8 * PAGE)
    _, rows, _ = catalog.reserve(0, [b"a", b"b"], u64([PAGE] * 2))
    gone, kept = rows_of(rows)
    catalog.forget(gone)
    assert catalog.state(gone) == State.GONE, "somebody is still writing it"
    assert catalog.publish(rows, u64([1, 2]), NEVER) == 1
    assert (catalog.state(gone), catalog.state(kept)) == (State.FREE, State.SEALED)
    catalog.check_integrity()


def test_a_batch_that_is_given_up_rests_until_nobody_holds_it(make: Callable[[int], Catalog]) -> None:
    catalog = make(2 * PAGE)
    _, rows, _ = catalog.reserve(0, [b"a", b"b"], u64([PAGE] * 2))
    assert catalog.forget_rows(rows) == 2
    assert catalog.forget_rows(rows) == 0
    assert list(catalog.reserve(0, [b"c"], u64([PAGE]))[0]) == [Stored.FULL]
    assert sorted(rows_of(catalog.unhold_rows(rows))) == sorted(rows_of(rows))
    assert list(catalog.reserve(0, [b"c"], u64([PAGE]))[0]) == [Stored.STORED]
    catalog.check_integrity()


def test_pins_in_columns_count_each_time_and_tell_what_they_freed(make: Callable[[int], Catalog]) -> None:
    catalog = make(8 * PAGE)
    one, other = put(catalog, b"a", b"b")
    catalog.pin_rows(u32([one, other, one]))
    assert catalog.info(one).pins == 2
    assert catalog.counts().pinned == 2
    catalog.forget(one)
    assert catalog.unpin_rows(u32([one, other])) == b""
    assert rows_of(catalog.unpin_rows(u32([one]))) == [one]
    assert catalog.counts().pinned == 0
    catalog.check_integrity()


def test_a_prefix_ends_at_the_first_hole_wherever_the_others_are(make: Callable[[int], Catalog]) -> None:
    catalog = make(64 * PAGE)
    keys = names(20)
    rows = put(catalog, *keys)
    for hole in (13, 7, 0):
        catalog.forget(rows[hole])
        assert catalog.count_prefix(0, keys) == (hole, hole)
        assert rows_of(catalog.prefix(0, keys, State.SEALED, 1)) == rows[:hole]


def test_a_prefix_may_include_what_is_being_written_and_leave_out_what_is_in_segments(
    make: Callable[[int], Catalog],
) -> None:
    catalog = make(8 * PAGE)
    (sealed,) = put(catalog, b"s")
    cut = catalog.add(0, b"c", PAGE, layers=2, segments=2)
    assert cut is not None
    catalog.seal(cut, u64(range(4)), NEVER)
    writing = catalog.add(0, b"w", PAGE)
    keys = [b"s", b"c", b"w", b"x"]
    assert rows_of(catalog.prefix(0, keys, State.WRITING, MANY)) == [sealed, cut, writing]
    assert rows_of(catalog.prefix(0, keys, State.SEALED, MANY)) == [sealed, cut]
    assert rows_of(catalog.prefix(0, keys, State.SEALED, 1)) == [sealed]
    assert catalog.count_prefix(0, keys) == (3, 2)


def test_objects_that_lie_one_behind_the_other_are_one_run(make: Callable[[int], Catalog]) -> None:
    catalog = make(64 * PAGE)
    rows = put(catalog, *names(4))
    (apart,) = put(catalog, b"odd", size=100)
    by_place = sorted(rows, key=lambda row: catalog.geometry(row)[0])
    whole = catalog.runs(u32(by_place))
    assert sum(size for _, size in whole) == 4 * PAGE
    assert len(whole) == 1, "an empty arena gives equal objects neighbouring places"
    odd = catalog.geometry(apart)[0]
    assert catalog.runs(u32([apart, apart])) == [(odd, 100), (odd, 100)]
    backwards = catalog.runs(u32(reversed(by_place)))
    assert backwards == [(catalog.geometry(row)[0], PAGE) for row in reversed(by_place)]
    assert catalog.runs(b"") == []


# --- eviction ---


def test_room_is_made_of_what_was_not_asked_for(make: Callable[[int], Catalog]) -> None:
    catalog = make(4 * PAGE)
    put(catalog, b"a", b"b", b"c", b"d")
    catalog.count_prefix(0, [b"a"])
    row = catalog.find(0, b"b")
    assert row is not None
    catalog.touch(row)
    put(catalog, b"e")
    assert there(catalog, b"a", b"b", b"c", b"d", b"e") == [True, True, False, True, True]
    assert catalog.counts().evicted_for_room == 1


def test_what_is_pinned_kept_or_being_written_is_never_evicted(make: Callable[[int], Catalog]) -> None:
    catalog = make(4 * PAGE)
    pinned, kept, _ = put(catalog, b"pinned", b"kept", b"idle")
    writing = catalog.add(0, b"writing", PAGE)
    assert writing is not None
    catalog.pin(pinned)
    catalog.keep(kept, True)
    assert catalog.counts().evictable_bytes == PAGE
    put(catalog, b"new")
    new = catalog.find(0, b"new")
    assert new is not None
    catalog.pin(new)
    assert catalog.counts().evictable_bytes == 0
    assert catalog.add(0, b"more", 1) is None
    assert list(catalog.reserve(0, [b"more"], u64([PAGE]))[0]) == [Stored.FULL]
    assert catalog.trim(1 << 40) == (0, 0)
    catalog.keep(kept, False)
    put(catalog, b"more")
    assert there(catalog, b"pinned", b"kept", b"idle", b"new", b"more") == [True, False, False, True, True]
    assert catalog.state(writing) == State.WRITING


def test_what_a_batch_finds_there_is_not_evicted_for_the_rest_of_it(make: Callable[[int], Catalog]) -> None:
    catalog = make(2 * PAGE)
    put(catalog, b"a", b"b")
    states, _, _ = catalog.reserve(0, [b"a", b"c", b"b"], u64([PAGE] * 3))
    assert list(states) == [Stored.PRESENT, Stored.STORED, Stored.FULL]
    assert there(catalog, b"a", b"b") == [True, False]
    catalog.check_integrity()


def test_a_large_object_takes_the_place_of_neighbours(make: Callable[[int], Catalog]) -> None:
    catalog = make(64 * PAGE)
    keys = names(64)
    put(catalog, *keys)
    put(catalog, b"large", size=16 * PAGE)
    assert sum(there(catalog, *keys)) == 48, "no more are evicted than it takes"


def test_an_object_that_would_not_fit_whatever_were_evicted_evicts_nothing(make: Callable[[int], Catalog]) -> None:
    """Every eighth object is in use: nine in a row can never be had."""
    catalog = make(64 * PAGE)
    keys = names(64)
    rows = sorted(put(catalog, *keys), key=lambda row: catalog.geometry(row)[0])
    for row in rows[::8]:
        catalog.pin(row)
    assert catalog.add(0, b"hopeless", 9 * PAGE) is None
    assert catalog.add(0, b"hopeless", 10 * PAGE) is None
    assert catalog.add(0, b"larger than all", 65 * PAGE) is None
    assert all(there(catalog, *keys))
    put(catalog, b"fits", size=7 * PAGE)
    assert sum(there(catalog, *keys)) == 57
    catalog.unpin(rows[8])
    catalog.unpin(rows[16])
    put(catalog, b"hopeful", size=9 * PAGE)


def test_trimming_evicts_as_much_as_was_asked_and_no_more(make: Callable[[int], Catalog]) -> None:
    catalog = make(16 * PAGE)
    put(catalog, *names(16))
    assert catalog.trim(3 * PAGE - 1) == (3, 3 * PAGE)
    assert catalog.counts().free_bytes == 3 * PAGE
    assert catalog.trim(0) == (0, 0)
    assert catalog.trim(1 << 40) == (13, 13 * PAGE)
    catalog.check_integrity()


def test_what_is_clean_can_be_trimmed_alone_and_is_not_offered_as_a_victim(make: Callable[[int], Catalog]) -> None:
    catalog = make(16 * PAGE)
    rows = put(catalog, *names(6))
    catalog.pin(rows[0])
    assert rows_of(catalog.victims(2)) == rows[1:3]
    catalog.mark_clean(rows[1], True)
    catalog.touch(rows[3])
    assert rows_of(catalog.victims(9)) == [rows[2], rows[4], rows[5]]
    assert rows_of(catalog.victims(9, 0)) == [rows[2], rows[4], rows[5]]
    assert rows_of(catalog.victims(9, 5)) == []
    assert catalog.counts().sealed == 6
    assert catalog.trim(1 << 40, clean=True) == (1, PAGE)
    catalog.mark_clean(rows[2], True)
    catalog.mark_clean(rows[2], False)
    assert catalog.trim(1 << 40, clean=True) == (0, 0)
    assert catalog.info(rows[2]).clean is False
    catalog.check_integrity()


def test_of_a_batch_the_tail_goes_before_the_head(make: Callable[[int], Catalog]) -> None:
    """The keys of a batch are a chain: what follows a hole in it is of no use."""
    catalog = make(16 * PAGE)
    keys = names(16)
    _, rows, _ = catalog.reserve(0, keys, u64([PAGE] * 16))
    assert catalog.publish(rows, u64(range(16)), NEVER) == 16
    assert catalog.trim(6 * PAGE) == (6, 6 * PAGE)
    assert catalog.count_prefix(0, keys) == (10, 10)
    assert memoryview(catalog.describe(catalog.prefix(0, keys, State.SEALED, 1))[2]).cast("Q").tolist() == [*range(10)]


# --- tenants ---


def test_a_tenant_over_its_quota_pays_with_its_own(make: Callable[[int], Catalog]) -> None:
    catalog = make(16 * PAGE)
    put(catalog, b"other", tenant=2)
    catalog.set_quota(1, 2 * PAGE)
    put(catalog, b"a", b"b", tenant=1)
    put(catalog, b"c", tenant=1)
    assert there(catalog, b"a", b"b", b"c", tenant=1) == [False, True, True]
    assert there(catalog, b"other", tenant=2) == [True]
    assert catalog.usage(1) == (2, 2 * PAGE)
    assert catalog.counts().evicted_for_quota == 1
    assert catalog.add(1, b"too large", 3 * PAGE) is None
    assert there(catalog, b"b", b"c", tenant=1) == [True, True], "in vain nothing is evicted"
    for key in (b"b", b"c"):
        row = catalog.find(1, key)
        assert row is not None
        catalog.pin(row)
    assert list(catalog.reserve(1, [b"d"], u64([PAGE]))[0]) == [Stored.FULL]
    catalog.set_quota(1, None)
    put(catalog, b"d", tenant=1)


def test_a_tenant_with_as_many_objects_as_it_may_pays_with_its_own(make: Callable[[int], Catalog]) -> None:
    catalog = make(16 * PAGE)
    put(catalog, b"other", tenant=2)
    catalog.set_quota(1, None, 2)
    put(catalog, b"a", b"b", tenant=1)
    put(catalog, b"c", tenant=1)
    assert there(catalog, b"a", b"b", b"c", tenant=1) == [False, True, True]
    assert there(catalog, b"other", tenant=2) == [True]
    assert (catalog.usage(1), catalog.counts().evicted_for_quota) == ((2, 2 * PAGE), 1)
    row = catalog.find(1, b"b")
    assert row is not None
    catalog.pin(row)
    writing = catalog.add(1, b"d", PAGE)
    assert writing is not None, "in place of the one that is not pinned"
    assert catalog.usage(1) == (2, 2 * PAGE)
    assert list(catalog.reserve(1, [b"e"], u64([PAGE]))[0]) == [Stored.FULL], "what is being written counts"
    catalog.forget(row)
    assert catalog.usage(1) == (1, 2 * PAGE), "what has no name any more does not"
    put(catalog, b"e", tenant=1)
    catalog.set_quota(1, None, 1)
    assert catalog.add(1, b"f", PAGE) is None
    assert there(catalog, b"e", tenant=1) == [True], "in vain nothing is evicted"
    catalog.set_quota(1, None)
    put(catalog, b"f", tenant=1)


def test_room_is_made_at_the_expense_of_whoever_holds_most(make: Callable[[int], Catalog]) -> None:
    catalog = make(16 * PAGE)
    put(catalog, *names(4), tenant=1)
    put(catalog, *names(12), tenant=2)
    put(catalog, *names(4, start=100), tenant=3)
    assert (catalog.usage(1), catalog.usage(2), catalog.usage(3)) == ((4, 4 * PAGE), (8, 8 * PAGE), (4, 4 * PAGE))
    assert catalog.trim(3 * PAGE, 1) == (3, 3 * PAGE)
    assert catalog.usage(1) == (1, PAGE)
    assert catalog.usage(2) == (8, 8 * PAGE)


# --- expiry ---


def test_what_has_expired_is_forgotten_in_order_and_in_bounded_steps(make: Callable[[int], Catalog]) -> None:
    catalog = make(16 * PAGE)
    put(catalog, b"e", expires=5.0)
    put(catalog, b"c", expires=3.0)
    put(catalog, b"d", expires=4.0)
    put(catalog, b"never")
    first = catalog.next_expiry()
    assert first is not None
    assert first <= 3.0
    assert catalog.expire(2.9, 10) == (0, 0)
    assert catalog.expire(4.5, 1) == (1, PAGE)
    assert catalog.expire(4.5, 10) == (1, PAGE)
    assert there(catalog, b"c", b"d", b"e", b"never") == [False, False, True, True]
    assert catalog.expire(1e9, 10) == (1, PAGE)
    assert catalog.next_expiry() is None
    catalog.check_integrity()


def test_a_time_to_live_can_be_changed_and_a_kept_object_outlives_it(make: Callable[[int], Catalog]) -> None:
    catalog = make(16 * PAGE)
    longer, kept, shorter, pinned = put(catalog, b"l", b"k", b"s", b"p", expires=10.0)
    catalog.set_expiry(longer, NEVER)
    catalog.set_expiry(shorter, 5.0)
    catalog.keep(kept, True)
    catalog.pin(pinned)
    assert catalog.expire(6.0, 10) == (1, PAGE)
    assert catalog.expire(11.0, 10) == (1, PAGE)
    assert there(catalog, b"l", b"k", b"s", b"p") == [True, True, False, False]
    assert catalog.state(pinned) == State.GONE
    catalog.keep(kept, False)
    assert catalog.expire(12.0, 10) == (1, PAGE)
    assert catalog.unpin(pinned)
    catalog.check_integrity()


def test_changing_times_to_live_costs_no_memory_that_stays(make: Callable[[int], Catalog]) -> None:
    catalog = make(16 * PAGE)
    (row,) = put(catalog, b"k", expires=1.0)
    for second in range(2, 2000):
        catalog.set_expiry(row, float(second))
    assert catalog.expire(1998.5, 10) == (0, 0)
    assert catalog.expire(1999.0, 10) == (1, PAGE)
    catalog.check_integrity()


# --- looking around ---


def test_pages_show_every_object_of_a_tenant_once(make: Callable[[int], Catalog]) -> None:
    catalog = make(64 * PAGE)
    put(catalog, *names(10), tenant=1)
    put(catalog, *names(10, start=300), tenant=2)
    writing = catalog.add(1, b"writing", PAGE)
    assert writing is not None
    seen: list[bytes] = []
    cursor = 0
    for _ in range(100):
        rows, cursor = catalog.page(1, cursor, 3, b"")
        assert len(rows_of(rows)) <= 3
        seen += [catalog.key(row) for row in rows_of(rows)]
        if not cursor:
            break
    assert sorted(seen) == sorted([*names(10), b"writing"])
    assert rows_of(catalog.page(1, 0, 100, b"writ")[0]) == [writing]
    assert len(rows_of(catalog.page(None, 0, 100, b"")[0])) == 21
    assert catalog.page(1, 1 << 40, 10, b"") == (b"", 0)
    assert catalog.page(9, 0, 10, b"") == (b"", 0)
