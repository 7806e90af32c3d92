"""Tickets: named leases with a mailbox. One is one hand-over."""

from __future__ import annotations

from array import array
from collections import Counter
from typing import TYPE_CHECKING

from kvrelay.errors import ConflictError, NotFoundError, PoolFullError
from kvrelay.pool.core.desk import TICKET_WEIGHT
from kvrelay.wire import limits
from kvrelay.wire import messages as m

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kvrelay.pool.core.desk import Connection, Desk, Timer


class Ticket:
    """A named lease, the notes posted to it, and the requests waiting for notes."""

    def __init__(self, tickets: Tickets, name: str, conn: Connection) -> None:
        self._tickets = tickets
        self.name = name
        self.conn = conn
        self.rows: set[int] = set()
        self.fresh: set[int] = set()
        """Of these, the ones that were written under the ticket."""
        self.notes: list[bytes] = []
        self.collectors: dict[Collector, None] = {}
        self.followers: dict[Follower, None] = {}
        self.sealed = False
        """Whether nothing more will be announced under it."""
        self.timer: Timer | None = None

    def expire(self, _now: float) -> None:
        """End the ticket, unless it has ended before."""
        self._tickets.expired(self)


class Collector:
    """A `Collect` request that has not been answered."""

    def __init__(self, tickets: Tickets, ticket: Ticket, request: int) -> None:
        self._tickets = tickets
        self.ticket = ticket
        self.request = request
        self.timer: Timer | None = None

    def expire(self, _now: float) -> None:
        """Answer that no note came."""
        self._tickets.answer(self, [])


class Follower:
    """A `Follow` request that has not been answered."""

    def __init__(self, tickets: Tickets, ticket: Ticket, conn: Connection, request: m.Follow) -> None:
        self._tickets = tickets
        self.ticket = ticket
        self.conn = conn
        self.request = request
        self.timer: Timer | None = None

    def expire(self, _now: float) -> None:
        """Answer that it did not come in time."""
        self._tickets.tell(self)


