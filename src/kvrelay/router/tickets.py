"""Hand-over tickets: what is asked of the pool for each request.

The pool is a help, not a need: while it is away requests go on without tickets and proofs. Tickets die with the
connection that opened them, so nothing has to be remembered across one.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import msgspec

from kvrelay.circuit import Circuit, State
from kvrelay.errors import KvRelayError, NotFoundError
from kvrelay.router.pool_link import PoolLink
from kvrelay.router.several_pools import SeveralPools
from kvrelay.types import Proof, read_note

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine
    from typing import Any

    from kvrelay.router.core.records import Record
    from kvrelay.router.kv_compatibility import KvCompatibility
    from kvrelay.router.metrics import RouterMetrics
    from kvrelay.router.pool_link import TicketClient
    from kvrelay.types import Lost

logger = logging.getLogger(__name__)

SLOW_S, LONGEST_PAUSE_S = 1.0, 30.0
"""From opening the circuit to the first probe, and between probes at most."""
PROOF_TIMEOUT_S = 1.0
"""After the first bytes of an answer, for the first proof; and after its end, for the last."""


class Ticket:
    """One open ticket."""

    __slots__ = (
        "answer_begun", "answer_ended", "attempt", "client", "ended", "expected", "lost", "moved", "name", "proven",
        "record", "settling",
    )  # fmt: skip

    def __init__(self, name: str, client: TicketClient, record: Record, expected: int) -> None:
        """``expected``: how many proofs each decode leg will post."""
        self.name = name
        self.client = client
        self.record = record
        self.expected = expected
        self.answer_begun = False
        """Whether the first bytes of an answer are there: a first proof is posted by now."""
        self.answer_ended = False
        """Set by the owner: every proof is posted by now."""
        self.ended = False
        self.settling: asyncio.Task[None] | None = None
        self.moved = asyncio.Event()
        """Set when the answer begins, and when another leg does."""
        self.begin_attempt(1)

    def begin_attempt(self, attempt: int) -> None:
        """A decode leg is about to be sent; what concerns earlier ones is ignored from now on."""
        loop = asyncio.get_running_loop()
        self.attempt = attempt
        self.lost: asyncio.Future[Lost] = loop.create_future()
        """The decode side cannot have the KV."""
        self.proven: asyncio.Future[None] = loop.create_future()
        """Every proof of the leg is there, or no more will come."""
        self.moved.set()

    def begin_answer(self) -> None:
        """The first bytes of an answer are there."""
        self.answer_begun = True
        self.moved.set()

    def heard(self, note: Proof | Lost) -> bool:
        """Take a note; whether it concerns the current leg."""
        if note.attempt != self.attempt:
            return False
        if isinstance(note, Proof):
            self.record.prove(note)
            if self.record.num_proofs >= self.expected:
                self.no_more()
        elif not self.lost.done():
            self.lost.set_result(note)
        return True

    def no_more(self) -> None:
        """No proof will come any more."""
        if not self.proven.done():
            self.proven.set_result(None)


class TicketManager:
    """Opens tickets, collects their proofs, ends them."""

    def __init__(
        self,
        connect: Callable[[], Awaitable[TicketClient]],
        *,
        deadline_s: float,
        patience_s: float,
        metrics: RouterMetrics,
        compatibility: KvCompatibility,
    ) -> None:
        """``connect`` makes a connection; ``deadline_s``: of each ticket; ``compatibility``: of the pool's engines.

        A request waits no longer than ``patience_s`` for its ticket; then the next go without, until one probes the
        pool again.
        """
        self.link = PoolLink(connect, metrics=metrics, compatibility=compatibility, on_arrival=self._begin_anew)
        self.compatibility = compatibility
        self.deadline_s = deadline_s
        self._patience_s = patience_s
        self._metrics = metrics
        self._tasks: set[asyncio.Task[None]] = set()
        self._open: dict[str, Ticket] = {}
        self._circuit = Circuit(failures=1, first_pause_s=SLOW_S, longest_pause_s=max(SLOW_S, LONGEST_PAUSE_S))

    @property
    def orphans(self) -> frozenset[str]:
        """Names of engines whose pool is gone while others' are there: what they prefill cannot be handed over."""
        client = self.link.client
        return client.orphans if isinstance(client, SeveralPools) else frozenset()

    async def start(self) -> None:
        """Reach for the pool, as `PoolLink.start` does."""
        await self.link.start()

    async def close(self) -> None:
        """End what is open and disconnect."""
        for ticket in list(self._open.values()):
            self.end(ticket)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=PROOF_TIMEOUT_S)
        for task in self._tasks:
            task.cancel()
        await self.link.close()

    async def open(self, record: Record, expected: int) -> Ticket | None:
        """A ticket in the record's name; None while the pool is away or slow."""
        client, circuit = self.link.client, self._circuit
        loop = asyncio.get_running_loop()
        if client is None or not circuit.allow(loop.time()):
            return None
        ticket = Ticket(record.life.name, client, record, expected)
        try:
            async with asyncio.timeout(self._patience_s):
                await client.open_ticket(ticket.name, self.deadline_s)
        except TimeoutError:
            if circuit.state is State.CLOSED:
                self._metrics.circuit_open.set(1)
                logger.warning("the pool took more than %g s to open a ticket: going on without", self._patience_s)
            circuit.failed(loop.time())
            self._spawn(self._tell(ticket, ticket.client.end_ticket))  # it may yet be opened
            return None
        except asyncio.CancelledError:
            circuit.forgotten()
            self._spawn(self._tell(ticket, ticket.client.end_ticket))
            raise
        except KvRelayError as error:
            circuit.forgotten()
            self.link.failed(client, error)
            return None
        self._answered_in_time()
        self._open[ticket.name] = ticket
        self._metrics.tickets_open.set(len(self._open))
        return ticket

    def _begin_anew(self) -> None:
        """What was known of how fast the pool is was known of another connection."""
        self._circuit.reset()
        self._metrics.circuit_open.set(0)

    def _answered_in_time(self) -> None:
        was = self._circuit.state
        self._circuit.succeeded()
        if was is not State.CLOSED and self._circuit.state is State.CLOSED:
            self._metrics.circuit_open.set(0)
            logger.info("the pool opens tickets in time again")

    def watch(self, ticket: Ticket) -> None:
        """Take notes from now on, before there is an answer."""
        if ticket.settling is None and not ticket.ended:
            ticket.settling = self._spawn(self._settle(ticket))

    def settle(self, ticket: Ticket) -> None:
        """The answer has begun: collect the proofs in the background, then end the ticket."""
        ticket.begin_answer()
        self.watch(ticket)

    def seal(self, ticket: Ticket) -> None:
        """Nothing more will be computed under the ticket: a decode side that follows is told."""
        if not ticket.ended:
            self._spawn(self._tell(ticket, ticket.client.seal_ticket))

    def end(self, ticket: Ticket) -> None:
        """End the ticket now, whatever it waits for. May be repeated."""
        if ticket.ended:
            return
        ticket.ended = True
        self._open.pop(ticket.name, None)
        self._metrics.tickets_open.set(len(self._open))
        if ticket.settling is not None and ticket.settling is not asyncio.current_task():
            ticket.settling.cancel()
        self._spawn(self._tell(ticket, ticket.client.end_ticket))

    def settling(self, handover: str) -> asyncio.Task[None] | None:
        """What still collects proofs of a hand-over; None if nothing does."""
        ticket = self._open.get(handover)
        return None if ticket is None else ticket.settling

    async def settled(self, handover: str) -> None:
        """Wait, boundedly, until the proofs of a hand-over whose answer has begun are in."""
        ticket = self._open.get(handover)
        if ticket is not None and ticket.settling is not None and ticket.answer_ended:
            await asyncio.wait({ticket.settling}, timeout=PROOF_TIMEOUT_S)

    async def _settle(self, ticket: Ticket) -> None:
        record = ticket.record
        try:
            while not (ticket.answer_begun and record.num_proofs >= ticket.expected):
                if record.num_proofs >= ticket.expected:  # nothing more is said of this leg; there may be another
                    ticket.moved.clear()
                    await ticket.moved.wait()
                    continue
                last = ticket.answer_ended or (ticket.answer_begun and ticket.expected == 1)
                notes = await ticket.client.collect(ticket.name, PROOF_TIMEOUT_S)
                for note in notes:
                    self._note(ticket, note)
                if not notes and last:
                    break
        except NotFoundError:
            pass  # its deadline has passed
        except KvRelayError as error:
            self.link.failed(ticket.client, error)
        finally:
            ticket.no_more()
            self.end(ticket)
        logger.debug("hand-over: %s", record.told(ticket.expected).decode())
        if record.num_proofs < ticket.expected:
            self._metrics.proofs_missing.inc()

    def _note(self, ticket: Ticket, data: bytes) -> None:
        try:
            note = read_note(data)
        except msgspec.MsgspecError as error:
            logger.warning("hand-over %s: a note that is not one of ours: %s", ticket.name, error)
            return
        if ticket.heard(note) and isinstance(note, Proof):
            self._metrics.proven(note)

    async def _tell(self, ticket: Ticket, say: Callable[[str], Awaitable[object]]) -> None:
        """Say something to the pool of a ticket that it may have forgotten by now."""
        try:
            await say(ticket.name)
        except NotFoundError:
            pass
        except KvRelayError as error:
            self.link.failed(ticket.client, error)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
