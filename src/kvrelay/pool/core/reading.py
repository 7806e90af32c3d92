"""Read leases: finding objects, waiting for their layers, reading them."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from kvrelay.errors import (
    BadRequestError,
    DeadlineError,
    KvRelayError,
    LeaseExpiredError,
    NotFoundError,
    WriterLostError,
)
from kvrelay.pool.core.actions import SendData
from kvrelay.pool.core.catalog import State
from kvrelay.pool.core.desk import weight_of
from kvrelay.wire import limits
from kvrelay.wire import messages as m

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from kvrelay.pool.core.desk import Connection, Desk, Timer
    from kvrelay.pool.core.lower import Seeking
    from kvrelay.pool.core.tickets import Tickets


class Lease:
    """One reader's protection of the objects it was shown: a column of rows, in the order shown."""

    def __init__(self, reading: Reading, handle: int, request: int, conn: Connection, column: bytes) -> None:
        self._reading = reading
        self.handle = handle
        self.request = request
        self.conn = conn
        self.column = column
        self.waiters: dict[Waiter, None] = {}
        self.timer: Timer | None = None

    @property
    def rows(self) -> memoryview:
        """The column, as integers."""
        return memoryview(self.column).cast("I")

    @property
    def weight(self) -> int:
        """What it counts as."""
        return weight_of(len(self.column) // 4)

    def expire(self, _now: float) -> None:
        """Drop the lease."""
        self._reading.lease_expired(self)


class Waiter:
    """A `Wait` request: the rows of ``behind`` do not have ``layers`` whole layers yet."""

    def __init__(self, reading: Reading, lease: Lease, request: m.Wait) -> None:
        self._reading = reading
        self.lease = lease
        self.request = request.id
        self.layers = request.layers
        self.first_layer = request.first_layer
        self.behind: set[int] = set()
        self.weight = 0
        self.timer: Timer | None = None

    def expire(self, _now: float) -> None:
        """Answer that it took too long."""
        self._reading.fail(self, DeadlineError(f"layer {self.layers} was not written in time"))


class Reading:
    """All leases and the transfers under them."""

    def __init__(self, desk: Desk, seeking: Seeking, tickets: Tickets) -> None:
        self._desk = desk
        self._tickets = tickets
        self._seeking = seeking
        self._store = desk.store
        self._catalog = desk.store.catalog
        self.leases: dict[int, Lease] = {}
        self._transfers: dict[int, bytes] = {}
        self._waiters: dict[int, dict[Waiter, None]] = {}
        """By the row they wait for."""

    # --- leases ---

    def match(self, conn: Connection, request: m.Match, now: float) -> None:
        """Answer with the longest prefix present and, if asked, lease it."""
        least = State.WRITING if request.unsealed else State.SEALED
        column = self._catalog.prefix(conn.tenant, request.keys, least, limits.MAX_SEGMENTS)
        views: list[m.View] = []
        sealed = None
        for index, row in enumerate(memoryview(column).cast("I")):
            offset, size, layers, segments = self._catalog.geometry(row)
            if self._catalog.state(row) is State.SEALED:
                ready = layers
            else:
                ready = self._store.ready(row, layers)
                sealed = index if sealed is None else sealed
            views.append(m.View(offset, size, layers, segments, ready))
        self.count(len(views), len(request.keys))
        missing = request.keys[len(views) :]
        if missing and request.lease_s and self._seeking.lower is not None:
            self._seeking.lower.seek(conn.tenant, missing, None, now, bring=True)  # whoever asks again finds more
        handle = self.lease(conn, request.id, column, now + request.lease_s) if request.lease_s else 0
        ticket = self._tickets.get(conn, request.ticket)
        rows = memoryview(column).cast("I")
        fresh = [] if ticket is None else [index for index, row in enumerate(rows) if row in ticket.fresh]
        sums = self._all_sums(rows, views, request.sums) if sealed is None else b""
        matched = m.Matched(request.id, handle, len(views) if sealed is None else sealed, views, fresh, sums)
        self._desk.send(conn.number, matched)

    def _all_sums(self, rows: Sequence[int], views: Sequence[m.View], most: int) -> bytes:
        """The checksums of sealed objects, if there are no more than ``most``."""
        counts = [view.layers * view.segments for view in views]
        if sum(counts) > most:
            return b""
        return b"".join(self._store.sums(row, 0, count) for row, count in zip(rows, counts, strict=True))

    def count(self, found: int, asked: int) -> None:
        """Count keys found and missed."""
        self._desk.counters.hits += found
        self._desk.counters.misses += asked - found

    def lease(self, conn: Connection, request: int, column: bytes, deadline: float) -> int:
        """Lease a column of rows; its handle, 0 for none.

        Raises:
            PoolFullError: the connection holds too much.
        """
        if not column:
            return 0
        self._desk.hold(conn, weight_of(len(column) // 4))
        handle = self._desk.number()
        lease = Lease(self, handle, request, conn, column)
        self.leases[handle] = conn.leases[handle] = conn.lease_of[request] = lease
        self._store.pin_rows(column)
        lease.timer = self._desk.at(deadline, lease)
        return handle

    def _lease(self, conn: Connection, handle: int) -> Lease:
        lease = conn.leases.get(handle)
        if lease is None:
            raise LeaseExpiredError(f"lease {handle} has ended or is not this connection's")
        return lease

    @staticmethod
    def _leased(lease: Lease, index: int) -> int:
        rows = lease.rows
        if index >= len(rows):
            raise BadRequestError(f"object {index} of a lease of {len(rows)} objects")
        return rows[index]

    def release(self, conn: Connection, request: m.Release, _now: float) -> None:
        """End a lease."""
        self.drop(self._lease(conn, request.lease), NotFoundError("the lease was released"))
        self._desk.send(conn.number, m.Done(request.id))

    def forget(self, conn: Connection, request: m.Forget, _now: float) -> None:
        """End the lease a request was given, if it was given one and has it still."""
        lease = conn.lease_of.get(request.request)
        if lease is not None:
            self.drop(lease, NotFoundError("the lease was forgotten"))
        self._desk.send(conn.number, m.Done(request.id))

    def lease_expired(self, lease: Lease) -> None:
        """End a lease at its deadline."""
        self._desk.counters.expired_leases += 1
        self.drop(lease, LeaseExpiredError(f"lease {lease.handle} ran past its deadline"))

    def drop(self, lease: Lease, error: KvRelayError) -> None:
        """End a lease; what waits under it fails with ``error``."""
        del self.leases[lease.handle]
        del lease.conn.leases[lease.handle]
        if lease.conn.lease_of.get(lease.request) is lease:
            del lease.conn.lease_of[lease.request]
        lease.conn.held -= lease.weight
        self._desk.cancel(lease.timer)
        for waiter in list(lease.waiters):
            self.fail(waiter, error)
        self._store.unpin_rows(lease.column)

    def corrupt(self, conn: Connection, request: m.Corrupt, _now: float) -> int:
        """Note that a reader found an object damaged; its row: nobody shall be given it again."""
        row = self._leased(self._lease(conn, request.lease), request.index)
        self._desk.counters.corrupt += 1
        self._desk.send(conn.number, m.Done(request.id))
        return row

    # --- waiting ---

    def _behind(self, rows: Iterable[int], layers: int) -> set[int]:
        """Which objects have fewer whole layers than ``layers``, or than all they have."""
        behind = set()
        for row in set(rows):
            own = self._catalog.geometry(row)[2]
            if self._store.ready(row, own) < min(layers, own):
                behind.add(row)
        return behind

    def wait(self, conn: Connection, request: m.Wait, now: float) -> None:
        """Answer when every object of a lease has the layers asked for."""
        lease = self._lease(conn, request.lease)
        shapes = [self._catalog.geometry(row) for row in lease.rows]
        most = max(layers for _, _, layers, _ in shapes)
        if request.layers > most or request.first_layer >= request.layers:
            raise BadRequestError(f"layers [{request.first_layer}, {request.layers}) of objects that have {most}")
        if sum(segments for _, _, _, segments in shapes) > limits.MAX_SUMS:
            raise BadRequestError(f"one layer of the lease has over {limits.MAX_SUMS} segments: lease fewer objects")
        waiter = Waiter(self, lease, request)
        behind = self._behind(lease.rows, request.layers)
        for row in behind:
            if self._catalog.state(row) is State.GONE:
                raise _writer_lost(self._catalog.key(row))
        if not behind:
            self._answer(waiter)
            return
        waiter.weight = weight_of(len(behind))
        self._desk.hold(conn, waiter.weight)
        waiter.behind = behind
        for row in behind:
            self._waiters.setdefault(row, {})[waiter] = None
        lease.waiters[waiter] = None
        self._desk.waiting += 1
        waiter.timer = self._desk.at(now + request.timeout_s, waiter)

    def written(self, rows: Iterable[int]) -> None:
        """More of these objects has been written: answer whom that was missing."""
        if not self._waiters:
            return
        for row in rows:
            layers = self._catalog.geometry(row)[2] if row in self._waiters else 0
            ready = self._store.ready(row, layers) if layers else 0
            for waiter in list(self._waiters.get(row, ())):
                if ready < min(waiter.layers, layers):
                    continue
                self._unlink(waiter, row)
                waiter.behind.discard(row)
                if not waiter.behind:
                    self._end(waiter)
                    self._answer(waiter)

    def lost(self, rows: Iterable[int]) -> None:
        """These objects will never be whole: tell whoever waits for them."""
        if not self._waiters:
            return
        for row in rows:
            for waiter in list(self._waiters.get(row, ())):
                self.fail(waiter, _writer_lost(self._catalog.key(row)))

    def _answer(self, waiter: Waiter) -> None:
        rows, first = waiter.lease.rows, waiter.first_layer
        shapes = [self._catalog.geometry(row) for row in rows]
        ready = [self._store.ready(row, shape[2]) for row, shape in zip(rows, shapes, strict=True)]
        behind = [whole for whole, shape in zip(ready, shapes, strict=True) if whole < shape[2]]
        layers = min(behind) if behind else max(ready)
        # As many layers as one message holds: the reader asks for the others when it has these.
        layers = min(layers, first + limits.MAX_SUMS // sum(shape[3] for shape in shapes))
        sums = b"".join(
            self._store.sums(row, min(first, own) * segments, min(layers, own) * segments)
            for row, (_, _, own, segments) in zip(rows, shapes, strict=True)
        )
        self._desk.send(waiter.lease.conn.number, m.Ready(waiter.request, layers, sums))

    def fail(self, waiter: Waiter, error: KvRelayError) -> None:
        """Answer a waiter with an error."""
        self._end(waiter)
        self._desk.fail(waiter.lease.conn.number, waiter.request, error)

    def _end(self, waiter: Waiter) -> None:
        del waiter.lease.waiters[waiter]
        waiter.lease.conn.held -= waiter.weight
        self._desk.cancel(waiter.timer)
        for row in waiter.behind:
            self._unlink(waiter, row)
        self._desk.waiting -= 1

    def _unlink(self, waiter: Waiter, row: int) -> None:
        others = self._waiters[row]
        del others[waiter]
        if not others:
            del self._waiters[row]

    # --- reading ---

    def read(self, conn: Connection, request: m.Read, _now: float) -> None:
        """Send segments of leased objects."""
        lease = self._lease(conn, request.lease)
        count = sum(span.count for span in request.ranges)
        if count > limits.MAX_SUMS:
            raise BadRequestError(f"{count} segments asked for at once: at most {limits.MAX_SUMS} are sent")
        spans: list[tuple[int, int]] = []
        sums: list[bytes] = []
        rows: dict[int, None] = {}
        for span in request.ranges:
            row = self._leased(lease, span.index)
            offset, size, layers, segments = self._catalog.geometry(row)
            end = span.first + span.count
            whole = self._store.ready(row, layers) * segments
            if end > whole:
                raise BadRequestError(
                    f"segments up to {end - 1} of an object of which {whole} are written: wait for them"
                )
            size //= layers * segments
            spans.append((offset + span.first * size, span.count * size))
            sums.append(self._store.sums(row, span.first, end))
            rows[row] = None
        self.send(conn, m.Data(request.id, b"".join(sums)), spans, array("I", rows).tobytes())

    def send(self, conn: Connection, reply: m.Data | m.Got, spans: list[tuple[int, int]], rows: bytes) -> None:
        """Send a reply and bytes of ``rows``, which are not reused before they have left.

        Raises:
            BadRequestError: they are more than one message may carry.
        """
        total = sum(size for _, size in spans)
        if total > limits.MAX_PAYLOAD_BYTES:
            raise BadRequestError(f"{total} bytes asked for at once: at most {limits.MAX_PAYLOAD_BYTES} are sent")
        transfer = self._desk.number()
        self._transfers[transfer] = rows
        self._store.pin_rows(rows)
        self._desk.counters.sent_bytes += total
        self._desk.act(SendData(conn.number, reply, spans, transfer))

    def transferred(self, transfer: int) -> None:
        """Note that the bytes of a transfer have left, or never will."""
        self._store.unpin_rows(self._transfers.pop(transfer))

    # --- books ---

    def protected(self) -> Iterator[int]:
        """The row of every object a lease or a transfer protects, once for each of them."""
        for lease in self.leases.values():
            yield from lease.rows
        for column in self._transfers.values():
            yield from memoryview(column).cast("I")

    @property
    def transfers(self) -> int:
        """How many answers with objects' bytes are on their way out."""
        return len(self._transfers)

    def check_integrity(self) -> int:
        """Raise AssertionError unless waiters and objects agree; how many wait."""
        waiters = [waiter for lease in self.leases.values() for waiter in lease.waiters]
        links = {(row, waiter) for row, of in self._waiters.items() for waiter in of}
        assert links == {(row, waiter) for waiter in waiters for row in waiter.behind}
        for waiter in waiters:
            assert waiter.behind == self._behind(waiter.lease.rows, waiter.layers)
            assert waiter.behind
        return len(waiters)


def _writer_lost(key: bytes) -> WriterLostError:
    return WriterLostError(f"object {key.hex()} was given up by its writer")
