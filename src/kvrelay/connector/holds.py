"""Blocks held by reference while their saves read them.

The engine takes a request's blocks back as soon as its windows have passed them, in the middle of a prefill and without
a word, and gives them to whoever comes next. What a save still reads is therefore held here until every rank has ended
it. Blocks of groups without a window need no hold: the engine keeps them until the request ends or is preempted, and
says so.

Held blocks are missing to the engine, so there is a limit; what would go beyond it is not saved.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvrelay.connector.core.orders import SaveOrder
    from kvrelay.connector.core.tables import Tables

SHARE = 4
"""At most one in so many of the engine's blocks is held, unless a single order needs more."""
PATIENCE_S = 0.25
"""How long the engine waits for held blocks before it preempts a request to get others."""


class _Hold(Struct):
    blocks: list[int]
    ranks: int
    """Still saving."""
    since: float


class Holds:
    """The holds of one engine. Owned by its scheduler thread."""

    def __init__(
        self,
        tables: Tables,
        *,
        ranks: int,
        clock: Callable[[], float],
        limited: Callable[[int], None] = lambda _: None,
    ) -> None:
        """``limited``: told of how many tokens groups with a window are not saved, since too much is held."""
        self._limited = limited
        self._tables = tables
        self._ranks = ranks
        self._clock = clock
        self._holds: dict[int, _Hold] = {}
        self._held = 0
        self._limit = 0
        self._touch: Callable[[Sequence[int]], None]
        self._free: Callable[[Sequence[int]], None]

    def bind(
        self, *, blocks: int, touch: Callable[[Sequence[int]], None], free: Callable[[Sequence[int]], None]
    ) -> None:
        """Take the engine's ``blocks`` blocks; ``touch`` and ``free`` add and remove a reference to each."""
        self._limit = blocks // SHARE
        self._touch = touch
        self._free = free

    def __len__(self) -> int:
        return self._held

    def hold(self, order: SaveOrder) -> SaveOrder:
        """Hold what an order reads of groups with a window; the order, without those groups if that is too much."""
        windows, null = self._tables.windows, self._tables.null_block
        blocks = [
            block
            for table, stretch in zip(self._tables.tables, order.tables, strict=True)
            if windows[table.group]
            for block in stretch.ids
            if block != null
        ]
        if not blocks:
            return order
        if self._held and self._held + len(blocks) > self._limit:
            end = order.chunks[-1].end
            self._limited(sum(chunk.tokens for chunk in order.chunks))
            starts = (end if window else start for window, start in zip(windows, order.starts, strict=True))
            return replace(order, starts=tuple(starts))
        self._touch(blocks)
        self._holds[order.number] = _Hold(blocks, self._ranks, self._clock())
        self._held += len(blocks)
        return order

    def ended(self, orders: Mapping[int, int]) -> None:
        """Ranks ended save orders: number to how many ranks."""
        for number, ranks in orders.items():
            hold = self._holds.get(number)
            if hold is None:
                continue
            hold.ranks -= ranks
            if hold.ranks <= 0:
                del self._holds[number]
                self._held -= len(hold.blocks)
                self._free(hold.blocks)

    @property
    def worth_waiting(self) -> bool:
        """Whether blocks will be free in a moment."""
        oldest = next(iter(self._holds.values()), None)
        return oldest is not None and self._clock() - oldest.since < PATIENCE_S
