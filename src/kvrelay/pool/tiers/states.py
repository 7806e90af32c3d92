"""What tiers tell of themselves: for the admin API and its metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvrelay.pool.admin.control import TierState

if TYPE_CHECKING:
    from kvrelay.pool.tiers.config import TierConfig
    from kvrelay.pool.tiers.guard import Guard


def tier_state(config: TierConfig, guard: Guard) -> TierState:
    """The state of one tier."""
    seconds = guard.figures()
    figures = {name: int(value) for name, value in seconds.items()}
    return TierState(
        name=config.name,
        kind=config.kind,
        up=not figures["paused"],
        objects=figures["objects"],
        used_bytes=figures["bytes"],
        capacity_bytes=config.size_bytes,
        hits=figures["hits"],
        misses=figures["misses"],
        read_bytes=figures["loaded_bytes"],
        written_bytes=figures["stored_bytes"],
        errors=figures["errors"],
        corrupt=figures["corrupt"],
        evictions=figures["evictions"],
        looks=figures["finds"],
        look_seconds=seconds["find_seconds"],
        reads=figures["loads"],
        read_seconds=seconds["load_seconds"],
        writes=figures["stores"],
        write_seconds=seconds["store_seconds"],
        throttled_seconds=seconds["throttled_seconds"],
    )
