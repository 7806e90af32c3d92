"""Whether everything that is counted twice in a pool's core agrees."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from kvrelay.pool.core.catalog import State
from kvrelay.pool.core.desk import ANNOUNCED_WEIGHT, TICKET_WEIGHT

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvrelay.pool.core.bulk import Batch
    from kvrelay.pool.core.desk import Connection
    from kvrelay.pool.core.pool import PoolCore


def audit(core: PoolCore) -> None:
    """Raise AssertionError unless objects, leases, tickets and waiters are accounted for."""
    core.store.check_integrity()
    core.desk.check_integrity()
    _check_pins(core)
    connections = core.desk.connections
    for conn in connections.values():
        _check_held(conn)
        unsealed = [entry.deadline for entry in conn.announced.values() if entry.open]
        assert not unsealed or (conn.watch is not None and conn.watch.deadline <= min(unsealed))
    for entry in core.store.entries.values():
        if entry.open:
            assert all(connections[number].announced[entry.handle] is entry for number in entry.writers)
    _check_batches(core, [batch for conn in connections.values() for batch in conn.batches.values()])
    assert {h for c in connections.values() for h in c.leases} == set(core.reading.leases)
    assert all(c.leases[lease.handle] is lease for c in connections.values() for lease in c.lease_of.values())
    assert {(c.tenant, t) for c in connections.values() for t in c.tickets} == set(core.tickets.open)
    waiting = core.reading.check_integrity() + core.tickets.check_integrity() + len(core.seeking.waiting)
    assert waiting == core.desk.waiting
    follows = {follower for ticket in core.tickets.open.values() for follower in ticket.followers}
    assert follows == {follower for conn in connections.values() for follower in conn.follows}
    assert {w for c in connections.values() for w in c.seeks} == set(core.seeking.waiting)


def _check_pins(core: PoolCore) -> None:
    arriving = [conn.incoming.pinned() for conn in core.desk.connections.values() if conn.incoming is not None]
    pins = Counter((*core.reading.protected(), *core.tickets.protected()))
    pins.update(row for column in arriving for row in _ints(column))
    if core.seeking.lower is not None:
        pins.update(core.seeking.lower.protected())
    named = _ints(core.catalog.page(None, 0, 1 << 30, b"")[0])
    for row in {*pins, *named}:
        assert core.catalog.info(row).pins == pins[row], f"pins of row {row}"
    assert core.catalog.counts().pinned == len(pins)


def _check_held(conn: Connection) -> None:
    waits = sum(waiter.weight for lease in conn.leases.values() for waiter in lease.waiters)
    collectors = sum(len(ticket.collectors) for ticket in conn.tickets.values())
    leased = sum(lease.weight for lease in conn.leases.values())
    batches = sum(batch.weight for batch in conn.batches.values())
    seeks = sum(waiting.weight for waiting in conn.seeks)
    announced = ANNOUNCED_WEIGHT * len(conn.announced)
    assert conn.held == announced + leased + waits + batches + seeks + TICKET_WEIGHT * (
        len(conn.tickets) + collectors + len(conn.follows)
    )


def _check_batches(core: PoolCore, live: list[Batch]) -> None:
    for batch in (*live, *core.bulk.resting.values()):
        for row in _ints(batch.column):
            info = core.catalog.info(row)
            assert info.held
            assert info.state is State.GONE or (info.state is State.WRITING and batch.open)
    assert all(batch.open or batch.timer is None or batch.timer.timed is None for batch in live)
    assert all(not batch.open for batch in core.bulk.resting.values())


def _ints(column: bytes) -> Iterable[int]:
    return memoryview(column).cast("I")
