"""Any sequence of calls leaves every implementation of the catalog in order, and evicts nothing that is in use."""

from __future__ import annotations

import itertools
import math
from array import array
from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from kvrelay.pool.core.catalog import Catalog, State
from kvrelay.testing.catalogs import CATALOGS
from kvrelay.wire.bulk import Stored

PAGE = 4096
KEYS = [bytes([number]) * 8 for number in range(12)]
TENANTS = st.integers(0, 2)
BATCHES = st.lists(st.sampled_from(KEYS), min_size=1, max_size=6)
SIZES = st.sampled_from([1, 64, 100, PAGE - 64, PAGE, PAGE + 1, 3 * PAGE, 7 * PAGE])


class Object:
    """What the test knows of one object."""

    def __init__(self, tenant: int, key: bytes, size: int, segments: int, *, held: bool) -> None:
        self.tenant = tenant
        self.key = key
        self.size = size
        self.segments = segments
        self.state = State.WRITING
        self.sums = b""
        self.pins = 0
        self.held = held
        self.kept = self.clean = False
        self.expires = math.inf

    @property
    def may_be_evicted(self) -> bool:
        return self.state is State.SEALED and not self.pins and not self.kept


class CatalogMachine(RuleBasedStateMachine):
    """Twelve keys of three tenants in an arena of sixteen pages."""

    make: ClassVar[type[Catalog]]

    @initialize()
    def begin(self) -> None:
        self.catalog = self.make(16 * PAGE + 17)
        self.objects: dict[int, Object] = {}
        self.handles: dict[int, int] = {}
        self.quota: dict[int, int | None] = dict.fromkeys(range(3))
        self.most: dict[int, int | None] = dict.fromkeys(range(3))
        self.now = 0.0
        self.evicted_before = 0

    # --- what the test knows ---

    def named(self, tenant: int, key: bytes) -> int | None:
        for row, known in self.objects.items():
            if (known.tenant, known.key) == (tenant, key) and known.state is not State.GONE:
                return row
        return None

    def pick(self, number: int, *states: State) -> int | None:
        rows = sorted(row for row, known in self.objects.items() if known.state in states)
        return rows[number % len(rows)] if rows else None

    def column(self, rows: list[int]) -> bytes:
        return array("I", rows).tobytes()

    def notice_evictions(self, *, spared: set[int] = frozenset()) -> int:  # type: ignore[assignment]
        """Forget what the catalog has evicted; it must have been allowed to."""
        lost = [row for row in self.objects if self.catalog.row_of(self.handles[row]) is None]
        for row in lost:
            assert self.objects[row].may_be_evicted, self.objects[row].key
            assert row not in spared
            del self.objects[row], self.handles[row]
        return len(lost)

    def begun(self, row: int, known: Object) -> None:
        assert row not in self.objects
        handle = self.catalog.handle(row)
        assert handle not in self.handles.values()
        self.objects[row] = known
        self.handles[row] = handle

    def settle(self, row: int) -> bool:
        known = self.objects[row]
        if known.state is State.GONE and not known.pins and not known.held:
            del self.objects[row], self.handles[row]
            return True
        return False

    # --- steps ---

    @rule(tenant=TENANTS, key=st.sampled_from(KEYS), size=SIZES, layers=st.integers(1, 2), segments=st.integers(1, 2))
    def add(self, tenant: int, key: bytes, size: int, layers: int, segments: int) -> None:
        before = self.catalog.counts()
        if self.named(tenant, key) is not None:
            with pytest.raises(ValueError, match="already"):
                self.catalog.add(tenant, key, size, layers, segments)
            return
        row = self.catalog.add(tenant, key, size, layers, segments)
        lost = self.notice_evictions()
        if row is None:
            after = self.catalog.counts()
            assert after.evicted_for_room == before.evicted_for_room, "evicted in vain"
            if self.quota[tenant] is None and self.most[tenant] is None:
                assert before.largest_free_bytes < size + PAGE
        else:
            assert lost or before.free_bytes >= size
            objects, held = self.catalog.usage(tenant)
            quota, most = self.quota[tenant], self.most[tenant]
            assert quota is None or held <= quota
            assert most is None or objects <= most
            self.begun(row, Object(tenant, key, size, layers * segments, held=False))

    @rule(tenant=TENANTS, keys=BATCHES, data=st.data())
    def reserve(self, tenant: int, keys: list[bytes], data: st.DataObject) -> None:
        sizes = data.draw(st.lists(SIZES, min_size=len(keys), max_size=len(keys)))
        before = {key: self.named(tenant, key) for key in keys}
        states, rows, offsets = self.catalog.reserve(tenant, keys, array("Q", sizes).tobytes())
        numbers = memoryview(rows).cast("I").tolist()
        places = memoryview(offsets).cast("Q").tolist()
        present = {row for row, state in zip(numbers, states, strict=True) if state == Stored.PRESENT}
        self.notice_evictions(spared=present)
        for key, size, row, state, offset in zip(keys, sizes, numbers, states, places, strict=True):
            if state == Stored.STORED:
                self.begun(row, Object(tenant, key, size, 1, held=True))
                assert self.catalog.geometry(row) == (offset, size, 1, 1)
            elif state == Stored.PRESENT:
                assert row == before[key]
                assert self.objects[row].state is State.SEALED
            elif state == Stored.BUSY:
                assert self.objects[row].state is State.WRITING
                assert (self.objects[row].key, self.objects[row].size) == (key, size)
            elif state == Stored.CONFLICT:
                assert self.objects[row].key == key
                assert self.objects[row].size != size
            else:
                assert state == Stored.FULL
                assert row == 0

    @rule(number=st.integers(0), ttl=st.sampled_from([0.0, 1.0, 5.0, math.inf]))
    def seal(self, number: int, ttl: float) -> None:
        row = self.pick(number, State.WRITING)
        if row is None:
            return
        known = self.objects[row]
        known.sums = array("Q", range(row, row + known.segments)).tobytes()
        known.expires = self.now + ttl
        self.catalog.seal(row, known.sums, known.expires)
        known.state, known.held = State.SEALED, False

    @rule(ttl=st.sampled_from([1.0, math.inf]), most=st.integers(1, 4))
    def publish(self, ttl: float, most: int) -> None:
        rows = [row for row, known in self.objects.items() if known.held and known.segments == 1][:most]
        writing = [row for row in rows if self.objects[row].state is State.WRITING]
        assert self.catalog.publish(self.column(rows), array("Q", rows).tobytes(), self.now + ttl) == len(writing)
        for row in rows:
            known = self.objects[row]
            known.held = False
            if known.state is State.WRITING:
                known.state, known.expires, known.sums = State.SEALED, self.now + ttl, row.to_bytes(8, "little")
            self.settle(row)

    @rule(number=st.integers(0))
    def forget(self, number: int) -> None:
        row = self.pick(number, State.WRITING, State.SEALED, State.GONE)
        if row is not None:
            self.objects[row].state = State.GONE
            self.objects[row].kept = False
            assert self.catalog.forget(row) == self.settle(row)

    @rule(numbers=st.lists(st.integers(0), max_size=4))
    def pin_rows(self, numbers: list[int]) -> None:
        rows = [self.pick(number, State.WRITING, State.SEALED, State.GONE) for number in numbers]
        there = [row for row in rows if row is not None]
        self.catalog.pin_rows(self.column(there))
        for row in there:
            self.objects[row].pins += 1

    @rule(most=st.integers(1, 4))
    def unpin_rows(self, most: int) -> None:
        rows = [row for row, known in self.objects.items() for _ in range(known.pins)][:most]
        freed = self.catalog.unpin_rows(self.column(rows))
        for row in rows:
            self.objects[row].pins -= 1
        assert sorted(memoryview(freed).cast("I")) == sorted(row for row in set(rows) if self.settle(row))

    @rule(number=st.integers(0))
    def unpin(self, number: int) -> None:
        rows = sorted(row for row, known in self.objects.items() if known.pins)
        if rows:
            row = rows[number % len(rows)]
            self.objects[row].pins -= 1
            assert self.catalog.unpin(row) == self.settle(row)

    @rule(number=st.integers(0))
    def hold(self, number: int) -> None:
        row = self.pick(number, State.WRITING)
        if row is not None:
            self.catalog.hold(row)
            self.objects[row].held = True

    @rule(number=st.integers(0))
    def unhold(self, number: int) -> None:
        rows = sorted(row for row, known in self.objects.items() if known.held)
        if rows:
            row = rows[number % len(rows)]
            self.objects[row].held = False
            assert self.catalog.unhold(row) == self.settle(row)

    @rule(number=st.integers(0), on=st.booleans(), what=st.sampled_from(["keep", "clean", "touch", "ttl"]))
    def change(self, number: int, on: bool, what: str) -> None:
        row = self.pick(number, State.SEALED)
        if row is None:
            return
        known = self.objects[row]
        if what == "keep":
            self.catalog.keep(row, on)
            known.kept = on
        elif what == "clean":
            self.catalog.mark_clean(row, on)
            known.clean = on
        elif what == "ttl":
            known.expires = self.now + 3.0 if on else math.inf
            self.catalog.set_expiry(row, known.expires)
        else:
            self.catalog.touch(row)

    @rule(size=st.sampled_from([1, PAGE, 5 * PAGE]), tenant=st.one_of(st.none(), TENANTS), clean=st.booleans())
    def trim(self, size: int, tenant: int | None, clean: bool) -> None:
        may = {
            row
            for row, known in self.objects.items()
            if known.may_be_evicted and tenant in {None, known.tenant} and (known.clean or not clean)
        }
        before = self.catalog.counts().free_bytes
        objects, freed = self.catalog.trim(size, tenant, clean=clean)
        assert self.catalog.counts().free_bytes - before == freed
        rows = set(self.objects)
        assert self.notice_evictions() == objects
        assert rows - set(self.objects) <= may
        assert freed >= size or objects == len(may)

    @rule(seconds=st.sampled_from([0.5, 1.0, 4.0]), limit=st.sampled_from([1, 100]))
    def expire(self, seconds: float, limit: int) -> None:
        self.now += seconds
        due = {
            row
            for row, known in self.objects.items()
            if known.state is State.SEALED and not known.kept and known.expires <= self.now
        }
        first = self.catalog.next_expiry()
        assert not due or (first is not None and first <= self.now)
        objects, _ = self.catalog.expire(self.now, limit)
        assert objects == min(limit, len(due))
        for row in due:
            if self.catalog.state(row) is not State.SEALED:
                self.objects[row].state = State.GONE
                self.settle(row)

    @rule(tenant=TENANTS, pages=st.one_of(st.none(), st.integers(0, 8)), most=st.one_of(st.none(), st.integers(0, 6)))
    def set_quota(self, tenant: int, pages: int | None, most: int | None) -> None:
        self.quota[tenant] = None if pages is None else pages * PAGE
        self.most[tenant] = most
        self.catalog.set_quota(tenant, self.quota[tenant], most)

    @rule(tenant=TENANTS, keys=BATCHES)
    def find(self, tenant: int, keys: list[bytes]) -> None:
        rows = [self.named(tenant, key) for key in keys]
        states, numbers = self.catalog.lookup(tenant, keys)
        assert list(states) == [State.FREE if row is None else self.objects[row].state for row in rows]
        assert memoryview(numbers).cast("I").tolist() == [row or 0 for row in rows]
        there = rows[: rows.index(None)] if None in rows else rows
        found = [row for row in there if row is not None]
        sealed = next((n for n, row in enumerate(found) if self.objects[row].state is not State.SEALED), len(found))
        assert self.catalog.count_prefix(tenant, keys) == (len(found), sealed)
        assert self.catalog.prefix(tenant, keys, State.WRITING, 100) == self.column(found)
        assert self.catalog.prefix(tenant, keys, State.SEALED, 100) == self.column(found[:sealed])

    @rule(limit=st.integers(1, 4))
    def victims(self, limit: int) -> None:
        rows = memoryview(self.catalog.victims(limit)).cast("I").tolist()
        assert len(rows) == len(set(rows)) <= limit
        assert all(self.objects[row].may_be_evicted and not self.objects[row].clean for row in rows)

    # --- what holds after every step ---

    @invariant()
    def the_catalog_is_in_order(self) -> None:
        self.catalog.check_integrity()

    @invariant()
    def it_knows_what_the_test_knows(self) -> None:
        spans = []
        for row, known in self.objects.items():
            info = self.catalog.info(row)
            assert info.tenant == known.tenant
            assert info.key == known.key
            assert info.state == known.state
            assert (info.size, info.layers * info.segments) == (known.size, known.segments)
            assert (info.pins, info.held, info.kept) == (known.pins, known.held, known.kept)
            if known.state is State.SEALED:
                assert (info.clean, info.expires) == (known.clean, known.expires)
                assert self.catalog.sums(row, 0, known.segments) == known.sums
            spans.append((info.offset, info.offset + info.size))
        spans.sort()
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans)), "bytes are shared"
        assert not spans or spans[-1][1] <= self.catalog.arena_bytes
        counts = self.catalog.counts()
        states = [known.state for known in self.objects.values()]
        assert counts.sealed == states.count(State.SEALED)
        assert counts.writing == states.count(State.WRITING)
        assert counts.gone == states.count(State.GONE)
        assert counts.pinned == sum(known.pins > 0 for known in self.objects.values())
        for tenant in range(3):
            own = [known for known in self.objects.values() if known.tenant == tenant]
            named = [known for known in own if known.state is not State.GONE]
            objects, held = self.catalog.usage(tenant)
            assert objects == len(named)
            assert held >= sum(known.size for known in own)

    @invariant()
    def what_is_listed_is_what_has_a_name(self) -> None:
        listed = memoryview(self.catalog.page(None, 0, 1000, b"")[0]).cast("I").tolist()
        assert sorted(listed) == sorted(r for r, known in self.objects.items() if known.state is not State.GONE)


@pytest.mark.parametrize("implementation", sorted(CATALOGS))
@pytest.mark.timeout(300)
def test_the_catalog_holds_up_under_any_sequence_of_calls(implementation: str) -> None:
    machine = type("Machine", (CatalogMachine,), {"make": CATALOGS[implementation]})
    run_state_machine_as_test(machine, settings=settings(max_examples=200, stateful_step_count=60, deadline=None))
