"""A pool as the router sees it: tickets with mailboxes, made of dictionaries."""

from __future__ import annotations

import asyncio
from itertools import takewhile
from typing import TYPE_CHECKING

import msgspec

from kvrelay.client.core.names import PrefixCount
from kvrelay.errors import NotFoundError, PoolUnavailableError
from kvrelay.types import Lost, Proof, Reason

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from kvrelay.wire.messages import Engine

PROMPT_TOKENS = 100


class FakePool:
    """A pool connection whose tickets can be looked at."""

    def __init__(self) -> None:
        """Nobody has asked for anything yet."""
        self.open: dict[str, float] = {}
        """Deadlines of open tickets."""
        self.ended: list[str] = []
        self.sealed: list[str] = []
        self.notes: dict[str, list[bytes]] = {}
        self.closed = False
        self.held: set[bytes] = set()
        """Keys of objects that are whole."""
        self.registered: list[Engine] = []
        self.listed = asyncio.Event()
        """Somebody has asked who is registered."""
        self.num_counted = 0
        """Questions for how much it holds."""
        self.num_asked = 0
        """Tickets asked for."""
        self.hold: asyncio.Event | None = None
        """Keeps tickets from being opened until it is set."""
        self.changed = asyncio.Event()
        self._posted = asyncio.Event()
        self._taken = asyncio.Event()

    async def connect(self) -> FakePool:
        """Itself."""
        self._check()
        return self

    async def open_ticket(self, ticket: str, deadline_s: float) -> None:
        """As the real one."""
        self._check()
        self.num_asked += 1
        if self.hold is not None:
            self.changed.set()
            await self.hold.wait()
        self.open[ticket] = deadline_s

    async def seal_ticket(self, ticket: str) -> None:
        """As the real one."""
        self._check()
        self.sealed.append(ticket)
        self.changed.set()
        if ticket not in self.open:
            raise NotFoundError(ticket)

    async def end_ticket(self, ticket: str) -> None:
        """As the real one."""
        self._check()
        self.ended.append(ticket)
        self.changed.set()
        if self.open.pop(ticket, None) is None:
            raise NotFoundError(ticket)

    async def collect(self, ticket: str, timeout_s: float) -> list[bytes]:
        """As the real one."""
        self._check()
        try:
            async with asyncio.timeout(timeout_s):
                while not self.notes.get(ticket):
                    self._posted.clear()
                    await self._posted.wait()
                    self._check()
        except TimeoutError:
            return []
        self._taken.set()
        return self.notes.pop(ticket)

    def post(self, note: Proof | Lost) -> None:
        """As a connector does."""
        self.notes.setdefault(note.handover, []).append(msgspec.json.encode(note))
        self._posted.set()

    async def taken(self, note: Proof | Lost) -> None:
        """Post a note and wait until the router has done what it does about it."""
        self.post(note)
        async with asyncio.timeout(10):
            while self.notes:
                self._taken.clear()
                await self._taken.wait()
        for _ in range(20):
            await asyncio.sleep(0)

    async def count_prefix(self, keys: Sequence[bytes]) -> PrefixCount:
        """As the real one, of `held` keys."""
        self._check()
        self.num_counted += 1
        found = sum(1 for _ in takewhile(self.held.__contains__, keys))
        return PrefixCount(found, found, found)

    async def stat(self) -> dict[str, int]:
        """As the real one."""
        self._check()
        return {}

    async def engines(self) -> list[Engine]:
        """As the real one."""
        self._check()
        self.listed.set()
        return self.registered

    async def close(self) -> None:
        """As the real one."""
        self.closed = True

    def die(self) -> None:
        """As a killed one does: calls under way fail, and all others after them."""
        self.closed = True
        self._posted.set()

    def _check(self) -> None:
        if self.closed:
            raise PoolUnavailableError("closed")

    async def all_ended(self) -> None:
        """Wait until no ticket is open any more."""
        async with asyncio.timeout(10):
            while self.open or not self.ended:
                self.changed.clear()
                await self.changed.wait()


def a_proof(told: dict[str, Any], *, recomputed: int = 1, earlier: int = 0, reason: Reason = Reason.MISS) -> Proof:
    """What a decode side proves that was ``told`` this in ``kv_transfer_params["kvrelay"]``."""
    return Proof(
        handover=told["handover"],
        request_id="r",
        worker=told["worker"],
        engine="e",
        prompt_tokens=PROMPT_TOKENS,
        handed_over_tokens=PROMPT_TOKENS - earlier - recomputed,
        earlier_tokens=earlier,
        local_tokens=0,
        recomputed_tokens=recomputed,
        bytes=4_000,
        wait_ms=2.5,
        transfer_ms=1.25,
        reason=reason.value if recomputed > 1 else "",
        reasons={reason.value: recomputed} if recomputed > 1 else {},
        attempt=told["attempt"],
    )


def a_loss(told: dict[str, Any], *, reason: Reason = Reason.PARTIAL, missing: int = 36) -> Lost:
    """What a decode side tells that was ``told`` this and cannot have it."""
    return Lost(
        lost=reason.value,
        handover=told["handover"],
        attempt=told["attempt"],
        request_id="r",
        worker=told["worker"],
        prompt_tokens=PROMPT_TOKENS,
        missing_tokens=missing,
    )
