"""Objects written in segments: announced, filled by one connection or several, sealed or given up."""

from __future__ import annotations

from array import array
from itertools import pairwise
from typing import TYPE_CHECKING

from kvrelay.errors import BadRequestError, ConflictError, CorruptionError, KvRelayError, NotFoundError
from kvrelay.pool.core.catalog import State
from kvrelay.pool.core.delivery import Delivery, runs_of
from kvrelay.pool.core.desk import ANNOUNCED_WEIGHT
from kvrelay.pool.core.store import QUARANTINE_S
from kvrelay.wire import limits
from kvrelay.wire import messages as m

if TYPE_CHECKING:
    from kvrelay.pool.core.bulk import Bulk
    from kvrelay.pool.core.desk import Connection, Desk
    from kvrelay.pool.core.entry import Entry
    from kvrelay.pool.core.lower import Seeking
    from kvrelay.pool.core.reading import Reading
    from kvrelay.pool.core.tickets import Tickets
    from kvrelay.pool.core.upkeep import Upkeep


class _Watch:
    """When the objects a connection writes are looked at for late ones."""

    def __init__(self, writing: Writing, conn: Connection) -> None:
        self._writing = writing
        self._conn = conn

    def expire(self, now: float) -> None:
        """Give up what is late; look again when the next may be."""
        self._writing.give_up_late(self._conn, now)


class _Rest:
    """Bytes of an object that was given up, while the process of a lost connection may still write them."""

    def __init__(self, writing: Writing, entry: Entry, conn: int) -> None:
        self._writing = writing
        self._entry = entry
        self._conn = conn

    def expire(self, _now: float) -> None:
        """They have rested long enough."""
        self._writing.store.stopped(self._entry, self._conn)


class _Parts:
    """The payload of a `Write`."""

    def __init__(self, writing: Writing, request: m.Write, entries: list[Entry], expected: array[int]) -> None:
        self._writing = writing
        self._request = request
        self._entries = entries
        self._expected = expected.tobytes()
        self.column = array("I", (entry.row for entry in entries)).tobytes()

    def arrived(self, conn: Connection, sums: bytes, _trailer: bytes, now: float) -> None:
        """Take the segments, if they are undamaged."""
        try:
            self._writing.payload(conn, self._request, self._entries, now, intact=sums == self._expected)
        finally:
            self.lost()

    def lost(self) -> None:
        """Let go of the objects."""
        self._writing.store.unpin_rows(self.column)

    def pinned(self) -> bytes:
        """Their rows."""
        return self.column


