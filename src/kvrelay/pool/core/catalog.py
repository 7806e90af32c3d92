"""Every object the pool holds, by row.

A **row** is a small integer, given to another object when this one's bytes are free. Its **handle**, row and generation
together, is never given again: that is what peers are told. The catalog owns names, places in the arena, pins, order
of eviction, tenants' shares, times to live and checksums. Objects have no Python object of their own here, so that a
native catalog needs under 200 bytes for one; this one, in plain Python, is what that is tested against, and what runs
where there is none.

Bulk methods take and give **columns**, so that a batch of hundreds is one call: ``rows`` are little-endian u32, sizes,
offsets and checksums little-endian u64, states one byte each, all in the order of the keys.

Who keeps an object from being freed:

* a **pin** (a lease, a ticket, a transfer): counted; not evicted, and not freed when it has lost its name;
* a **hold** (whoever writes it may touch its bytes at any moment): one flag; not freed. Sealing ends it;
* **kept** (the API's pin): one flag; not evicted, not expired. Nothing stops `forget`.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, NamedTuple, cast

from kvrelay.native import native
from kvrelay.pool.core.books import Books
from kvrelay.pool.core.row import Info, State
from kvrelay.wire import limits
from kvrelay.wire.bulk import Stored

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvrelay.pool.core.row import Row

__all__ = ["Catalog", "Counts", "Info", "LookedUp", "State", "new_catalog"]

MAX_SCAN = 1 << 16
"""Rows looked at for one page."""


class Counts(NamedTuple):
    """Gauges, and the evictions the catalog decided itself."""

    sealed: int
    writing: int
    gone: int
    pinned: int
    kept: int
    free_bytes: int
    largest_free_bytes: int
    evictable_bytes: int
    gone_bytes: int
    """Sizes of what is gone and cannot be freed yet."""
    evicted_for_room: int
    evicted_for_quota: int
    evicted_unclean: int
    """Of these, objects that were not marked clean."""


class LookedUp(NamedTuple):
    """The indexes clients of this host read (`Catalog.show`), and what they did there, all tenants together."""

    index_bytes: int
    """Of shared memory."""
    lookups: int
    matched: int
    """Keys found by those that count."""
    missed: int


class Catalog:
    """Names, places and fates of objects in an arena of ``arena_bytes``.

    A method given a row that is free, or a column of a wrong length, raises ValueError and has done nothing.
    """

    def __init__(self, arena_bytes: int) -> None:
        self._books = Books(arena_bytes)

    @property
    def arena_bytes(self) -> int:
        """What of the arena can be given out."""
        return self._books.places.blocks.size

    @property
    def free_bytes(self) -> int:
        """No object's."""
        return self._books.places.blocks.free_bytes

    # --- one object ---

    def find(self, tenant: int, key: bytes) -> int | None:
        """The row of a key that is sealed or being written."""
        row = self._books.holding(tenant).names.get(key)
        return None if row is None else row.number

    def add(self, tenant: int, key: bytes, size: int, layers: int = 1, segments: int = 1) -> int | None:
        """Begin an object; its row, in writing. None: no room, whatever were evicted, or not within the quota.

        What is evicted for it is not pinned and not kept: when over the quota, this tenant's own first; then, for one
        piece that is large enough, of the tenant that holds most. When the answer is None for want of room, nothing
        was evicted for that.

        Raises:
            ValueError: the key has a row already, or the size is none that an object may have.
        """
        holding = self._books.holding(tenant)
        if key in holding.names:
            raise ValueError(f"key {key.hex()} has a row already")
        _check_size(size)
        row = self._books.begin(holding, key, size, layers, segments)
        return None if row is None else row.number

    def seal(self, row: int, sums: bytes, expires: float) -> None:
        """The object is whole: u64 checksums of its segments, in order; when it expires, infinite for never."""
        entry = self._books.row(row)
        if entry.state is not State.WRITING or len(sums) != 8 * entry.layers * entry.segments:
            raise ValueError(f"row {row} is {entry.state.name}, {len(sums)} bytes of checksums given")
        self._books.seal(entry, sums, expires)

    def forget(self, row: int) -> bool:
        """Take an object's name, if it has one; whether that freed it."""
        entry = self._books.row(row)
        self._books.forget(entry)
        return entry.state is State.FREE

    def pin(self, row: int) -> None:
        """Keep an object from eviction and its bytes from reuse."""
        self._books.pin(self._books.row(row))

    def unpin(self, row: int) -> bool:
        """Undo one `pin`; whether that freed it."""
        entry = self._books.row(row)
        if not entry.pins:
            raise ValueError(f"row {row} is not pinned")
        self._books.unpin(entry)
        return entry.state is State.FREE

    def hold(self, row: int) -> None:
        """Keep an object's bytes from reuse: it is being written."""
        self._books.row(row).held = True

    def unhold(self, row: int) -> bool:
        """Undo `hold`, however often it was called; whether that freed it."""
        entry = self._books.row(row)
        self._books.unhold(entry)
        return entry.state is State.FREE

    def touch(self, row: int) -> None:
        """Note that an object was asked for."""
        self._books.row(row).visited = True

    def keep(self, row: int, on: bool) -> None:
        """Protect a sealed object from eviction and expiry, or stop that."""
        entry = self._books.row(row)
        if entry.state is not State.SEALED:
            raise ValueError(f"row {row} is {entry.state.name}, not sealed")
        self._books.keep(entry, on=on)

    def set_expiry(self, row: int, expires: float) -> None:
        """Change when an object expires; infinite for never."""
        self._books.expire_at(self._books.row(row), expires)

    def mark_clean(self, row: int, on: bool) -> None:
        """Note whether a lower tier has the same bytes, so that nothing is lost when this object is evicted."""
        self._books.mark_clean(self._books.row(row), clean=on)

    def handle(self, row: int) -> int:
        """The handle of a row's object: below 2**62, never 0, never given again."""
        return self._books.row(row).handle

    def row_of(self, handle: int) -> int | None:
        """The row a handle was given for, while it still is that object's."""
        number = handle & 0xFFFFFFFF
        if number >= len(self._books.rows):
            return None
        entry = self._books.rows[number]
        return number if entry.state is not State.FREE and entry.handle == handle else None

    def state(self, row: int) -> State:
        """Where a row is in its life; the one question that may be asked about a free one."""
        return self._books.rows[row].state if row < len(self._books.rows) else State.FREE

    def key(self, row: int) -> bytes:
        """An object's key, also when it has lost its name."""
        return self._books.row(row).key

    def geometry(self, row: int) -> tuple[int, int, int, int]:
        """Offset, size, layers, segments a layer."""
        entry = self._books.row(row)
        return entry.offset, entry.size, entry.layers, entry.segments

    def sums(self, row: int, first: int, end: int) -> bytes:
        """Checksums of segments ``[first, end)``, u64 each; empty for an object that never was sealed."""
        return self._books.row(row).sums[8 * first : 8 * end]

    def info(self, row: int) -> Info:
        """All about a row."""
        e = self._books.row(row)
        return Info(
            e.tenant.number, e.key, e.state, e.offset, e.size, e.layers, e.segments, e.pins, e.held, e.kept, e.clean,
            e.expires,
        )  # fmt: skip

    # --- many objects ---

    def lookup(self, tenant: int, keys: Sequence[bytes]) -> tuple[bytes, bytes]:
        """What each key has: a `State` a key (`State.FREE`: none), and a row a key (0 where there is none)."""
        found = [self._books.holding(tenant).names.get(key) for key in keys]
        states = bytes(State.FREE if row is None else row.state for row in found)
        return states, _column("I", (0 if row is None else row.number for row in found))

    def prefix(self, tenant: int, keys: Sequence[bytes], state: State, segments: int) -> bytes:
        """Rows of the longest prefix of ``keys`` that is there, noted as asked for.

        ``state``: `State.SEALED` for sealed ones only, `State.WRITING` for those being written as well. ``segments``:
        objects of more segments than this, in all, end the prefix.
        """
        names = self._books.holding(tenant).names
        rows = array("I")
        for key in keys:
            row = names.get(key)
            if row is None or row.state < state or row.layers * row.segments > segments:
                break
            row.visited = True
            rows.append(row.number)
        return rows.tobytes()

    def count_prefix(self, tenant: int, keys: Sequence[bytes]) -> tuple[int, int]:
        """How many keys from the first on are there, and how many of these, from the first on, sealed. Marks them."""
        names = self._books.holding(tenant).names
        present = 0
        sealed: int | None = None
        for key in keys:
            row = names.get(key)
            if row is None:
                break
            row.visited = True
            if sealed is None and row.state is not State.SEALED:
                sealed = present
            present += 1
        return present, present if sealed is None else sealed

    def reserve(self, tenant: int, keys: Sequence[bytes], sizes: bytes) -> tuple[bytes, bytes, bytes]:
        """Begin objects of one segment, held, as `add` does: states, rows and offsets, a column each.

        ``states``: `Stored.STORED` for what was begun (only there are an offset and a new row), `Stored.PRESENT` for
        what is sealed, `Stored.BUSY` for what is being written already (what comes twice is busy the second time) and
        `Stored.CONFLICT` for what has another size (the row is theirs), `Stored.FULL` where there is no room (row 0).
        What is there is not evicted for the rest.

        Raises:
            ValueError: there is not one size a key, or one is none that an object may have. Nothing was begun.
        """
        if len(sizes) != 8 * len(keys):
            raise ValueError(f"{len(sizes)} bytes of sizes for {len(keys)} keys: 8 each")
        wanted = memoryview(sizes).cast("Q")
        for size in wanted:
            _check_size(size)
        holding = self._books.holding(tenant)
        states, rows, offsets = bytearray(), array("I"), array("Q")
        present: list[Row] = []
        for key, size in zip(keys, wanted, strict=True):
            row = holding.names.get(key)
            offset = 0
            if row is None:
                row = self._books.begin(holding, key, size, 1, 1)
                state = Stored.FULL if row is None else Stored.STORED
                if row is not None:
                    row.held = True
                    offset = row.offset
            elif row.state is State.SEALED:
                state = Stored.PRESENT if row.size == size else Stored.CONFLICT
                row.visited = row.visited or row.size == size
                self._books.pin(row)
                present.append(row)
            else:
                state = Stored.BUSY if row.size == size else Stored.CONFLICT
            states.append(state)
            rows.append(0 if row is None else row.number)
            offsets.append(offset)
        for row in present:
            self._books.unpin(row)
        return bytes(states), rows.tobytes(), offsets.tobytes()

    def publish(self, rows: bytes, sums: bytes, expires: float) -> int:
        """Seal objects of one segment, with a checksum each; how many. Those that lost their name are freed.

        The last is sealed first: of a chain of keys the tail goes before the head, without which it is of no use.
        """
        entries = self._books.column(rows)
        values = memoryview(sums).cast("Q")
        if len(values) != len(entries) or not all(entry.whole for entry in entries):
            raise ValueError(f"{len(values)} checksums for {len(entries)} objects of one segment")
        sealed = 0
        for entry, value in zip(reversed(entries), reversed(values), strict=True):
            if entry.state is State.WRITING:
                self._books.seal(entry, value.to_bytes(8, "little"), expires)
                sealed += 1
            else:
                self._books.unhold(entry)
        return sealed

    def forget_rows(self, rows: bytes) -> int:
        """`forget` each; how many had a name."""
        entries = [entry for entry in self._books.column(rows) if entry.state is not State.GONE]
        for entry in entries:
            self._books.forget(entry)
        return len(entries)

    def pin_rows(self, rows: bytes) -> None:
        """`pin` each; one that comes twice is pinned twice."""
        for entry in self._books.column(rows):
            self._books.pin(entry)

    def unpin_rows(self, rows: bytes) -> bytes:
        """`unpin` each; the rows that were freed by that."""
        entries = self._books.column(rows)
        for entry in entries:
            self._books.unpin(entry)
        return _column("I", {entry.number: None for entry in entries if entry.state is State.FREE})

    def unhold_rows(self, rows: bytes) -> bytes:
        """`unhold` each; the rows that were freed by that."""
        entries = self._books.column(rows)
        for entry in entries:
            self._books.unhold(entry)
        return _column("I", {entry.number: None for entry in entries if entry.state is State.FREE})

    def describe(self, rows: bytes) -> tuple[bytes, bytes, bytes]:
        """Offsets, sizes and checksums (0 for one not sealed) of objects of one segment, a column each."""
        entries = self._books.column(rows)
        if not all(entry.whole for entry in entries):
            raise ValueError("an object of several segments has no checksum of its whole")
        sums = b"".join(entry.sums or bytes(8) for entry in entries)
        return _column("Q", (e.offset for e in entries)), _column("Q", (e.size for e in entries)), sums

    def runs(self, rows: bytes) -> list[tuple[int, int]]:
        """Offset and size of what these objects, one behind the other, take: neighbours in the arena are one run."""
        runs: list[tuple[int, int]] = []
        start = end = 0
        for entry in self._books.column(rows):
            if entry.offset == end and end > start:
                end += entry.size
                continue
            if end > start:
                runs.append((start, end - start))
            start, end = entry.offset, entry.offset + entry.size
        if end > start:
            runs.append((start, end - start))
        return runs

    # --- losing objects ---

    def trim(self, size_bytes: int, tenant: int | None = None, *, clean: bool = False) -> tuple[int, int]:
        """Evict until ``size_bytes`` are freed or nothing is left to evict; how many objects and bytes it was.

        Of one tenant, or of whichever holds most; with ``clean`` only what is not lost with it.
        """
        return self._books.trim(size_bytes, tenant, clean=clean)

    def victims(self, limit: int, tenant: int | None = None) -> bytes:
        """Rows of up to ``limit`` objects that are about to be evicted and would be lost with it; nothing changes."""
        return _column("I", (row.number for row in self._books.victims(limit, tenant)))

    def expire(self, now: float, limit: int) -> tuple[int, int]:
        """Forget what has expired by ``now``, ``limit`` objects at most; how many objects and bytes it was."""
        objects = size = 0
        while objects < limit and (row := self._books.expired(now)) is not None:
            objects += 1
            size += row.span
            self._books.forget(row)
        return objects, size

    def next_expiry(self) -> float | None:
        """When `expire` may have something to do, at the earliest."""
        return self._books.expiring[0][0] if self._books.expiring else None

    # --- tenants, and looking around ---

    def set_quota(self, tenant: int, quota_bytes: int | None, max_objects: int | None = None) -> None:
        """Bound a tenant's bytes and objects, from the next `add` or `reserve` on; None for no bound."""
        holding = self._books.holding(tenant)
        holding.quota, holding.max_objects = quota_bytes, max_objects

    def usage(self, tenant: int) -> tuple[int, int]:
        """How many objects of a tenant have a name, sealed or being written, and how many bytes it holds in all."""
        holding = self._books.holding(tenant)
        return len(holding.names), holding.bytes

    def page(self, tenant: int | None, cursor: int, limit: int, prefix: bytes) -> tuple[bytes, int]:
        """Rows of up to ``limit`` objects that have a name which begins with ``prefix``; the cursor of the next page.

        The first page's cursor is 0, and so is the one behind the last. A page may be short, even empty, before that.
        """
        rows = array("I")
        end = min(len(self._books.rows), cursor + MAX_SCAN)
        while cursor < end and len(rows) < limit:
            row = self._books.rows[cursor]
            cursor += 1
            named = row.state in {State.WRITING, State.SEALED}
            if named and tenant in {None, row.tenant.number} and row.key.startswith(prefix):
                rows.append(row.number)
        return rows.tobytes(), 0 if cursor >= len(self._books.rows) else cursor

    def show(self, tenant: int, table: memoryview, marks: memoryview) -> bool:  # noqa: ARG002 - see the native one
        """From now on keep an index of a tenant's names in shared memory, in zeroed pages; whether that is done.

        `kvrelay.transport.index` says what lies there. This catalog keeps none; the native one does, and takes what
        clients found there for asked for.

        Raises:
            ValueError: the memory is too small or no whole pages, or the tenant is shown already.
        """
        return False

    def looked_up(self) -> LookedUp:
        """What clients looked up in indexes."""
        return LookedUp(0, 0, 0, 0)

    def counts(self) -> Counts:
        """Gauges and counters."""
        books, blocks = self._books, self._books.places.blocks
        return Counts(
            sealed=books.number[State.SEALED],
            writing=books.number[State.WRITING],
            gone=books.number[State.GONE],
            pinned=books.pinned,
            kept=books.kept,
            free_bytes=blocks.free_bytes,
            largest_free_bytes=blocks.largest,
            evictable_bytes=sum(holding.evictable_bytes for holding in books.holdings.values()),
            gone_bytes=books.gone_bytes,
            evicted_for_room=books.evicted_for_room,
            evicted_for_quota=books.evicted_for_quota,
            evicted_unclean=books.evicted_unclean,
        )

    def check_integrity(self) -> None:
        """Raise AssertionError unless every byte is one object's or free, and every counter agrees with the rows."""
        self._books.check_integrity()


def new_catalog(arena_bytes: int) -> Catalog:
    """A catalog, the native one where it is there: it takes the same decisions."""
    return Catalog(arena_bytes) if native is None else cast("Catalog", native.Catalog(arena_bytes))


def _check_size(size: int) -> None:
    if not 0 < size <= limits.MAX_OBJECT_BYTES:
        raise ValueError(f"an object of {size} bytes: legal are 1 to {limits.MAX_OBJECT_BYTES}")


def _column(kind: str, values: Iterable[int]) -> bytes:
    return array(kind, values).tobytes()
