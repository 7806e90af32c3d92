"""The router's connection to the pool: looked after, and made anew when it is lost."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Protocol

from kvrelay.errors import KvRelayError, PoolUnavailableError
from kvrelay.router.background import keep_running

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from kvrelay.client.core.names import PrefixCount
    from kvrelay.router.kv_compatibility import KvCompatibility
    from kvrelay.router.metrics import RouterMetrics
    from kvrelay.wire.messages import Engine

logger = logging.getLogger(__name__)

CHECK_S = 2.0
"""Between looks whether the pool is still there."""
COMPATIBILITY_S = 30.0
"""Between looks at which engines are registered."""
MIN_BACKOFF_S, MAX_BACKOFF_S = 0.1, 5.0


class TicketClient(Protocol):
    """What is needed of `kvrelay.client.aio.AsyncPoolClient`. Errors are `KvRelayError`; every wait is bounded."""

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


class PoolLink:
    """Has a connection, or looks for the pool."""

    def __init__(
        self,
        connect: Callable[[], Awaitable[TicketClient]],
        *,
        metrics: RouterMetrics,
        compatibility: KvCompatibility,
        on_arrival: Callable[[], None],
    ) -> None:
        """``connect`` makes a connection, each of which ``on_arrival`` is told of.

        ``compatibility`` is taken of the pool's engines.
        """
        self.client: TicketClient | None = None
        """None while the pool is away."""
        self._connect = connect
        self._metrics = metrics
        self._compatibility = compatibility
        self._compatibility_due = 0.0
        self._on_arrival = on_arrival
        self._lost = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None

    @property
    def up(self) -> bool:
        """Whether the pool is there, as far as is known."""
        return self.client is not None

    async def start(self) -> None:
        """Connect, or begin to look for the pool if it is away.

        Raises:
            KvRelayError: the pool is there and will not have us: wrong token, other version.
        """
        try:
            self._arrived(await self._connect())
        except PoolUnavailableError as error:
            logger.warning("the pool is away (%s): requests go on without tickets and proofs until it is back", error)
        self._keeper = asyncio.create_task(keep_running(self._keep, "the care for the connection to the pool"))

    async def close(self) -> None:
        """Disconnect, and look no more."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait({self._keeper})
        if self.client is not None:
            await self.client.close()
            self._departed()

    async def count_sealed(self, keys: Sequence[bytes]) -> int:
        """How many of these objects, from the first on, are whole in the pool; 0 while it is away.

        Raises:
            KvRelayError: it does not say.
        """
        return 0 if self.client is None else (await self.client.count_prefix(keys)).sealed

    def failed(self, client: TicketClient, error: KvRelayError) -> None:
        """A call of ``client`` failed: if that is since its connection is lost, another one is made."""
        if not client.closed:
            logger.warning("pool: %s", error)
        elif client is self.client:
            logger.warning("the pool is gone (%s): requests go on without tickets and proofs until it is back", error)
            self._departed()
            self._lost.set()

    def _arrived(self, client: TicketClient) -> None:
        self.client = client
        self._on_arrival()
        self._compatibility_due = 0.0
        self._lost.clear()
        self._metrics.pool_up.set(1)

    def _departed(self) -> None:
        self.client = None
        self._metrics.pool_up.set(0)

    async def _keep(self) -> None:
        backoff_s = MIN_BACKOFF_S
        while True:
            if self.client is None:
                try:
                    self._arrived(await self._connect())
                    logger.info("the pool is back")
                except KvRelayError as error:
                    away = isinstance(error, PoolUnavailableError)
                    logger.log(logging.DEBUG if away else logging.WARNING, "no pool yet: %s", error)
                    await asyncio.sleep(backoff_s)
                    backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)
                continue
            await self._check(self.client)
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
            if now < self._compatibility_due:
                await client.stat()
            else:
                self._compatibility.take(await client.engines())
                self._compatibility_due = now + COMPATIBILITY_S
        except KvRelayError as error:
            self.failed(client, error)
