"""Where objects are in the arena, and whom to evict so that there is room for another."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvrelay.pool.core.blocks import Blocks, room, rounded
from kvrelay.pool.core.clearing import COST, HOT_COST, window

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvrelay.pool.core.row import Holding, Row

MAX_TRIES = 32
"""Victims looked at for one object before the whole arena is."""


class Places:
    """The allocator, and which row each block is."""

    def __init__(self, arena_bytes: int) -> None:
        self.blocks = Blocks(arena_bytes)
        self._row: dict[int, Row] = {}
        self._hopeless: int | None = None
        """What was found not to fit even if everything that can be evicted were: until something more can be."""

    def take(self, row: Row) -> bool:
        """Give a row a place, if there is one that is large enough."""
        block = self.blocks.allocate(row.size)
        if block is None:
            return False
        row.block = block
        row.offset = self.blocks.offset[block]
        self._row[block] = row
        return True

    def give_back(self, row: Row) -> None:
        """Free a row's place."""
        del self._row[row.block]
        self.blocks.free(row.block)
        self._hopeless = None

    def loosened(self) -> None:
        """Note that something can be evicted that could not before."""
        self._hopeless = None

    def victims(self, size: int, holdings: Iterable[Holding]) -> list[Row] | None:
        """Whom to evict so that ``size`` bytes fit in one piece; None if nothing helps.

        Of the tenant that holds most, what its queue gives up next; when that is too small, its neighbours with it.
        """
        span = rounded(size)
        if span > self.blocks.size or (self._hopeless is not None and span >= self._hopeless):
            return None
        losing = [holding for holding in holdings if holding.evictable_bytes]
        if self.blocks.free_bytes + sum(holding.evictable_bytes for holding in losing) >= span:
            for _ in range(MAX_TRIES if losing else 0):
                victim = max(losing, key=lambda holding: holding.bytes).victim()
                if victim is None:
                    break
                clearing = window(self.blocks, victim.block, size, self._cost)
                if clearing is not None:
                    return [self._row[block] for block in clearing]
            anywhere = self._anywhere(span)
            if anywhere:
                return anywhere
        self._hopeless = span
        return None

    def _cost(self, block: int) -> float | None:
        row = self._row[block]
        if not row.evictable:
            return None
        return row.span * (HOT_COST if row.tenant.queue.spares(row) else COST)

    def _anywhere(self, span: int) -> list[Row] | None:
        """The first run of free and evictable bytes that is long enough."""
        run: list[Row] = []
        start = 0
        for block in self.blocks:
            end = self.blocks.offset[block] + self.blocks.length[block]
            row = self._row.get(block)
            if row is not None and not row.evictable:
                run, start = [], end
                continue
            if row is not None:
                run.append(row)
            if room(start, end) >= span:
                return run
        return None

    def check_integrity(self, rows: Iterable[Row]) -> None:
        """Raise AssertionError unless ``rows`` are the live blocks."""
        self.blocks.check_integrity()
        live = [block for block in self.blocks if self.blocks.is_live(block)]
        assert {row.block: row for row in rows} == self._row
        assert set(live) == set(self._row)
        for block, row in self._row.items():
            assert row.offset == self.blocks.offset[block]
            assert row.span == self.blocks.length[block] == rounded(row.size)