class Writing:
    """All objects that are being written in segments."""

    def __init__(
        self, desk: Desk, reading: Reading, tickets: Tickets, upkeep: Upkeep, bulk: Bulk, seeking: Seeking
    ) -> None:
        self._desk = desk
        self.store = desk.store
        self._catalog = desk.store.catalog
        self._reading = reading
        self._tickets = tickets
        self._upkeep = upkeep
        self._bulk = bulk
        self._seeking = seeking

    def announce(self, conn: Connection, request: m.Announce, now: float) -> None:
        """Find or make room for objects, and grant them."""
        self._desk.check_open()
        if len({spec.key for spec in request.objects}) < len(request.objects):
            raise BadRequestError("a key is announced twice in one request")
        for spec in request.objects:
            self._check(conn.tenant, spec)
        self._desk.hold(conn, ANNOUNCED_WEIGHT * len(request.objects))
        before = len(conn.announced)
        ticket = self._tickets.get(conn, request.ticket)
        keys, sizes = [spec.key for spec in request.objects], [spec.size for spec in request.objects]
        self._bulk.make_room(conn.tenant, keys, sizes)
        deadline = now + request.lease_s
        grants: list[m.Grant] = []
        touched: list[int] = []
        granted: list[int] = []
        held = array("I")
        why = ""
        for spec in request.objects:
            grant, row = self._grant(conn, spec, request.group, deadline)
            grants.append(grant)
            if row is None:
                why = why or self._upkeep.quotas.why_full(conn.tenant, spec.size)
                continue
            touched.append(row)
            if grant.state == "sealed":
                self._catalog.pin(row)  # making room for the next one must not evict this one
                held.append(row)
            elif grant.state == "granted":
                granted.append(row)
        conn.held -= ANNOUNCED_WEIGHT * (len(request.objects) - (len(conn.announced) - before))
        if ticket is not None:
            self._tickets.protect(ticket, touched, granted)
            self._tickets.announced(ticket)
        self.store.unpin_rows(held.tobytes())
        if conn.announced:
            self._watch(conn, deadline)
        live = ticket is not None or request.ticket is None
        self._desk.send(conn.number, m.Announced(request.id, grants, live, why))

    def _check(self, tenant: int, spec: m.Spec) -> None:
        """Refuse an impossible announcement, or one that contradicts what is stored."""
        if spec.layers * spec.segments > limits.MAX_SEGMENTS:
            raise BadRequestError(
                f"object {spec.key.hex()}: {spec.layers} layers of {spec.segments} segments are over the limit of "
                f"{limits.MAX_SEGMENTS} segments"
            )
        if spec.size % (spec.layers * spec.segments):
            raise BadRequestError(
                f"object {spec.key.hex()}: {spec.size} bytes do not divide into {spec.layers} layers of "
                f"{spec.segments} segments"
            )
        count = spec.layers * spec.segments
        if count > limits.FEW_SEGMENTS and spec.size // count < limits.MIN_SEGMENT_BYTES:
            raise BadRequestError(
                f"object {spec.key.hex()}: {spec.size} bytes in {count} segments: of more than {limits.FEW_SEGMENTS}, "
                f"each has at least {limits.MIN_SEGMENT_BYTES} bytes"
            )
        row = self._catalog.find(tenant, spec.key)
        if row is None:
            return
        _, size, layers, segments = self._catalog.geometry(row)
        if (size, layers, segments) != (spec.size, spec.layers, spec.segments):
            raise ConflictError(
                f"object {spec.key.hex()} is stored as {size} bytes in {layers} layers of {segments} "
                f"segments, not {spec.size} bytes in {spec.layers} of {spec.segments}"
            )

    def _grant(self, conn: Connection, spec: m.Spec, group: str, deadline: float) -> tuple[m.Grant, int | None]:
        """The answer for one object, and its row unless there is no room."""
        row = self._catalog.find(conn.tenant, spec.key)
        if row is None:
            entry = self.store.begin(conn.tenant, spec, group, deadline)
            if entry is None:
                self._desk.counters.refused += 1
                return m.Grant("full"), None
        elif self._catalog.state(row) is State.SEALED:
            self._catalog.touch(row)
            return m.Grant("sealed"), row
        else:
            entry = self.store.entries.get(row)
            if entry is None or entry.group != group:
                return m.Grant("busy"), row
        self.store.join(entry, conn.number, shm=conn.shm, deadline=deadline)
        conn.announced[entry.handle] = entry
        return m.Grant("granted", entry.handle, entry.offset), entry.row

    @staticmethod
    def _check_sums(request: m.Written | m.Write) -> None:
        count = sum(len(part.sums) for part in request.parts)
        if count > limits.MAX_SUMS:
            raise BadRequestError(f"{count} segments written at once: at most {limits.MAX_SUMS} are taken")

    @staticmethod
    def _check_apart(request: m.Write) -> None:
        """Refuse bytes of which some would land on others before anybody compared them."""
        runs = sorted((part.handle, part.first, part.first + len(part.sums)) for part in request.parts)
        for (handle, first, end), (other, following, _) in pairwise(runs):
            if handle == other and following < end:
                raise BadRequestError(
                    f"parts of object handle {handle} overlap: segments {first} to {end - 1}, and others from "
                    f"{following} on"
                )

    def _writable(self, conn: Connection, part: m.Part) -> Entry:
        """The object a part is for, if this connection may write it."""
        entry = conn.announced.get(part.handle)
        if entry is None or not entry.open:
            if self.store.entry_of(part.handle) is not None:
                raise ConflictError(f"object handle {part.handle} was not announced on this connection")
            raise NotFoundError(f"object handle {part.handle} is not being written: aborted, sealed, or never was")
        end = part.first + len(part.sums)
        if end > entry.layers * entry.segments:
            raise BadRequestError(
                f"segments {part.first} to {end - 1} of an object that has {entry.layers * entry.segments}"
            )
        return entry

    def begin(self, conn: Connection, request: m.Write, payload_bytes: int, _now: float) -> Delivery:
        """Say where the payload of a `Write` goes."""
        self._check_sums(request)
        self._check_apart(request)
        entries = [self._writable(conn, part) for part in request.parts]
        targets: list[tuple[int | None, int]] = []
        offsets, sizes, expected = array("Q"), array("Q"), array("Q")
        for entry, part in zip(entries, request.parts, strict=True):
            for landing in entry.landings(part.first, part.sums):
                targets.append((landing.offset, landing.size))
                if landing.offset is not None:
                    size = entry.segment_bytes
                    offsets.extend(range(landing.offset, landing.offset + landing.size, size))
                    sizes.extend([size] * landing.segments)
                    start = landing.first - part.first
                    expected.extend(part.sums[start : start + landing.segments])
        described = sum(size for _, size in targets)
        if described != payload_bytes:
            raise BadRequestError(f"the parts describe {described} bytes, {payload_bytes} follow")
        parts = _Parts(self, request, entries, expected)
        self.store.pin_rows(parts.column)
        conn.incoming = parts
        return Delivery(runs_of(targets), offsets.tobytes(), sizes.tobytes())

    def payload(self, conn: Connection, request: m.Write, entries: list[Entry], now: float, *, intact: bool) -> None:
        """Take the payload of a `Write`.

        Raises:
            CorruptionError: it was damaged.
        """
        if not intact:
            self._desk.counters.corrupt += 1
            raise CorruptionError("the payload does not match its checksums: it was damaged on the way")
        self._desk.counters.received_bytes += sum(
            entry.segment_bytes * len(part.sums) for entry, part in zip(entries, request.parts, strict=True)
        )
        self.written(conn, request, now)

    def written(self, conn: Connection, request: m.Written | m.Write, now: float) -> None:
        """Note segments that hold their bytes now, and seal what is whole."""
        self._check_sums(request)
        if isinstance(request, m.Written):
            conn.check_trusted()
        problem: KvRelayError | None = None
        for part in request.parts:
            try:
                entry = self._writable(conn, part)
                complete = entry.write(part.first, part.sums)
            except KvRelayError as error:
                problem = problem or error
                continue
            if complete:
                for number in entry.writers:
                    self._desk.connections[number].unannounce(entry.handle)
                self.store.seal(entry, self._upkeep.expiry(now))
                if self._seeking.lower is not None:
                    self._seeking.lower.sealed((entry.row,))
                self._upkeep.sealed(conn.tenant, now)
            elif isinstance(request, m.Written) and request.final:
                self.store.stopped(entry, conn.number)
            self._reading.written((entry.row,))
        self._rest_watch(conn)
        if problem is not None:
            try:
                raise problem
            finally:
                problem = None  # its traceback holds this frame: together they would hold the connection for long
        self._desk.send(conn.number, m.Done(request.id))

    # --- giving up ---

    def abort(self, conn: Connection, request: m.Abort, _now: float) -> None:
        """Give objects and batches up, or acknowledge that they were."""
        for handle in request.handles:
            batch = conn.batches.get(handle)
            if batch is not None:
                self._bulk.give_up(batch)
                continue
            entry = conn.unannounce(handle)
            if entry is not None:
                if entry.open:
                    self.lose(entry)
                self.store.stopped(entry, conn.number)
        self._rest_watch(conn)
        self._desk.send(conn.number, m.Done(request.id))

    def disclaim(self, conn: Connection, request: m.Disclaim, _now: float) -> None:
        """Give up what a group is writing and one of its connections will not do its share of."""
        for key in request.keys:
            row = self._catalog.find(conn.tenant, key)
            entry = None if row is None else self.store.entries.get(row)
            if entry is not None and entry.open and entry.group == request.group:
                wrote = conn.unannounce(entry.handle) is not None
                self.lose(entry)
                if wrote:
                    self.store.stopped(entry, conn.number)
        self._rest_watch(conn)
        self._desk.send(conn.number, m.Done(request.id))

    def lose(self, entry: Entry) -> None:
        """Give up an object that will not be completed; its readers are told at once."""
        for number in entry.writers - entry.holdouts:
            conn = self._desk.connections.get(number)
            if conn is not None:
                conn.unannounce(entry.handle)
        self.store.forget(entry.row)
        self._reading.lost((entry.row,))

    def disconnected(self, conn: Connection, now: float) -> None:
        """A connection ended: what it was writing will not be completed."""
        self._desk.cancel(conn.watch)
        for entry in conn.announced.values():
            if entry.open:
                self.lose(entry)
            if conn.number in entry.holdouts:
                self._desk.at(now + QUARANTINE_S, _Rest(self, entry, conn.number))

    def _watch(self, conn: Connection, deadline: float) -> None:
        """Look at what a connection writes at ``deadline``, or before."""
        if conn.watch is None or conn.watch.deadline > deadline:
            self._desk.cancel(conn.watch)
            conn.watch = self._desk.at(deadline, _Watch(self, conn))

    def _rest_watch(self, conn: Connection) -> None:
        if not conn.announced:
            self._desk.cancel(conn.watch)
            conn.watch = None

    def give_up_late(self, conn: Connection, now: float) -> None:
        """Give up the objects of a connection whose writers had long enough."""
        conn.watch = None
        for entry in list(conn.announced.values()):
            if entry.open:
                if entry.deadline <= now:
                    self.lose(entry)
                else:
                    self._watch(conn, entry.deadline)
