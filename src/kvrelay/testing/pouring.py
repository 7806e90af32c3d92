"""An engine that sends as much as is taken: for tests of what becomes of it when nobody takes any more."""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvrelay.testing.fake_engine import Exchange

STUCK_S = 0.2
"""Nothing was taken for so long: the engine is held back. On a slow machine it may be found so too early, at less."""
WAIT_S = 20.0


class Pour:
    """A behaviour of a fake engine. ``sent_bytes`` tells how much of the answer it has got rid of."""

    def __init__(self, piece: bytes, count: int | None = None, *, last: bytes | None = b"") -> None:
        """``count``: how many pieces; None: more and more until it is stuck.

        ``last`` ends a stream of events; with None the answer is a plain body of a known length.
        """
        self._piece = piece
        self._count = count
        self._last = last
        self._stuck = asyncio.Event()
        self.sent_bytes = 0

    async def __call__(self, exchange: Exchange) -> None:
        """Pour."""
        if self._last is None:
            exchange.head(200, "application/octet-stream", length=len(self._piece) * (self._count or 0))
        else:
            exchange.head(200, "text/event-stream")
        for _ in itertools.count() if self._count is None else range(self._count):
            (exchange.send if self._last is None else exchange.chunk)(self._piece)
            self.sent_bytes += len(self._piece)
            try:
                await asyncio.wait_for(exchange.writable.wait(), STUCK_S)
            except TimeoutError:
                self._stuck.set()
                await exchange.writable.wait()
        if self._last is not None:
            exchange.chunk(self._last)
            exchange.end()

    async def held_back(self) -> int:
        """Wait until it is stuck; the bytes it has sent by then."""
        async with asyncio.timeout(WAIT_S):
            await self._stuck.wait()
        return self.sent_bytes
