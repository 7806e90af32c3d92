"""Which loads are synchronous, and what must be known of those under way. Pure.

A synchronous load is done before the forward pass of the step that claims it, so it costs no step of its own, but holds
up everybody in that step: a budget of bytes bounds that, a larger one where nobody else is there. The engine names the
blocks it loads into in its prefix cache before they hold anything, which has two consequences. Another request must not
take them for computed in the same step. And when the load fails, their names must be taken away: if the request ended
before it has computed them again, the next one that begins alike would take whatever they hold for its KV.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvrelay.connector.core.orders import LoadOrder, LoadOutcome

REST_CLAIMS = 32
"""After a failed one so many loads are asynchronous: what made it fail would hold up every step."""


class Ended(Struct, frozen=True):
    """How a synchronous load ended, on all ranks."""

    computed: int
    """Tokens the engine counts as computed: up to the first block that lacks one."""
    untrue: tuple[int, ...]
    """The request's blocks from there on: what they are called in the prefix cache is not what they hold."""
    took_s: float
    """How long the step waited for it. When the report comes, the forward pass is over too."""


class SyncLoads:
    """The synchronous loads of one engine."""

    def __init__(self, limit_bytes: int, block_tokens: int, idle_bytes: int = 0) -> None:
        """``limit_bytes``: of all in one step; 0: none. ``idle_bytes``: while the engine has nothing else to do."""
        self._limit = limit_bytes
        self._idle = max(limit_bytes, idle_bytes) if limit_bytes else 0
        self._claimed = 0
        self._block = block_tokens
        self._rest = 0
        self._under_way: dict[str, tuple[LoadOrder, tuple[int, ...]]] = {}
        self._starts: list[int] = []

    def fits(self, size_bytes: int, *, idle: bool = False) -> bool:
        """Whether a load of so many bytes may still be done in this step. ``idle``: nobody else waits for it."""
        return not self._rest and self._claimed + size_bytes <= (self._idle if idle else self._limit)

    def overlaps(self, local: int) -> bool:
        """Whether the first ``local`` tokens of a request may lie in blocks this step is only about to load."""
        return any(local > start for start in self._starts)

    def claim(self, order: LoadOrder, table: Sequence[int], size_bytes: int) -> None:
        """A synchronous load was ordered; ``table``: all blocks of the request."""
        self._claimed += size_bytes
        self._starts.append(order.start)
        self._under_way[order.request_id] = (order, tuple(table))

    def passed_by(self) -> None:
        """A load was ordered asynchronously."""
        self._rest = max(0, self._rest - 1)

    def new_step(self) -> None:
        """The step's orders are given out."""
        self._claimed = 0
        self._starts.clear()

    def ended(self, request_id: str, outcome: LoadOutcome) -> Ended | None:
        """What a reported load comes to; ``None`` if it was not synchronous."""
        known = self._under_way.pop(request_id, None)
        if known is None:
            return None
        order, table = known
        if outcome.valid_end >= order.end:
            return Ended(order.end, (), outcome.took_s)
        self._rest = REST_CLAIMS
        block = max(outcome.valid_end, order.start) // self._block
        return Ended(block * self._block, table[block:], outcome.took_s)
