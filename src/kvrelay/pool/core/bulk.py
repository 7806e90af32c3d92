"""Whole objects of one segment, many at once: a batch is one Python object, its objects are rows only."""

from __future__ import annotations

import itertools
from array import array
from typing import TYPE_CHECKING, Literal

from kvrelay.errors import BadRequestError, KvRelayError, NotFoundError
from kvrelay.pool.core.catalog import State
from kvrelay.pool.core.delivery import Delivery, runs_of
from kvrelay.pool.core.desk import weight_of
from kvrelay.pool.core.lower import COUNT_S
from kvrelay.pool.core.store import QUARANTINE_S
from kvrelay.wire import limits
from kvrelay.wire import messages as m
from kvrelay.wire.bulk import Stored

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvrelay.pool.core.desk import Connection, Desk, Timer
    from kvrelay.pool.core.lower import Seeking
    from kvrelay.pool.core.reading import Reading
    from kvrelay.pool.core.tickets import Tickets
    from kvrelay.pool.core.upkeep import Upkeep

_BEGUN = b"\0"
_NO_ROOM = bytes([Stored.FULL])


class _Whole:
    """The payload of a `Put`: ``column`` are the rows it fills, ``chosen`` which of its objects those are, or None."""

    def __init__(
        self,
        bulk: Bulk,
        request: m.Put,
        states: bytes,
        why: str,
        column: bytes,
        chosen: list[bool] | None,
        size_bytes: int,
    ) -> None:
        self._bulk = bulk
        self._chosen = chosen
        self.size_bytes = size_bytes
        self.request = request
        self.states = states
        self.why = why
        self.column = column
        self.expected = b""
        """Checksums of what it fills, once they are there."""

    def arrived(self, conn: Connection, sums: bytes, trailer: bytes, now: float) -> None:
        """Publish what is undamaged."""
        expected = self.request.sums or trailer
        self.expected = expected if self._chosen is None else _chosen("Q", expected, self._chosen)
        self._bulk.put_arrived(conn, self, sums, now)

    def lost(self) -> None:
        """Give it up."""
        self._bulk.drop(self.column)

    def pinned(self) -> bytes:
        """None: they are held."""
        return b""


class Batch:
    """Room given for objects a client writes itself. ``column``: their rows, held until it is known to have stopped."""

    def __init__(self, bulk: Bulk, number: int, conn: Connection, column: bytes, ttl_s: float) -> None:
        self._bulk = bulk
        self.number = number
        self.conn = conn
        self.column = column
        self.ttl_s = ttl_s
        self.open = True
        """Whether it can be filled."""
        self.timer: Timer | None = None

    @property
    def objects(self) -> int:
        """How many there are."""
        return len(self.column) // 4

    @property
    def weight(self) -> int:
        """What it counts as."""
        return weight_of(self.objects)

    def expire(self, _now: float) -> None:
        """It took too long; or, when its connection has ended, its bytes have rested."""
        if self.open:
            self._bulk.late(self)
        else:
            self._bulk.let_go(self)


