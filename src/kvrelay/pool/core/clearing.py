"""Which neighbours have to go, too, when one object is evicted to make room for a larger one.

Evicting in policy order until a hole happens to be large enough empties the arena: the least useful objects are rarely
neighbours. Instead the policy names one victim, and the objects beside it follow it until the hole is large enough.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kvrelay.pool.core.blocks import room, rounded

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvrelay.pool.core.blocks import Blocks

MOST_BLOCKS = 1_024
"""A hole that would take the eviction of more objects than this is not made."""
REACH = 4
"""How many times the size asked for the hole may grow to either side."""
COST, HOT_COST = 2, 3
"""What a byte of an object costs whose turn it is, and of one that the order of eviction spares. With a higher price
these become walls between which holes are never gathered."""


class _Step(NamedTuple):
    """Growing the hole by one object and the free block behind it."""

    block: int
    cost: float
    edge: int
    """Where the hole ends then."""
    beyond: int
    """The next live block on that side; 0: the arena ends."""

    def per_byte(self, edge: int, missing: int) -> float:
        """What each byte gained costs if the hole ends at ``edge`` now; of use are only those ``missing``, if any."""
        gained = abs(self.edge - edge)
        return self.cost / (min(gained, missing) if missing > 0 else gained)


def window(blocks: Blocks, seed: int, size: int, cost: Callable[[int], float | None]) -> list[int] | None:
    """The live blocks to free, ``seed`` first, so that ``size`` bytes fit where it is; None: not possible here.

    The hole grows by the neighbour that costs less a byte, counting those bytes that are still missing. Once ``size``
    fits, it goes on growing only while that makes room for it once more at a lower cost each: scattered holes are
    gathered so.

    Args:
        blocks: The arena.
        seed: A live block, to be evicted in any case.
        size: What is to fit, in bytes.
        cost: What evicting a live block costs, more than 0; None: it must not be evicted.
    """
    need = rounded(size)
    spent = cost(seed)
    if spent is None:
        return None
    victims = [seed]
    left, start = _before(blocks, seed)
    right, end = _after(blocks, seed)
    low, high = start - REACH * need, end + REACH * need
    down = _step(blocks, left, cost, _before)
    up = _step(blocks, right, cost, _after)
    while len(victims) < MOST_BLOCKS:
        missing = need - room(start, end)
        if up and (not down or up.per_byte(end, missing) < down.per_byte(start, missing)):
            step, new_start, new_end = up, start, up.edge
        elif down:
            step, new_start, new_end = down, down.edge, end
        else:
            break
        fits = (need - missing) // need
        if fits and (spent + step.cost) * fits >= spent * (room(new_start, new_end) // need):
            break
        victims.append(step.block)
        spent += step.cost
        start, end = new_start, new_end
        if step is up:
            up = _step(blocks, step.beyond, cost, _after) if end < high else None
        else:
            down = _step(blocks, step.beyond, cost, _before) if start > low else None
    return victims if room(start, end) >= need else None


def _before(blocks: Blocks, block: int) -> tuple[int, int]:
    """The live block before ``block`` (0: none), and where the free bytes between them begin."""
    neighbour = blocks.before[block]
    if blocks.is_free(neighbour):
        return blocks.before[neighbour], blocks.offset[neighbour]
    return neighbour, blocks.offset[block]


def _after(blocks: Blocks, block: int) -> tuple[int, int]:
    """The live block after ``block`` (0: none), and where the free bytes between them end."""
    neighbour = blocks.after[block]
    end = blocks.offset[block] + blocks.length[block]
    if blocks.is_free(neighbour):
        return blocks.after[neighbour], end + blocks.length[neighbour]
    return neighbour, end


def _step(
    blocks: Blocks,
    block: int,
    cost: Callable[[int], float | None],
    side: Callable[[Blocks, int], tuple[int, int]],
) -> _Step | None:
    price = cost(block) if block else None
    if price is None:
        return None
    beyond, edge = side(blocks, block)
    return _Step(block, price, edge, beyond)
