"""What happens to rows: the pure catalog's mechanics, under `Catalog`."""

from __future__ import annotations

import heapq
import itertools
import math
from typing import TYPE_CHECKING

from kvrelay.pool.core.blocks import rounded
from kvrelay.pool.core.order import Standing
from kvrelay.pool.core.places import Places
from kvrelay.pool.core.row import Holding, Row, State
from kvrelay.wire import limits

if TYPE_CHECKING:
    from collections.abc import Iterable

MAX_PEEK = 16
"""Objects looked at for each that is offered as a victim."""


class Books:
    """Rows, tenants, the arena and the timetable of expiry, kept in step."""

    def __init__(self, arena_bytes: int) -> None:
        self.places = Places(arena_bytes)
        self.holdings: dict[int, Holding] = {}
        self.rows: list[Row] = []
        self.free: list[Row] = []
        self.expiring: list[tuple[float, int]] = []  # (when, handle), a heap; what has changed meanwhile is skipped
        self.number = dict.fromkeys(State, 0)
        self.pinned = self.kept = self.gone_bytes = 0
        self.evicted_for_room = self.evicted_for_quota = self.evicted_unclean = 0

    def holding(self, tenant: int) -> Holding:
        """What a tenant holds."""
        holding = self.holdings.get(tenant)
        if holding is None:
            holding = self.holdings[tenant] = Holding(tenant)
        return holding

    def row(self, number: int) -> Row:
        """A row that is somebody's."""
        if 0 <= number < len(self.rows) and (row := self.rows[number]).state is not State.FREE:
            return row
        raise ValueError(f"row {number} is free")

    def column(self, rows: bytes) -> list[Row]:
        """The rows of a column."""
        return [self.row(number) for number in memoryview(rows).cast("I")]

    def begin(self, holding: Holding, key: bytes, size: int, layers: int, segments: int) -> Row | None:
        """Begin an object, evicting what must be; None when there is no room for it."""
        span = rounded(size)
        if not self._within_quota(holding, span):
            return None
        row = self.free.pop() if self.free else Row(len(self.rows))
        row.begin(holding, key, size, span, layers, segments)
        while not self.places.take(row):
            victims = self.places.victims(size, self.holdings.values())
            if not victims:
                row.state = State.FREE
                self.discard(row)
                return None
            for victim in victims:
                self.evicted_unclean += not victim.clean
                self.evict(victim)
            self.evicted_for_room += len(victims)
        if row.number == len(self.rows):
            self.rows.append(row)
        holding.names[key] = row
        holding.bytes += span
        self.number[State.WRITING] += 1
        return row

    def discard(self, row: Row) -> None:
        """Have a row used again, if it is one of the list."""
        if row.number < len(self.rows):
            self.free.append(row)

    def _within_quota(self, holding: Holding, span: int) -> bool:
        size, objects = holding.over(span)
        if size > holding.evictable_bytes or objects > sum(holding.idle):
            return False
        while any(holding.over(span)) and (victim := holding.victim()):
            self.evicted_unclean += not victim.clean
            self.evict(victim)
            self.evicted_for_quota += 1
        return True

    def seal(self, row: Row, sums: bytes, expires: float) -> None:
        """An object is whole."""
        row.sums = sums
        row.state = State.SEALED
        row.held = False
        self.number[State.WRITING] -= 1
        self.number[State.SEALED] += 1
        row.tenant.queue.add(row, row.mark)
        self._changed(row, was=False)
        self.expire_at(row, expires)

    def evict(self, row: Row) -> None:
        """Take a sealed object's name to make room."""
        self.forget(row, evicted=True)

    def forget(self, row: Row, *, evicted: bool = False) -> None:
        """Take an object's name; ``evicted``: for the worth of it."""
        if row.state is State.GONE:
            return
        was = row.evictable
        if row.state is State.SEALED:
            if row.kept:
                self.kept -= 1
                row.kept = False
            elif evicted:
                row.tenant.queue.evict(row, row.mark)
            else:
                row.tenant.queue.remove(row)
        self.number[row.state] -= 1
        self.number[State.GONE] += 1
        self.gone_bytes += row.size
        row.state = State.GONE
        del row.tenant.names[row.key]
        if was:
            row.tenant.account(row, -1)
        self._settle(row)

    def _settle(self, row: Row) -> None:
        if row.state is not State.GONE or row.pins or row.held:
            return
        row.state = State.FREE
        self.number[State.GONE] -= 1
        self.gone_bytes -= row.size
        row.tenant.bytes -= row.span
        self.places.give_back(row)
        self.free.append(row)

    def _changed(self, row: Row, *, was: bool) -> None:
        """Count a row again that could be evicted (``was``) before something was done to it, or could not."""
        if row.evictable != was:
            row.tenant.account(row, -1 if was else 1)
            if not was:
                self.places.loosened()

    def pin(self, row: Row) -> None:
        """Add a pin."""
        was = row.evictable
        self.pinned += not row.pins
        row.pins += 1
        self._changed(row, was=was)

    def unpin(self, row: Row) -> None:
        """Take a pin away."""
        row.pins -= 1
        if not row.pins:
            self.pinned -= 1
            self._changed(row, was=False)
            self._settle(row)

    def unhold(self, row: Row) -> None:
        """Nobody writes it."""
        row.held = False
        self._settle(row)

    def keep(self, row: Row, *, on: bool) -> None:
        """Take a sealed row out of the queue, or put it back."""
        if row.kept == on:
            return
        was = row.evictable
        row.kept = on
        if on:
            self.kept += 1
            row.tenant.queue.remove(row)
        else:
            self.kept -= 1
            row.tenant.queue.add(row, row.mark)
            self.expire_at(row, row.expires)
        self._changed(row, was=was)

    def mark_clean(self, row: Row, *, clean: bool) -> None:
        """Note whether a lower tier has it."""
        counted = row.evictable
        if counted:
            row.tenant.account(row, -1)
        row.clean = clean
        if counted:
            row.tenant.account(row, 1)

    def trim(self, size_bytes: int, tenant: int | None, *, clean: bool) -> tuple[int, int]:
        """Evict objects of ``size_bytes`` in all; how many objects and bytes it was."""
        holdings = list(self.holdings.values()) if tenant is None else [self.holding(tenant)]
        objects = freed = 0
        while freed < size_bytes and holdings:
            holding = max(holdings, key=lambda holding: holding.bytes)
            victim = holding.victim(clean=clean)
            if victim is None:
                holdings.remove(holding)
                continue
            objects += 1
            freed += victim.span
            self.evict(victim)
        return objects, freed

    def victims(self, limit: int, tenant: int | None) -> list[Row]:
        """Up to ``limit`` objects, of one tenant or all, that will go next and that would be lost."""
        rows: list[Row] = []
        holdings = list(self.holdings.values()) if tenant is None else [self.holding(tenant)]
        for holding in sorted(holdings, key=lambda holding: -holding.bytes):
            for row in itertools.islice(holding.queue, MAX_PEEK * limit):
                if len(rows) == limit:
                    return rows
                if row.evictable and not row.clean and not row.visited:
                    rows.append(row)
        return rows

    def expire_at(self, row: Row, expires: float) -> None:
        """Note when an object expires."""
        row.expires = expires
        if row.state is not State.SEALED or expires == math.inf:
            return
        heapq.heappush(self.expiring, (expires, row.handle))
        if len(self.expiring) > 2 * self.number[State.SEALED] + 64:
            sealed = (row for row in self.rows if row.state is State.SEALED and row.expires < math.inf)
            self.expiring = [(row.expires, row.handle) for row in sealed]
            heapq.heapify(self.expiring)

    def expired(self, now: float) -> Row | None:
        """The next object whose time is over, taken off the timetable."""
        while self.expiring and self.expiring[0][0] <= now:
            when, handle = heapq.heappop(self.expiring)
            row = self.rows[handle & 0xFFFFFFFF]
            if row.handle == handle and row.state is State.SEALED and row.expires == when and not row.kept:
                return row
        return None

    def check_integrity(self) -> None:
        """Raise AssertionError unless all that is counted twice agrees."""
        live = [row for row in self.rows if row.state is not State.FREE]
        self.places.check_integrity(live)
        assert sorted(row.number for row in self.free) == [r.number for r in self.rows if r.state is State.FREE]
        for state in (State.WRITING, State.SEALED, State.GONE):
            assert self.number[state] == sum(row.state is state for row in live), state.name
        assert self.pinned == sum(row.pins > 0 for row in live)
        assert self.kept == sum(row.kept for row in live)
        assert self.gone_bytes == sum(row.size for row in live if row.state is State.GONE)
        waiting = set(self.expiring)
        for row in live:
            assert row.pins >= 0
            assert row.span == rounded(row.size)
            assert 0 < row.size <= limits.MAX_OBJECT_BYTES
            if row.state is State.GONE:
                assert row.pins or row.held, "bytes nobody can touch are not free"
            else:
                assert row.tenant.names[row.key] is row
            if row.state is State.SEALED:
                assert not row.held
                assert len(row.sums) == 8 * row.layers * row.segments
                assert row.kept or row.expires == math.inf or (row.expires, row.handle) in waiting
        self._check_holdings(live)

    def _check_holdings(self, live: Iterable[Row]) -> None:
        rows = {number: list(of) for number, of in itertools.groupby(
            sorted(live, key=lambda row: row.tenant.number), lambda row: row.tenant.number)}  # fmt: skip
        for number, holding in self.holdings.items():
            own = rows.get(number, [])
            sealed = [row for row in own if row.state is State.SEALED]
            assert set(holding.names.values()) == {row for row in own if row.state is not State.GONE}
            assert set(holding.queue) == {row for row in sealed if not row.kept}
            assert len(holding.queue) == sum(not row.kept for row in sealed)
            assert holding.bytes == sum(row.span for row in own)
            for standing in Standing:
                idle = [row for row in own if row.evictable and row.standing is standing]
                assert holding.idle[standing] == len(idle)
                assert holding.clean_idle[standing] == sum(row.clean for row in idle)
            assert holding.evictable_bytes == sum(row.span for row in own if row.evictable)
            assert holding.clean_bytes == sum(row.span for row in own if row.evictable and row.clean)