class Bulk:
    """Batches of whole objects, written and read."""

    def __init__(self, desk: Desk, reading: Reading, tickets: Tickets, upkeep: Upkeep, seeking: Seeking) -> None:
        self._desk = desk
        self._store = desk.store
        self._catalog = desk.store.catalog
        self._reading = reading
        self._tickets = tickets
        self._upkeep = upkeep
        self._seeking = seeking
        self.resting: dict[int, Batch] = {}
        """Batches whose connection ended, while its process may still write."""

    # --- writing ---

    def _reserve(self, conn: Connection, request: m.Put | m.Room) -> tuple[bytes, str, bytes, bytes, bytes]:
        """States, why some are full, offsets, and of those begun: rows, and the sizes' column cut down to them."""
        self._desk.check_open()
        if len(request.sizes) == 8 * len(request.keys):  # else `reserve` says what is wrong
            self.make_room(conn.tenant, request.keys, memoryview(request.sizes).cast("Q"))
        try:
            states, rows, offsets = self._catalog.reserve(conn.tenant, request.keys, request.sizes)
        except ValueError as error:
            raise BadRequestError(str(error)) from None
        why = ""
        if full := states.count(_NO_ROOM):
            self._desk.counters.refused += full
            size = memoryview(request.sizes).cast("Q")[states.index(_NO_ROOM)]
            why = self._upkeep.quotas.why_full(conn.tenant, size)
        ticket = self._tickets.get(conn, request.ticket)
        if ticket is not None:
            there = (state != Stored.FULL for state in states)
            self._tickets.protect(ticket, itertools.compress(memoryview(rows).cast("I"), there))
        begun = states.count(_BEGUN)
        if begun == len(states):
            return states, why, offsets, rows, request.sizes
        chosen = [state == Stored.STORED for state in states]
        return states, why, offsets, _chosen("I", rows, chosen), _chosen("Q", request.sizes, chosen)

    def make_room(self, tenant: int, keys: Sequence[bytes], sizes: Sequence[int]) -> None:
        """With lower tiers, evict what is not lost with it, as far as what is new of these needs room."""
        if self._seeking.lower is None:
            return
        over = self._upkeep.quotas.over(tenant, sum(sizes), len(sizes))
        if (sum(sizes) <= self._catalog.free_bytes and not over) or max(sizes) > limits.MAX_OBJECT_BYTES:
            return
        states, rows = self._catalog.lookup(tenant, keys)
        there = array("I", itertools.compress(memoryview(rows).cast("I"), states)).tobytes()
        self._store.pin_rows(there)
        new = list(itertools.compress(sizes, (state == State.FREE for state in states)))
        self._upkeep.make_room(tenant, sum(new), len(new))
        self._store.unpin_rows(there)

    def put(self, conn: Connection, request: m.Put, payload_bytes: int, _now: float) -> Delivery | None:
        """Say where the payload of a `Put` goes; None: it was answered already, nothing of it is wanted."""
        if request.sums and len(request.sums) != len(request.sizes):
            raise BadRequestError(f"{len(request.sums) // 8} checksums for {len(request.sizes) // 8} sizes")
        if len(request.sizes) % 8:
            raise BadRequestError(f"sizes are 8 bytes each: {len(request.sizes)} bytes were sent")
        sizes = memoryview(request.sizes).cast("Q")
        total = sum(sizes)
        trailer_bytes = 0 if request.sums else len(request.sizes)
        if total + trailer_bytes != payload_bytes:
            raise BadRequestError(
                f"the objects have {total} bytes, checksums behind them {trailer_bytes}, {payload_bytes} follow"
            )
        states, why, offsets, column, taken = self._reserve(conn, request)
        if not column:
            self._desk.send(conn.number, m.PutDone(request.id, states, why))
            return None
        if taken is request.sizes:
            targets: list[tuple[int | None, int]] = [*self._catalog.runs(column)]
            chosen, places = None, offsets
        else:
            chosen = [state == Stored.STORED for state in states]
            places = _chosen("Q", offsets, chosen)
            where = memoryview(offsets).cast("Q")
            targets = runs_of(
                [(at if begun else None, size) for at, size, begun in zip(where, sizes, chosen, strict=True)]
            )
        wanted = total if taken is request.sizes else sum(memoryview(taken).cast("Q"))
        conn.incoming = _Whole(self, request, states, why, column, chosen, wanted)
        return Delivery(targets, places, taken, trailer_bytes)

    def put_arrived(self, conn: Connection, whole: _Whole, sums: bytes, now: float) -> None:
        """Publish the objects of a `Put` whose bytes are what they should be."""
        request, states, column = whole.request, whole.states, whole.column
        self._desk.counters.received_bytes += whole.size_bytes
        if sums != whole.expected:
            states, column, sums = self._without_damaged(whole, sums)
        self._publish(column, sums, self._upkeep.expiry(now, request.ttl_s))
        self._upkeep.sealed(conn.tenant, now)
        self._desk.send(conn.number, m.PutDone(request.id, states, whole.why))

    def _without_damaged(self, whole: _Whole, sums: bytes) -> tuple[bytes, bytes, bytes]:
        """States, rows and checksums when some are wrong: those objects are given up."""
        pairs = zip(memoryview(sums).cast("Q"), memoryview(whole.expected).cast("Q"), strict=True)
        good = [found == wanted for found, wanted in pairs]
        damaged = _chosen("I", whole.column, [not intact for intact in good])
        self.drop(damaged)
        self._desk.counters.corrupt += len(damaged) // 4
        states, intact = bytearray(whole.states), iter(good)
        for index, state in enumerate(states):
            if state == Stored.STORED and not next(intact):
                states[index] = Stored.DAMAGED
        return bytes(states), _chosen("I", whole.column, good), _chosen("Q", sums, good)

    def _publish(self, column: bytes, sums: bytes, expires: float) -> None:
        self._store.sealed_total += self._catalog.publish(column, sums, expires)
        self._reading.written(memoryview(column).cast("I"))
        if self._seeking.lower is not None:
            self._seeking.lower.sealed(memoryview(column).cast("I"))

    def drop(self, column: bytes) -> None:
        """Give up objects nobody writes any more."""
        self._give_up(column)
        self._catalog.unhold_rows(column)

    def _give_up(self, column: bytes) -> None:
        """Take the names of objects that will not be whole; whoever waits for them is told."""
        self._store.aborted_total += self._catalog.forget_rows(column)
        self._reading.lost(memoryview(column).cast("I"))

    def room(self, conn: Connection, request: m.Room, now: float) -> None:
        """Give room for objects the client writes itself."""
        conn.check_trusted()
        self._desk.hold(conn, weight_of(len(request.keys)))
        conn.held -= weight_of(len(request.keys))
        states, why, offsets, column, _ = self._reserve(conn, request)
        number = 0
        if column:
            number = self._desk.number()
            batch = conn.batches[number] = Batch(self, number, conn, column, request.ttl_s)
            conn.held += batch.weight
            batch.timer = self._desk.at(now + request.lease_s, batch)
        self._desk.send(conn.number, m.RoomGiven(request.id, number, states, offsets, why))

    def fill(self, conn: Connection, request: m.Fill, now: float) -> None:
        """Publish a batch: all its bytes are there."""
        batch = conn.batches.get(request.batch)
        if batch is None or not batch.open:
            raise NotFoundError(f"batch {request.batch} is not being written: given up, filled, or never was")
        if len(request.sums) != 8 * batch.objects:
            raise BadRequestError(f"{len(request.sums)} bytes of checksums for {batch.objects} objects granted")
        self._end(batch)
        self._publish(batch.column, request.sums, self._upkeep.expiry(now, batch.ttl_s))
        self._upkeep.sealed(conn.tenant, now)
        self._desk.send(conn.number, m.Done(request.id))

    def _end(self, batch: Batch) -> None:
        del batch.conn.batches[batch.number]
        batch.conn.held -= batch.weight
        self._desk.cancel(batch.timer)

    def give_up(self, batch: Batch) -> None:
        """The client gives a batch up, or acknowledges that it was; it does not touch the bytes again."""
        self._end(batch)
        if batch.open:
            self._give_up(batch.column)
        self._catalog.unhold_rows(batch.column)

    def late(self, batch: Batch) -> None:
        """A batch ran past its deadline: its bytes rest until its client says that it stopped, or is gone."""
        batch.open = False
        self._give_up(batch.column)

    def let_go(self, batch: Batch) -> None:
        """The bytes of a lost client's batch have rested long enough."""
        del self.resting[batch.number]
        self._catalog.unhold_rows(batch.column)

    def disconnected(self, conn: Connection, now: float) -> None:
        """A connection ended: its batches are given up, and their bytes rest."""
        for batch in list(conn.batches.values()):
            self._end(batch)
            if batch.open:
                self.late(batch)
            self.resting[batch.number] = batch
            batch.timer = self._desk.at(now + QUARANTINE_S, batch)

    # --- reading ---

    def _with_sealed(
        self,
        conn: Connection,
        request: m.Locate | m.Get,
        act: Callable[[bytes, int, float], int],
        now: float,
    ) -> None:
        """Call ``act`` when what is below is here or given up; it answers, and returns how many keys that told of.

        With rows of the longest sealed prefix, how many objects of several segments come next, and the time.
        """

        def answer(_found: int, now: float) -> None:
            try:
                found, segmented = self._sealed(conn, request.keys)
                told = act(found, segmented, now)
            except KvRelayError as error:
                self._desk.fail(conn.number, request.id, error)
                return
            # Of what ended it, for its size or its segments, the client asks again: it is counted then.
            self._reading.count(told, told if segmented or told < len(found) // 4 else len(request.keys))

        if request.wait_s and self._seeking.lower is not None:
            sealed = self._catalog.prefix(conn.tenant, request.keys, State.SEALED, 1)
            if missing := request.keys[len(sealed) // 4 :]:
                self._seeking.ask(conn, missing, answer, now, wait_s=request.wait_s, bring=True)
                return
        answer(0, now)

    def _sealed(self, conn: Connection, keys: list[bytes]) -> tuple[bytes, int]:
        column = self._catalog.prefix(conn.tenant, keys, State.SEALED, 1)
        missing = keys[len(column) // 4 :]
        if not missing or not self._catalog.prefix(conn.tenant, missing[:1], State.SEALED, limits.MAX_SEGMENTS):
            return column, 0
        after = memoryview(self._catalog.prefix(conn.tenant, missing, State.SEALED, limits.MAX_SEGMENTS)).cast("I")
        return column, sum(1 for _ in itertools.takewhile(self._has_segments, after))

    def _has_segments(self, row: int) -> bool:
        _, _, layers, segments = self._catalog.geometry(row)
        return layers * segments > 1

    def locate(self, conn: Connection, request: m.Locate, now: float) -> None:
        """Lease the longest sealed prefix and say where it is."""

        def act(column: bytes, segmented: int, now: float) -> int:
            lease = self._reading.lease(conn, request.id, column, now + request.lease_s) if request.lease_s else 0
            offsets, sizes, sums = self._catalog.describe(column)
            count = len(column) // 4
            self._desk.send(conn.number, m.Located(request.id, lease, count, offsets, sizes, sums, segmented))
            return count

        self._with_sealed(conn, request, act, now)

    def get(self, conn: Connection, request: m.Get, now: float) -> None:
        """Send the longest sealed prefix of the sizes given."""
        if len(request.sizes) != 8 * len(request.keys):
            raise BadRequestError(f"{len(request.sizes)} bytes of sizes for {len(request.keys)} keys")

        def act(column: bytes, segmented: int, _now: float) -> int:
            _, sizes, sums = self._catalog.describe(column)
            other = 0
            if not request.sizes.startswith(sizes):
                pairs = zip(memoryview(sizes).cast("Q"), memoryview(request.sizes).cast("Q"), strict=False)
                end, other = next((index, found) for index, (found, wanted) in enumerate(pairs) if found != wanted)
                column, sums = column[: 4 * end], sums[: 8 * end]
            count = len(column) // 4
            got = m.Got(request.id, count, sums, other, 0 if other else segmented)
            self._reading.send(conn, got, self._catalog.runs(column), column)
            return count

        self._with_sealed(conn, request, act, now)

    def count_prefix(self, conn: Connection, request: m.CountPrefix, now: float) -> None:
        """Say how long the prefix is that is there."""
        present, sealed = self._catalog.count_prefix(conn.tenant, request.keys)
        self._reading.count(present, len(request.keys))
        if present == len(request.keys) or self._seeking.lower is None:
            self._desk.send(conn.number, m.Counted(request.id, present, sealed, present))
            return

        def answer(found: int, _now: float) -> None:
            self._desk.send(conn.number, m.Counted(request.id, present, sealed, present + found))

        self._seeking.ask(conn, request.keys[present:], answer, now, wait_s=COUNT_S, bring=False)


def _chosen(kind: Literal["I", "Q"], column: bytes, which: list[bool]) -> bytes:
    return array(kind, itertools.compress(memoryview(column).cast(kind), which)).tobytes()
