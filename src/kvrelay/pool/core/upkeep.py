"""What time does to objects nobody asked about: expiry, and eviction above the high watermark, in small steps."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    from kvrelay.pool.core.catalog import Catalog
    from kvrelay.pool.core.lower import Seeking
    from kvrelay.pool.core.quotas import Quotas

EXPIRE_OBJECTS = 2_048
"""Objects forgotten in one step."""
TRIM_BYTES = 64 << 20
"""Bytes evicted in one step."""
OFFER_OBJECTS = 256
"""Objects offered to lower tiers in one step."""
STEP_S = 0.005
"""Between two steps, others are served."""
STUCK_S = 0.5
"""When nothing could be evicted, it is tried again after this long."""
TIERED_HIGH, TIERED_LOW = 0.9, 0.8
"""Watermarks of a pool with lower tiers that was given none: what is to go down must be copied while there is room."""


class Rules(Struct, frozen=True, kw_only=True):
    """How a pool treats its objects. ``high``, ``low``: shares of the arena. ``ttl_s``: 0 for ever."""

    high: float = 1.0
    """In use above this, objects are evicted ..."""
    low: float = 1.0
    """... until no more than this is."""
    ttl_s: float = 0.0
    """How long an object lives whose writer does not say."""


class Upkeep:
    """Expiry and watermarks."""

    def __init__(self, catalog: Catalog, rules: Rules, seeking: Seeking, quotas: Quotas) -> None:
        self._catalog = catalog
        self.rules = rules
        self._seeking = seeking
        self.quotas = quotas
        self.expired_objects = 0
        self.evicted_at_watermark = 0
        self.evicted_clean = 0
        """For room, by `make_room`."""
        self._trimming = False
        self._trim_at = 0.0

    def expiry(self, now: float, ttl_s: float = 0.0) -> float:
        """When an object sealed ``now`` expires."""
        ttl_s = ttl_s or self.rules.ttl_s
        return now + ttl_s if ttl_s else math.inf

    def _above(self, share: float) -> int:
        """Bytes in use above a share of the arena."""
        catalog = self._catalog
        return catalog.arena_bytes - catalog.free_bytes - int(share * catalog.arena_bytes)

    def tick(self, now: float) -> None:
        """Let time pass."""
        if self._seeking.lower is not None:
            self._seeking.lower.tick(now)
        due = self._catalog.next_expiry()
        if due is not None and due <= now:
            self.expired_objects += self._catalog.expire(now, EXPIRE_OBJECTS)[0]
        if (self._trimming or self._above(self.rules.high) > 0) and self._trim_at <= now:
            self._trim(now)

    def _trim(self, now: float) -> None:
        excess = self._above(self.rules.low)
        objects = 0
        if excess > 0:
            lower = self._seeking.lower
            demotes = lower is not None and lower.demotes
            if lower is not None and demotes:
                lower.offer(self._catalog.victims(OFFER_OBJECTS), now)
            objects, _ = self._catalog.trim(min(excess, TRIM_BYTES), clean=demotes)
            self.evicted_at_watermark += objects
        self._trimming = self._above(self.rules.low) > 0
        self._trim_at = now + (STEP_S if objects else STUCK_S) if self._trimming else now

    def tiered(self) -> None:
        """From now on there are lower tiers."""
        if self.rules.high >= 1.0:
            low = min(self.rules.low, TIERED_LOW)
            self.rules = Rules(high=TIERED_HIGH, low=low, ttl_s=self.rules.ttl_s)

    def copied(self) -> None:
        """Something has been copied down: more may be evicted than when it was last tried."""
        self._trim_at = 0.0

    def make_room(self, tenant: int, size_bytes: int) -> None:
        """With lower tiers, evict first what is not lost with it, before room for so much is taken from anybody.

        What is over the tenant's quota is not made room for: it takes the place of the tenant's own objects.
        """
        size_bytes = self.quotas.left_bytes(tenant, size_bytes)
        lower = self._seeking.lower
        if lower is not None and lower.demotes and (missing := size_bytes - self._catalog.free_bytes) > 0:
            self.evicted_clean += self._catalog.trim(missing, clean=True)[0]

    def next_deadline(self) -> float | None:
        """When `tick` has something to do, at the earliest."""
        due = [self._catalog.next_expiry()]
        if self._trimming or self._above(self.rules.high) > 0:
            due.append(self._trim_at)
        if self._seeking.lower is not None:
            due.append(self._seeking.lower.next_deadline())
        return min((time for time in due if time is not None), default=None)
