"""What time does to objects nobody asked about: expiry, and eviction above the high watermark, in small steps."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    from kvrelay.pool.core.catalog import Catalog
    from kvrelay.pool.core.lower import Lower, Seeking
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

    def with_tiers(self) -> Rules:
        """What counts where there are lower tiers."""
        if self.high < 1.0:
            return self
        return Rules(high=TIERED_HIGH, low=min(self.low, TIERED_LOW), ttl_s=self.ttl_s)


class _Mark:
    """Where eviction at the watermarks stands: of the whole arena, or of one tenant's share."""

    def __init__(self, tenant: int | None) -> None:
        self.tenant = tenant
        self.trimming = False
        self.trim_at = 0.0


class Upkeep:
    """Expiry and watermarks."""

    def __init__(self, catalog: Catalog, rules: Rules, seeking: Seeking, quotas: Quotas) -> None:
        self._catalog = catalog
        self.rules = rules
        self._seeking = seeking
        self.quotas = quotas
        self.expired_objects = 0
        self.evicted_at_watermark = 0
        self.evicted_clean = self.evicted_clean_for_quota = 0
        """For room, and for a tenant's quota, by `make_room`."""
        self._marks = [_Mark(None)]

    def expiry(self, now: float, ttl_s: float = 0.0) -> float:
        """When an object sealed ``now`` expires."""
        ttl_s = ttl_s or self.rules.ttl_s
        return now + ttl_s if ttl_s else math.inf

    def _above(self, mark: _Mark, share: float) -> int:
        """Bytes in use above a share of the arena, or of what a tenant may have."""
        if mark.tenant is not None:
            return self.quotas.above(mark.tenant, share)
        catalog = self._catalog
        return catalog.arena_bytes - catalog.free_bytes - int(share * catalog.arena_bytes)

    def _pressed(self, mark: _Mark) -> bool:
        return mark.trimming or self._above(mark, self.rules.high) > 0

    def tick(self, now: float) -> None:
        """Let time pass."""
        if self._seeking.lower is not None:
            self._seeking.lower.tick(now)
        due = self._catalog.next_expiry()
        if due is not None and due <= now:
            self.expired_objects += self._catalog.expire(now, EXPIRE_OBJECTS)[0]
        for mark in self._marks:
            if mark.trim_at <= now and self._pressed(mark):
                self._trim(mark, now)

    def _trim(self, mark: _Mark, now: float) -> None:
        excess = self._above(mark, self.rules.low)
        objects = 0
        if excess > 0:
            lower = self._seeking.lower
            demotes = lower is not None and lower.demotes
            if lower is not None and demotes:
                lower.offer(self._catalog.victims(self._most_offered(mark, excess, lower), mark.tenant), now)
            objects, _ = self._catalog.trim(min(excess, TRIM_BYTES), mark.tenant, clean=demotes)
            self.evicted_at_watermark += objects
        mark.trimming = self._above(mark, self.rules.low) > 0
        mark.trim_at = now + (STEP_S if objects else STUCK_S) if mark.trimming else now

    def _most_offered(self, mark: _Mark, excess: int, lower: Lower) -> int:
        """How many objects to have copied. Of a tenant's what is to go only: it is in use while it is copied."""
        if mark.tenant is None:
            return OFFER_OBJECTS
        objects, held = self._catalog.usage(mark.tenant)
        going = sum(self._catalog.info(row).tenant == mark.tenant for row in lower.protected())
        return min(OFFER_OBJECTS, max(0, -(-excess * objects // held) - going))

    def tiered(self) -> None:
        """From now on there are lower tiers."""
        self.rules = self.rules.with_tiers()
        lower = self._seeking.lower
        if lower is not None and lower.demotes:
            self._marks += [_Mark(tenant) for tenant in range(len(self.quotas))]

    def sealed(self, tenant: int, now: float) -> None:
        """A tenant's objects have become whole: with lower tiers, those can be copied down that could not before."""
        if self._seeking.lower is not None:
            for mark in self._marks:
                if mark.tenant in {None, tenant}:
                    mark.trim_at = min(mark.trim_at, now + STEP_S)

    def copied(self) -> None:
        """Something has been copied down: more may be evicted than when it was last tried."""
        for mark in self._marks:
            mark.trim_at = 0.0

    def make_room(self, tenant: int, size_bytes: int, objects: int) -> None:
        """With lower tiers, evict first what is not lost with it, before room for so much is taken from anybody.

        What is over the tenant's quota takes the place of the tenant's own objects.
        """
        lower = self._seeking.lower
        if lower is None or not lower.demotes:
            return
        over = self.quotas.over(tenant, size_bytes, objects)
        if over > 0:
            self.evicted_clean_for_quota += self._catalog.trim(over, tenant, clean=True)[0]
        if (missing := size_bytes - over - self._catalog.free_bytes) > 0:
            self.evicted_clean += self._catalog.trim(missing, clean=True)[0]

    def next_deadline(self) -> float | None:
        """When `tick` has something to do, at the earliest."""
        due = [self._catalog.next_expiry(), *(mark.trim_at for mark in self._marks if self._pressed(mark))]
        if self._seeking.lower is not None:
            due.append(self._seeking.lower.next_deadline())
        return min((time for time in due if time is not None), default=None)
