"""The pools of several prefill engines, to the router's tickets one pool.

Which prefill engine a hand-over will use is decided late, and may change. So its ticket is opened in every pool that
is there, ended in all of them, and its notes are taken from whichever has one. A pool that is away is looked for again;
one that is slow is asked nothing until it answers a look.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from kvrelay.errors import KvRelayError, NotFoundError, PoolUnavailableError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Sequence
    from typing import Any, Self

    from kvrelay.client.core.names import PrefixCount
    from kvrelay.router.pool_link import TicketClient
    from kvrelay.wire.messages import Engine

    Connect = Callable[[], Awaitable[TicketClient]]

logger = logging.getLogger(__name__)

OPEN_S = 0.1
"""A pool that has not opened a ticket by then is slow, and the request goes on without its protection."""
LOOK_S = 1.0
"""For looks at a pool that is away or slow."""
COLLECT_S = 30.0


class _Pool:
    """One of them."""

    def __init__(self, name: str, connect: Connect) -> None:
        self.name = name
        self.connect = connect
        self.client: TicketClient | None = None
        self.slow = False
        self.engines: frozenset[str] = frozenset()
        """Names of those that were registered there when it was last asked."""

    @property
    def gone(self) -> bool:
        """Whether nobody is there."""
        return self.client is None or self.client.closed

    @property
    def ready(self) -> bool:
        """Whether it is worth asking."""
        return not self.gone and not self.slow

    async def look(self) -> None:
        """See whether it is there, and connect if it was not. Errors mean that it is not."""
        try:
            async with asyncio.timeout(LOOK_S):
                if self.client is None or self.client.closed:
                    if self.client is not None:
                        logger.warning("the pool at %s is gone: its prefill engine hands over unprotected", self.name)
                        self.client = None
                    self.client = await self.connect()
                    logger.info("the pool at %s can be reached", self.name)
                await self.client.stat()
            self.slow = False
        except TimeoutError:
            self.slow = True
        except KvRelayError as error:
            self.slow = self.client is not None and not self.client.closed
            level = logging.DEBUG if isinstance(error, PoolUnavailableError) else logging.WARNING
            logger.log(level, "no pool at %s: %s", self.name, error)


class _Box:
    """What is said under one ticket, in all pools that opened it."""

    def __init__(self, clients: Sequence[TicketClient]) -> None:
        self.clients = clients
        self.notes: list[bytes] = []
        self.open = len(clients)
        """Pools in which the ticket has not ended."""
        self.changed = asyncio.Event()
        self.tasks: list[asyncio.Task[None]] = []

    async def listen(self, client: TicketClient, ticket: str) -> None:
        """Take one pool's notes until the ticket ends there."""
        try:
            while True:
                told = await client.collect(ticket, COLLECT_S)
                self.notes += told
                self.changed.set()
        except KvRelayError as error:
            if not isinstance(error, NotFoundError):
                logger.debug("hand-over %s: %s", ticket, error)
        finally:
            self.open -= 1
            self.changed.set()