class Tickets:
    """All open tickets, by tenant and name."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self.open: dict[tuple[int, str], Ticket] = {}
        self._kept: Counter[int] = Counter()
        """What the notes of each tenant take."""

    def open_ticket(self, conn: Connection, request: m.OpenTicket, now: float) -> None:
        """Open a ticket owned by ``conn``."""
        if (conn.tenant, request.ticket) in self.open:
            raise ConflictError(f"ticket {request.ticket!r} is open already")
        self._desk.hold(conn, TICKET_WEIGHT)
        ticket = Ticket(self, request.ticket, conn)
        self.open[conn.tenant, ticket.name] = conn.tickets[ticket.name] = ticket
        ticket.timer = self._desk.at(now + request.deadline_s, ticket)
        self._desk.send(conn.number, m.Done(request.id))

    def get(self, conn: Connection, name: str | None) -> Ticket | None:
        """The open ticket of this name, if there is one."""
        return None if name is None else self.open.get((conn.tenant, name))

    def _find(self, conn: Connection, name: str) -> Ticket:
        ticket = self.get(conn, name)
        if ticket is None:
            raise NotFoundError(f"ticket {name!r} is not open: it has ended, or never was")
        return ticket

    def _owned(self, conn: Connection, name: str) -> Ticket:
        ticket = self._find(conn, name)
        if ticket.conn is not conn:
            raise ConflictError(f"ticket {name!r} belongs to another connection")
        return ticket

    def protect(self, ticket: Ticket, rows: Iterable[int], fresh: Iterable[int] = ()) -> None:
        """Put objects under a ticket. ``fresh``: those of them that are about to be written."""
        ticket.fresh.update(fresh)
        new = set(rows) - ticket.rows
        self._desk.store.pin_rows(array("I", new).tobytes())
        ticket.rows |= new

    def seal_ticket(self, conn: Connection, request: m.SealTicket, _now: float) -> None:
        """Nothing more will be announced under a ticket."""
        ticket = self._owned(conn, request.ticket)
        ticket.sealed = True
        self._tell_all(ticket)
        self._desk.send(conn.number, m.Done(request.id))

    def follow(self, conn: Connection, request: m.Follow, now: float) -> None:
        """Answer when an object is there, or will not come under a ticket."""
        ticket = self.get(conn, request.ticket)
        present = self._desk.store.catalog.find(conn.tenant, request.key) is not None
        live = ticket is not None and not ticket.sealed
        if present or not live or not request.timeout_s or ticket is None:
            self._desk.send(conn.number, m.Followed(request.id, present, live))
            return
        self._desk.hold(conn, TICKET_WEIGHT)
        follower = Follower(self, ticket, conn, request)
        ticket.followers[follower] = conn.follows[follower] = None
        self._desk.waiting += 1
        follower.timer = self._desk.at(now + request.timeout_s, follower)

    def announced(self, ticket: Ticket) -> None:
        """Objects were announced under a ticket: answer whom one of them was missing."""
        for follower in list(ticket.followers):
            if self._is_there(follower):
                self.tell(follower)

    def _is_there(self, follower: Follower) -> bool:
        return self._desk.store.catalog.find(follower.conn.tenant, follower.request.key) is not None

    def _tell_all(self, ticket: Ticket) -> None:
        for follower in list(ticket.followers):
            self.tell(follower)

    def tell(self, follower: Follower) -> None:
        """Answer a request that waits for an object."""
        self.forget(follower)
        ticket = follower.ticket
        live = self.open.get((ticket.conn.tenant, ticket.name)) is ticket and not ticket.sealed
        followed = m.Followed(follower.request.id, self._is_there(follower), live)
        self._desk.send(follower.conn.number, followed)

    def forget(self, follower: Follower) -> None:
        """Nobody waits for its answer any more."""
        del follower.ticket.followers[follower]
        del follower.conn.follows[follower]
        follower.conn.held -= TICKET_WEIGHT
        self._desk.cancel(follower.timer)
        self._desk.waiting -= 1

    def end_ticket(self, conn: Connection, request: m.EndTicket, _now: float) -> None:
        """End a ticket."""
        self.drop(self._owned(conn, request.ticket))
        self._desk.send(conn.number, m.Done(request.id))

    def expired(self, ticket: Ticket) -> None:
        """End a ticket at its deadline."""
        self._desk.counters.expired_leases += 1
        self.drop(ticket)

    def drop(self, ticket: Ticket) -> None:
        """End a ticket: nothing is protected by it any more, and who collects its notes gets none."""
        del self.open[ticket.conn.tenant, ticket.name]
        del ticket.conn.tickets[ticket.name]
        ticket.conn.held -= TICKET_WEIGHT
        self._desk.cancel(ticket.timer)
        self._take(ticket)
        for collector in list(ticket.collectors):
            self.answer(collector, [])
        self._tell_all(ticket)
        self._desk.store.unpin_rows(array("I", ticket.rows).tobytes())

    def post(self, conn: Connection, request: m.Post, _now: float) -> None:
        """Leave a note for a ticket's owner."""
        ticket = self._find(conn, request.ticket)
        if len(ticket.notes) >= limits.MAX_NOTES:
            raise PoolFullError(f"ticket {request.ticket!r} holds {limits.MAX_NOTES} notes: collect them first")
        held = sum(map(len, ticket.notes))
        if held + len(request.note) > limits.MAX_NOTES_BYTES:
            raise PoolFullError(f"ticket {request.ticket!r} holds {held} bytes of notes: collect them first")
        cost = _cost([request.note])
        if self._kept[conn.tenant] + cost > limits.MAX_TENANT_NOTES_BYTES:
            raise PoolFullError(
                f"this tenant's tickets hold {self._kept[conn.tenant]} bytes of notes: collect some first"
            )
        ticket.notes.append(request.note)
        self._kept[conn.tenant] += cost
        if ticket.collectors:
            self.answer(next(iter(ticket.collectors)), self._take(ticket))
        self._desk.send(conn.number, m.Done(request.id))

    def collect(self, conn: Connection, request: m.Collect, now: float) -> None:
        """Take the notes, or wait for the first."""
        ticket = self._owned(conn, request.ticket)
        if ticket.notes or not request.timeout_s:
            self._desk.send(conn.number, m.Notes(request.id, self._take(ticket)))
            return
        self._desk.hold(conn, TICKET_WEIGHT)
        collector = Collector(self, ticket, request.id)
        ticket.collectors[collector] = None
        self._desk.waiting += 1
        collector.timer = self._desk.at(now + request.timeout_s, collector)

    def _take(self, ticket: Ticket) -> list[bytes]:
        notes, ticket.notes = ticket.notes, []
        self._kept[ticket.conn.tenant] -= _cost(notes)
        return notes

    def answer(self, collector: Collector, notes: list[bytes]) -> None:
        """Answer a request that waits for notes."""
        del collector.ticket.collectors[collector]
        collector.ticket.conn.held -= TICKET_WEIGHT
        self._desk.cancel(collector.timer)
        self._desk.waiting -= 1
        self._desk.send(collector.ticket.conn.number, m.Notes(collector.request, notes))

    def protected(self) -> Iterator[int]:
        """The row of every object a ticket protects, once for each ticket."""
        for ticket in self.open.values():
            yield from ticket.rows

    def check_integrity(self) -> int:
        """Raise AssertionError unless nobody waits beside notes; how many wait."""
        for ticket in self.open.values():
            assert not (ticket.notes and ticket.collectors)
            assert not (ticket.sealed and ticket.followers)
        for tenant, kept in self._kept.items():
            assert kept == sum(_cost(ticket.notes) for (of, _), ticket in self.open.items() if of == tenant)
        return sum(len(ticket.collectors) + len(ticket.followers) for ticket in self.open.values())


def _cost(notes: Iterable[bytes]) -> int:
    """What notes take."""
    return sum(len(note) + limits.NOTE_COST_BYTES for note in notes)
