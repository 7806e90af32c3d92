"""Hand-over tickets: the router's one connection to the pool, and what is asked of it for each request.

The pool is a help, not a need: while it is away requests go on without tickets and proofs, and it is looked for in the
background. Tickets die with the connection that opened them, so nothing has to be remembered across one.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Protocol

import msgspec

from kvrelay.circuit import Circuit, State
from kvrelay.errors import KvRelayError, NotFoundError, PoolUnavailableError
from kvrelay.types import Proof, read_note

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Sequence
    from typing import Any

    from kvrelay.client.core.names import PrefixCount
    from kvrelay.router.census import Census
    from kvrelay.router.core.records import Record
    from kvrelay.router.metrics import RouterMetrics
    from kvrelay.types import Lost
    from kvrelay.wire.messages import Engine

logger = logging.getLogger(__name__)

SLOW_S, LONGEST_PAUSE_S = 1.0, 30.0
"""From opening the circuit to the first probe, and between probes at most."""
PROOF_TIMEOUT_S = 1.0
"""After the first bytes of an answer, for the first proof; and after its end, for the last."""
CHECK_S = 2.0
"""Between looks whether the pool is still there."""
CENSUS_S = 30.0
"""Between looks at which engines are registered."""
MIN_BACKOFF_S, MAX_BACKOFF_S = 0.1, 5.0


class TicketClient(Protocol):
    """What the desk needs of `kvrelay.client.aio.AsyncPoolClient`. Errors are `KvRelayError`; every wait is bounded."""

    @property
    def closed(self) -> bool:
        """Whether the connection has ended: every call fails from then on."""
        ...

    async def open_ticket(self, ticket: str, deadline_s: float) -> None:
        """Open a ticket, owned by this connection."""
        ...

    async def end_ticket(self, ticket: str) -> None:
        """End it. ``NotFoundError`` if it has ended."""
        ...

    async def seal_ticket(self, ticket: str) -> None:
        """Nothing more will be announced under it. ``NotFoundError`` if it has ended."""
        ...

    async def collect(self, ticket: str, timeout_s: float) -> list[bytes]:
        """Take its notes; waits for the first if there is none."""
        ...

    async def count_prefix(self, keys: Sequence[bytes]) -> PrefixCount:
        """How long the prefix of ``keys`` is that the pool holds."""
        ...

    async def stat(self) -> dict[str, int]:
        """Any cheap round trip."""
        ...

    async def engines(self) -> list[Engine]:
        """Which engines are registered."""
        ...

    async def close(self) -> None:
        """Close the connection."""
        ...


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


class TicketDesk:
    """Opens tickets, collects their proofs, ends them."""

    def __init__(
        self,
        connect: Callable[[], Awaitable[TicketClient]],
        *,
        deadline_s: float,
        patience_s: float,
        metrics: RouterMetrics,
        census: Census,
    ) -> None:
        """``connect`` makes a connection; ``deadline_s``: of each ticket; ``census`` is taken of the pool's engines.

        A request waits no longer than ``patience_s`` for its ticket; then the next go without, until one probes the
        pool again.
        """
        self._connect = connect
        self._census = census
        self._census_due = 0.0
        self.deadline_s = deadline_s
        self._patience_s = patience_s
        self._metrics = metrics
        self._client: TicketClient | None = None
        self._lost = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._open: dict[str, Ticket] = {}
        self._circuit = Circuit(failures=1, first_pause_s=SLOW_S, longest_pause_s=max(SLOW_S, LONGEST_PAUSE_S))

    @property
    def up(self) -> bool:
        """Whether the pool is there, as far as is known."""
        return self._client is not None

    async def start(self) -> None:
        """Connect, or begin to look for the pool if it is away.

        Raises:
            KvRelayError: the pool is there and will not have us: wrong token, other version.
        """
        try:
            self._arrived(await self._connect())
        except PoolUnavailableError as error:
            logger.warning("the pool is away (%s): requests go on without tickets and proofs until it is back", error)
        self._keeper = asyncio.create_task(self._keep())

    async def close(self) -> None:
        """End what is open and disconnect."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait({self._keeper})
        for ticket in list(self._open.values()):
            self.end(ticket)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=PROOF_TIMEOUT_S)
        for task in self._tasks:
            task.cancel()
        if self._client is not None:
            await self._client.close()
            self._departed()

    async def open(self, record: Record, expected: int) -> Ticket | None:
        """A ticket in the record's name; None while the pool is away or slow."""
        client, circuit = self._client, self._circuit
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
            self._failed(client, error)
            return None
        self._answered_in_time()
        self._open[ticket.name] = ticket
        self._metrics.tickets_open.set(len(self._open))
        return ticket

    def _answered_in_time(self) -> None:
        was = self._circuit.state
        self._circuit.succeeded()
        if was is not State.CLOSED and self._circuit.state is State.CLOSED:
            self._metrics.circuit_open.set(0)
            logger.info("the pool opens tickets in time again")

    async def count_sealed(self, keys: Sequence[bytes]) -> int:
        """How many of these objects, from the first on, are whole in the pool; 0 while it is away.

        Raises:
            KvRelayError: it does not say.
        """
        return 0 if self._client is None else (await self._client.count_prefix(keys)).sealed

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
            self._failed(ticket.client, error)
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
            logger.warning("hand-over %s: a note that is none of ours: %s", ticket.name, error)
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
            self._failed(ticket.client, error)

    def _failed(self, client: TicketClient, error: KvRelayError) -> None:
        if not client.closed:
            logger.warning("pool: %s", error)
        elif client is self._client:
            logger.warning("the pool is gone (%s): requests go on without tickets and proofs until it is back", error)
            self._departed()
            self._lost.set()

    def _arrived(self, client: TicketClient) -> None:
        self._client = client
        self._circuit.reset()
        self._metrics.circuit_open.set(0)
        self._census_due = 0.0
        self._lost.clear()
        self._metrics.pool_up.set(1)

    def _departed(self) -> None:
        self._client = None
        self._metrics.pool_up.set(0)

    async def _keep(self) -> None:
        backoff_s = MIN_BACKOFF_S
        while True:
            if self._client is None:
                try:
                    self._arrived(await self._connect())
                    logger.info("the pool is back")
                except KvRelayError as error:
                    away = isinstance(error, PoolUnavailableError)
                    logger.log(logging.DEBUG if away else logging.WARNING, "no pool yet: %s", error)
                    await asyncio.sleep(backoff_s)
                    backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)
                continue
            await self._check(self._client)
            if not self.up:  # it takes connections, and answers nothing
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)
                continue
            backoff_s = MIN_BACKOFF_S
            try:
                async with asyncio.timeout(CHECK_S):
                    await self._lost.wait()
            except TimeoutError:
                pass

    async def _check(self, client: TicketClient) -> None:
        now = asyncio.get_running_loop().time()
        try:
            if now < self._census_due:
                await client.stat()
            else:
                self._census.take(await client.engines())
                self._census_due = now + CENSUS_S
        except KvRelayError as error:
            self._failed(client, error)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