class SeveralPools:
    """A `TicketClient` over several."""

    def __init__(self, pools: Sequence[tuple[str, Connect]]) -> None:
        """``pools``: their addresses, for the log, and what connects to them."""
        self._pools = [_Pool(name, connect) for name, connect in pools]
        self._boxes: dict[str, _Box] = {}

    async def reach(self) -> Self:
        """Connect to those that are there.

        Raises:
            PoolUnavailableError: none is.
        """
        await self._look()
        return self

    @property
    def closed(self) -> bool:
        """Whether none is there."""
        return all(pool.gone for pool in self._pools)

    @property
    def orphans(self) -> frozenset[str]:
        """Names of engines that were registered with pools that are gone, and with none that is there."""
        there = [pool.engines for pool in self._pools if not pool.gone]
        return frozenset().union(*(pool.engines for pool in self._pools if pool.gone)).difference(*there)

    async def open_ticket(self, ticket: str, deadline_s: float) -> None:
        """Open a ticket in every pool that is there."""
        asked = {
            asyncio.create_task(_opened(pool.client, ticket, deadline_s)): pool
            for pool in self._pools
            if pool.ready and pool.client is not None
        }
        if not asked:
            raise PoolUnavailableError("no pool is there")
        try:
            done, late = await asyncio.wait(asked, timeout=OPEN_S)
        except asyncio.CancelledError:
            for task in asked:
                task.cancel()
            raise
        for task in late:
            asked[task].slow = True
            logger.warning("the pool at %s is slow: going on without it until it answers in time", asked[task].name)
            task.cancel()
        results = [task.result() for task in done]
        clients = [result for result in results if not isinstance(result, KvRelayError)]
        if not clients:
            raise next(iter(result for result in results if isinstance(result, KvRelayError)), _slow())
        self._boxes[ticket] = _Box(clients)

    async def end_ticket(self, ticket: str) -> None:
        """End it in all of them."""
        box = self._boxes.pop(ticket, None)
        if box is None:  # it may be open in some: nobody waited for the rest
            clients = [pool.client for pool in self._pools if pool.ready and pool.client is not None]
        else:
            clients = list(box.clients)
            for task in box.tasks:
                task.cancel()
        await _tell(client.end_ticket(ticket) for client in clients)

    async def seal_ticket(self, ticket: str) -> None:
        """Nothing more will be announced under it."""
        if (box := self._boxes.get(ticket)) is None:
            raise NotFoundError(f"ticket {ticket} has ended")
        await _tell(client.seal_ticket(ticket) for client in box.clients)

    async def collect(self, ticket: str, timeout_s: float) -> list[bytes]:
        """Take its notes, waiting up to ``timeout_s`` for the first. NotFoundError: it has ended everywhere."""
        if (box := self._boxes.get(ticket)) is None:
            raise NotFoundError(f"ticket {ticket} has ended")
        if not box.tasks:
            box.tasks = [asyncio.create_task(box.listen(client, ticket)) for client in box.clients]
        try:
            async with asyncio.timeout(timeout_s):
                while not box.notes and box.open:
                    box.changed.clear()
                    await box.changed.wait()
        except TimeoutError:
            pass
        notes, box.notes = box.notes, []
        if not notes and not box.open:
            raise NotFoundError(f"ticket {ticket} has ended")
        return notes

    async def count_prefix(self, keys: Sequence[bytes]) -> PrefixCount:
        """The longest prefix of ``keys`` that one of them holds."""
        found = [await pool.client.count_prefix(keys) for pool in self._pools if pool.ready and pool.client is not None]
        if not found:
            raise PoolUnavailableError("no pool is there")
        return max(found, key=lambda count: count.sealed)

    async def stat(self) -> dict[str, int]:
        """Look after all of them; how many are there."""
        await self._look()
        return {"pools": sum(pool.ready for pool in self._pools)}

    async def engines(self) -> list[Engine]:
        """Which engines are registered, in any of them; each once."""
        await self._look()
        known: dict[str, Engine] = {}
        for pool in self._pools:
            if pool.ready and pool.client is not None:
                registered = await pool.client.engines()
                pool.engines = frozenset(engine.engine for engine in registered)
                known |= {engine.engine: engine for engine in registered}
        return list(known.values())

    async def close(self) -> None:
        """Disconnect from all."""
        for box in self._boxes.values():
            for task in box.tasks:
                task.cancel()
        self._boxes.clear()
        for pool in self._pools:
            if pool.client is not None:
                await pool.client.close()

    async def _look(self) -> None:
        await asyncio.gather(*(pool.look() for pool in self._pools))
        if self.closed:
            raise PoolUnavailableError(f"no pool at {', '.join(pool.name for pool in self._pools)}")


def _slow() -> KvRelayError:
    return PoolUnavailableError("every pool is slow")


async def _opened(client: TicketClient, ticket: str, deadline_s: float) -> TicketClient | KvRelayError:
    """The pool's connection once it has opened a ticket, or why it has not."""
    try:
        await client.open_ticket(ticket, deadline_s)
    except KvRelayError as error:
        return error
    return client


async def _tell(said: Any) -> None:
    """Say something to all; that one has forgotten the ticket, or is gone, does not matter to the others."""

    async def one(saying: Coroutine[Any, Any, None]) -> None:
        try:
            await saying
        except KvRelayError as error:
            logger.debug("a pool did not hear: %s", error)

    await asyncio.gather(*map(one, said))
