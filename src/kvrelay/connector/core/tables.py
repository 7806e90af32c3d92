"""The engine's block tables: which tokens of which group lie in which blocks, and which lie in none.

The engine cuts the layers into sets that share a block table, each with its own block size; layers of one group
(`kvrelay.connector.core.geometry`) may be spread over several. A table of a group with a window has the null block
where a token is out of reach of all tokens still to be computed: nothing is read from there, and nothing written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Sequence


class Blocks(Struct, frozen=True):
    """A stretch of one request's block table: its block number ``first`` is ``ids[0]``."""

    ids: tuple[int, ...]
    first: int

    def between(self, start: int, end: int, block_tokens: int) -> tuple[int, ...]:
        """Blocks that hold tokens ``[start, end)``, all of which the stretch must cover."""
        return self.ids[start // block_tokens - self.first : -(-end // block_tokens) - self.first]


@dataclass(frozen=True, slots=True)
class Table:
    """One block table of the engine."""

    block_tokens: int
    group: int
    """Whose layers use it."""


@dataclass(frozen=True, slots=True)
class Tables:
    """All of an engine's block tables, in the engine's order."""

    tables: tuple[Table, ...]
    windows: tuple[int, ...]
    """Of the groups, in their order; 0: none."""
    null_block: int = -1
    """The block that stands for none in a table of a group with a window."""

    @classmethod
    def one(cls, block_tokens: int) -> Tables:
        """A single table, of a single group that reaches back over everything."""
        return cls((Table(block_tokens, 0),), (0,))

    @property
    def divisible(self) -> bool:
        """Whether part of a load is worth something: the engine can take a prefix of it, block by block.

        With a window, a shorter prefix would need blocks before it that the engine has not given; and with several
        tables the engine takes no reports by block.
        """
        return len(self.tables) == 1 and not self.windowed

    @property
    def windowed(self) -> bool:
        """Whether some group has a window."""
        return any(self.windows)

    def needed_from(self, group: int, end: int) -> int:
        """The first token of a group that must be there for the engine to go on at token ``end``.

        That is the first of a block: the engine offers whole blocks to other requests, wherever the window begins.
        """
        window = self.windows[group]
        if not window:
            return 0
        reached = max(0, end - window + 1)
        return min(reached // table.block_tokens * table.block_tokens for table in self.tables if table.group == group)

    def all_needed_from(self, end: int) -> tuple[int, ...]:
        """`needed_from` of every group."""
        return tuple(self.needed_from(group, end) for group in range(len(self.windows)))

    def held_from(self, tables: Sequence[Sequence[int]], end: int) -> tuple[int, ...]:
        """For each group the first token from which on up to ``end`` all are in blocks, by a request's block tables."""
        starts = [0] * len(self.windows)
        for table, ids in zip(self.tables, tables, strict=True):
            if self.windows[table.group]:
                blocks = -(-end // table.block_tokens)
                while blocks and ids[blocks - 1] != self.null_block:
                    blocks -= 1
                starts[table.group] = max(starts[table.group], blocks * table.block_tokens)
        return tuple(starts)

    def stretch(self, tables: Sequence[Sequence[int]], starts: Sequence[int], end: int) -> tuple[Blocks, ...]:
        """Of every table, the blocks that hold tokens from its group's start on, up to ``end``."""
        found = []
        for table, ids in zip(self.tables, tables, strict=True):
            first = starts[table.group] // table.block_tokens
            found.append(Blocks(tuple(ids[first : -(-end // table.block_tokens)]), first))
        return tuple(found)
