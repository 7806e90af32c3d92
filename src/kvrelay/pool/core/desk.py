"""What all of the pool's core shares: connections, counters, timers, and the actions for the shell."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Protocol

from kvrelay.errors import BadRequestError, DrainingError, PoolFullError
from kvrelay.pool.core.actions import Action, Send
from kvrelay.pool.core.stats import Counters
from kvrelay.wire import messages as m

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvrelay.errors import KvRelayError
    from kvrelay.pool.core.bulk import Batch
    from kvrelay.pool.core.delivery import Incoming
    from kvrelay.pool.core.entry import Entry
    from kvrelay.pool.core.lower import Waiting
    from kvrelay.pool.core.reading import Lease
    from kvrelay.pool.core.store import Store
    from kvrelay.pool.core.tickets import Follower, Ticket


MAX_HELD = 1 << 20
"""What one connection may hold at once: objects in its leases, batches and unanswered waits, what it announced, its
tickets, and who waits for these."""
TICKET_WEIGHT = 16
"""What a ticket, or a request that waits for its notes or objects, counts as; leases, batches and waits at least,
however small."""
ANNOUNCED_WEIGHT = 4
"""What an object that a connection announced counts as until it is sealed or given up."""


def weight_of(objects: int) -> int:
    """What a lease, a batch or a wait for so many objects counts as."""
    return max(TICKET_WEIGHT, objects)


class Connection:
    """What the pool knows of one connection, and what dies with it."""

    def __init__(self, number: int, *, shm_capable: bool, certificates: Sequence[str]) -> None:
        self.number = number
        self.shm_capable = shm_capable
        self.certificates = certificates
        self.shm = False
        self.client: str | None = None
        self.tenant = 0
        """Counts once it has said hello."""
        self.trusted = False
        """Whether its tenant is trusted with the arena's memory."""
        self.engine: m.Engine | None = None
        self.engine_bytes = 0
        self.leases: dict[int, Lease] = {}
        self.lease_of: dict[int, Lease] = {}
        """By the id of the request that asked for it."""
        self.tickets: dict[str, Ticket] = {}
        self.follows: dict[Follower, None] = {}
        self.announced: dict[int, Entry] = {}
        self.batches: dict[int, Batch] = {}
        self.seeks: dict[Waiting, None] = {}
        self.incoming: Incoming | None = None
        """The payload that is arriving."""
        self.watch: Timer | None = None
        """When its unsealed objects are looked at for late ones."""
        self.held = 0

    def unannounce(self, handle: int) -> Entry | None:
        """Forget that an object was announced here; the object, if it was."""
        entry = self.announced.pop(handle, None)
        if entry is not None:
            self.held -= ANNOUNCED_WEIGHT
        return entry

    def check_trusted(self) -> None:
        """Refuse to take an untrusted tenant's word that bytes are in the arena: they would be what lay there before.

        Raises:
            BadRequestError: it is not trusted with shared memory.
        """
        if not self.trusted:
            raise BadRequestError(
                "only tenants trusted with shared memory write to the arena themselves: send the bytes (Put, Write)"
            )


class Timed(Protocol):
    """Something with a deadline."""

    def expire(self, now: float) -> None:
        """The deadline has come. Does nothing when the matter has been settled before."""


class Timer:
    """A deadline that can be cancelled."""

    __slots__ = ("deadline", "timed")

    def __init__(self, deadline: float, timed: Timed) -> None:
        self.deadline = deadline
        self.timed: Timed | None = timed


class Desk:
    """Shared state and plumbing: `number` makes handles, `at` sets timers, `send` and `fail` answer requests."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.counters = Counters()
        self.draining = False
        """Whether nothing new is taken in."""
        self.connections: dict[int, Connection] = {}
        self.waiting = 0
        """Requests that will be answered later."""
        self._actions: list[Action] = []
        self._timers: list[tuple[float, int, Timer]] = []
        self._cancelled = 0
        self._last_number = 0

    def number(self) -> int:
        """A number never given before."""
        self._last_number += 1
        return self._last_number

    def connections_of(self, tenant: int) -> int:
        """How many connections of a tenant have said hello."""
        return sum(conn.client is not None and conn.tenant == tenant for conn in self.connections.values())

    def act(self, action: Action) -> None:
        """Have the shell do something."""
        self._actions.append(action)

    def take_actions(self) -> list[Action]:
        """What the shell has to do, in order."""
        actions, self._actions = self._actions, []
        return actions

    def send(self, conn: int, reply: m.Reply) -> None:
        """Answer, if the connection still is there."""
        if conn in self.connections:
            self._actions.append(Send(conn, reply))

    def fail(self, conn: int, request: int, error: KvRelayError) -> None:
        """Answer with an error."""
        self.counters.request_errors += 1
        self.send(conn, m.Failed(request, error.code, str(error)))

    def check_open(self) -> None:
        """Refuse to take anything in while draining.

        Raises:
            DrainingError: the pool is being emptied.
        """
        if self.draining:
            raise DrainingError("this pool is draining: it takes nothing new; write to another, or compute it again")

    def hold(self, conn: Connection, weight: int) -> None:
        """Count what a connection holds.

        Raises:
            PoolFullError: it would be more than one connection may.
        """
        if conn.held + weight > MAX_HELD:
            raise PoolFullError(
                f"this connection's leases, waits, tickets and unsealed objects hold {conn.held}, {weight} more are "
                f"over the limit of {MAX_HELD}: release some first"
            )
        conn.held += weight

    def at(self, deadline: float, timed: Timed) -> Timer:
        """Call ``timed.expire`` at ``deadline``, unless `cancel` comes first."""
        timer = Timer(deadline, timed)
        heapq.heappush(self._timers, (deadline, self.number(), timer))
        return timer

    def cancel(self, timer: Timer | None) -> None:
        """Call off a timer, if there is one and it has not fired. Those called off never outnumber the others."""
        if timer is None or timer.timed is None:
            return
        timer.timed = None
        self._cancelled += 1
        if self._cancelled > len(self._timers) // 2:
            self._timers = [entry for entry in self._timers if entry[2].timed is not None]
            heapq.heapify(self._timers)
            self._cancelled = 0

    def tick(self, now: float) -> None:
        """Let time pass."""
        while self._timers and self._timers[0][0] <= now:
            timer = heapq.heappop(self._timers)[2]
            timed, timer.timed = timer.timed, None
            if timed is None:
                self._cancelled -= 1
            else:
                timed.expire(now)

    def next_deadline(self) -> float | None:
        """When `tick` has something to do, at the earliest."""
        return self._timers[0][0] if self._timers else None

    def check_integrity(self) -> None:
        """Raise AssertionError unless cancelled timers are counted right."""
        assert self._cancelled == sum(timer.timed is None for _, _, timer in self._timers)
