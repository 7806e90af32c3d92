"""The open connections of a server, and the wait for their end."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvrelay.router.http.server import Connection


class Registry:
    """Connections that are open, or whose last request is still being let go of."""

    def __init__(self) -> None:
        """None yet."""
        self._connections: set[Connection] = set()
        self._empty = asyncio.Event()
        self._empty.set()

    def __len__(self) -> int:
        return len(self._connections)

    def __iter__(self) -> Iterator[Connection]:
        return iter(list(self._connections))

    def add(self, connection: Connection) -> None:
        """A client has come."""
        self._connections.add(connection)
        self._empty.clear()

    def discard(self, connection: Connection) -> None:
        """A client is gone, and so is everything done for it. May be repeated."""
        self._connections.discard(connection)
        if not self._connections:
            self._empty.set()

    async def emptied(self, *, timeout_s: float) -> bool:
        """Wait for the last to go. Whether it did within ``timeout_s``."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()
        except TimeoutError:
            return False
        return True
