"""Tickets, engines and statistics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvrelay.client.core.session import Ask
from kvrelay.wire import messages as m

if TYPE_CHECKING:
    from kvrelay.client.core.steps import Operation


def open_ticket(ticket: str, deadline_s: float) -> Operation[None]:
    """Open a ticket; see `OpenTicket`."""
    yield Ask(m.OpenTicket(0, ticket, deadline_s))


def seal_ticket(ticket: str) -> Operation[None]:
    """Nothing more will be announced under a ticket."""
    yield Ask(m.SealTicket(0, ticket))


def follow(ticket: str, key: bytes, timeout_s: float) -> Operation[m.Followed]:
    """Wait for an object to be announced under a ticket, or not to be."""
    reply = yield Ask(m.Follow(0, ticket, key, timeout_s), m.Followed)
    assert isinstance(reply, m.Followed)
    return reply


def end_ticket(ticket: str) -> Operation[None]:
    """End a ticket."""
    yield Ask(m.EndTicket(0, ticket))


def post(ticket: str, note: bytes) -> Operation[None]:
    """Leave a note for a ticket's owner."""
    yield Ask(m.Post(0, ticket, note))


def collect(ticket: str, timeout_s: float) -> Operation[list[bytes]]:
    """Take a ticket's notes, waiting for the first."""
    reply = yield Ask(m.Collect(0, ticket, timeout_s), m.Notes)
    assert isinstance(reply, m.Notes)
    return reply.notes


def register(engine: str, role: str, namespace: str, facts: dict[str, str]) -> Operation[None]:
    """Tell the pool which engine this is."""
    yield Ask(m.Register(0, engine, role, namespace, facts))


def engines() -> Operation[list[m.Engine]]:
    """Which engines are registered."""
    reply = yield Ask(m.ListEngines(0), m.Engines)
    assert isinstance(reply, m.Engines)
    return reply.engines


def stat() -> Operation[dict[str, int]]:
    """Gauges and counters; names in `kvrelay.pool.core.stats`."""
    reply = yield Ask(m.Stat(0), m.Stats)
    assert isinstance(reply, m.Stats)
    return reply.values
