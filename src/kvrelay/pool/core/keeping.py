"""Objects by key: which there are, keeping them, losing them."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

from kvrelay.pool.core.catalog import State
from kvrelay.wire import messages as m
from kvrelay.wire.bulk import ObjectInfo

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvrelay.pool.core.desk import Connection, Desk
    from kvrelay.pool.core.lower import Lower, Seeking
    from kvrelay.pool.core.reading import Reading
    from kvrelay.pool.core.upkeep import Upkeep
    from kvrelay.pool.core.writing import Writing

PURGE_BYTES = 1 << 62


class Keeping:
    """Existence, pins, times to live, deletion, listing."""

    def __init__(self, desk: Desk, reading: Reading, writing: Writing, upkeep: Upkeep, seeking: Seeking) -> None:
        self._desk = desk
        self._store = desk.store
        self._catalog = desk.store.catalog
        self._reading = reading
        self._writing = writing
        self._upkeep = upkeep
        self._seeking = seeking

    def exists(self, conn: Connection, request: m.Exists, _now: float) -> None:
        """Say which keys are sealed."""
        states, _ = self._catalog.lookup(conn.tenant, request.keys)
        self._desk.send(conn.number, m.Existing(request.id, [state == State.SEALED for state in states]))

    def _sealed(self, conn: Connection, keys: list[bytes]) -> list[int]:
        """Rows of the keys that are sealed, each once."""
        states, rows = self._catalog.lookup(conn.tenant, keys)
        pairs = zip(states, memoryview(rows).cast("I"), strict=True)
        return list(dict.fromkeys(row for state, row in pairs if state == State.SEALED))

    def pin(self, conn: Connection, request: m.Pin, _now: float) -> None:
        """Keep objects until further notice."""
        self._keep(conn, request, on=True)

    def unpin(self, conn: Connection, request: m.Unpin, _now: float) -> None:
        """Keep them no longer."""
        self._keep(conn, request, on=False)

    def _keep(self, conn: Connection, request: m.Pin | m.Unpin, *, on: bool) -> None:
        rows = self._sealed(conn, request.keys)
        for row in rows:
            self._catalog.keep(row, on)
        self._desk.send(conn.number, m.Affected(request.id, len(rows)))

    def touch(self, conn: Connection, request: m.Touch, now: float) -> None:
        """Give objects a new time to live, and note that they are wanted."""
        rows = self._sealed(conn, request.keys)
        expires = self._upkeep.expiry(now, request.ttl_s)
        self._end_below(conn.tenant, rows, expires, now)
        for row in rows:
            self._catalog.set_expiry(row, expires)
            self._catalog.touch(row)
        self._desk.send(conn.number, m.Affected(request.id, len(rows)))

    def _end_below(self, tenant: int, rows: Iterable[int], expires: float, now: float) -> None:
        """Forget what lower tiers would keep for longer than from now on is right: it would come up again."""
        if self._seeking.lower is None:
            return
        sooner = [row for row in rows if expires < self._catalog.info(row).expires]
        for row in sooner:
            self._catalog.mark_clean(row, False)
        if sooner:
            self._seeking.lower.forget(tenant, [self._catalog.key(row) for row in sooner], now)

    def prefetch(self, conn: Connection, request: m.Prefetch, now: float) -> None:
        """Have lower tiers bring objects up."""
        states, _ = self._catalog.lookup(conn.tenant, request.keys)
        absent = [key for key, state in zip(request.keys, states, strict=True) if state == State.FREE]

        def answer(coming: int, _now: float) -> None:
            self._desk.send(conn.number, m.Affected(request.id, coming))

        self._seeking.prefetch(conn, absent, answer, now)

    # --- losing objects ---

    def delete(self, conn: Connection, request: m.Delete, now: float) -> None:
        """Forget objects, here and below."""
        states, rows = self._catalog.lookup(conn.tenant, request.keys)
        pairs = zip(states, memoryview(rows).cast("I"), strict=True)
        found = dict.fromkeys(row for state, row in pairs if state != State.FREE)
        self.remove(found)
        self._desk.counters.deleted += len(found)
        if self._seeking.lower is not None:
            self._seeking.lower.forget(conn.tenant, request.keys, now)
        self._desk.send(conn.number, m.Deleted(request.id, len(found)))

    def corrupt(self, conn: Connection, request: m.Corrupt, now: float) -> None:
        """Forget an object a reader found damaged."""
        row = self._reading.corrupt(conn, request, now)
        named = self._catalog.state(row) is not State.GONE  # else the name may be another object's by now
        if named and self._seeking.lower is not None:
            self._seeking.lower.forget(conn.tenant, [self._catalog.key(row)], now)
        self.remove((row,))

    def remove(self, rows: Iterable[int]) -> None:
        """Take the names of objects, sealed or not."""
        for row in rows:
            state, entry = self._catalog.state(row), self._store.entries.get(row)
            if entry is not None and entry.open:
                self._writing.lose(entry)
            else:
                self._store.forget(row)
                if state is State.WRITING:
                    self._reading.lost((row,))

    def purge(self, tenant: int, now: float) -> int:
        """Forget every object of a tenant that nobody has leased or pinned, here and below; how many here."""
        purged, _ = self._catalog.trim(PURGE_BYTES, tenant)
        lower = self._seeking.lower
        if lower is not None:
            held = self._held_below(tenant, lower)
            self.remove(held)
            purged += len(held)
            lower.purge(tenant, now)
        self._desk.counters.purged += purged
        return purged

    def _held_below(self, tenant: int, lower: Lower) -> list[int]:
        """Sealed objects of a tenant whose every pin is lower tiers' own: no client uses them."""
        held: list[int] = []
        for row, pins in Counter(lower.protected()).items():
            info = self._catalog.info(row)
            if info.tenant == tenant and info.state is State.SEALED and info.pins == pins and not info.kept:
                held.append(row)
        return held

    def purge_own(self, conn: Connection, request: m.Purge, now: float) -> None:
        """Purge the tenant that asks."""
        count = self.purge(conn.tenant, now)
        self._desk.send(conn.number, m.Purged(request.id, count, self._catalog.usage(conn.tenant)[0]))

    # --- looking around ---

    def list_objects(self, conn: Connection, request: m.ListObjects, now: float) -> None:
        """A page of the tenant's objects."""
        cursor, objects = self.page(conn.tenant, request.cursor, request.limit, request.prefix, now)
        self._desk.send(conn.number, m.Listing(request.id, cursor, [shown for _, shown in objects]))

    def page(
        self, tenant: int | None, cursor: int, limit: int, prefix: bytes, now: float
    ) -> tuple[int, list[tuple[int, ObjectInfo]]]:
        """The next page's cursor, and a page of objects with their tenants' numbers, of one tenant or all."""
        rows, following = self._catalog.page(tenant, cursor, limit, prefix)
        objects = []
        for row in memoryview(rows).cast("I"):
            info = self._catalog.info(row)
            left = 0.0 if info.expires == math.inf else max(info.expires - now, 1e-3)
            state = "sealed" if info.state == State.SEALED else "writing"
            shown = ObjectInfo(info.key, info.size, state, "dram", info.pins + info.kept, left)
            objects.append((info.tenant, shown))
        return following, objects
