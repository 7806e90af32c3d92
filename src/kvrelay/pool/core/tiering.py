"""What lies below the arena, for the pool's core: a `Lower` that decides, and has a shell do the work.

The shell takes orders (`take_orders`) after every call into the pool's core, carries each out in another thread, and
reports with `found`, `loaded`, `stored`, `removed` and `evicted`, on the core's thread, with the time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvrelay.pool.tiers.core.clerk import Clerk, TierRules
from kvrelay.pool.tiers.core.demoting import Demoting
from kvrelay.pool.tiers.core.orders import Name, Order
from kvrelay.pool.tiers.core.seeking import Limits, Seek, Seeker, Seeking

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvrelay.pool.core.catalog import Catalog
    from kvrelay.pool.tiers.core.orders import Form
    from kvrelay.pool.tiers.core.tier import Loaded, Outcome

__all__ = ["TierRules", "Tiering"]

LOADING_SHARE = 4
"""One part in so many of the arena may be on its way up at once, and no more than `MAX_LOADING_BYTES`."""
STORING_SHARE = 4
"""The same, on its way down to one tier."""
MAX_LOADING_BYTES = 1 << 30
PAGE = 4_096
"""Rows looked at for a page of a tenant's objects."""


class _Nobody:
    """A seeker that wants the objects, and not to be told."""

    def looked(self, _found: int, _now: float) -> None:
        """So be it."""

    def settled(self, _now: float) -> None:
        """So be it."""


class Tiering:
    """Tiers below ``catalog``, fastest first; at least one."""

    demotes = True

    def __init__(self, catalog: Catalog, tiers: Sequence[TierRules]) -> None:
        share = max(1, catalog.arena_bytes // STORING_SHARE)
        bounded = [TierRules(eager=t.eager, storing_bytes=min(t.storing_bytes, share)) for t in tiers]
        self._catalog = catalog
        self._clerk = Clerk(catalog, bounded)
        self._demoting = Demoting(catalog, self._clerk)
        limits = Limits(min(MAX_LOADING_BYTES, max(1, catalog.arena_bytes // LOADING_SHARE)))
        self._seeking = Seeking(catalog, self._clerk, limits)

    # --- the pool's core's side ---

    def seek(
        self, tenant: int, keys: Sequence[bytes], seeker: Seeker | None, now: float, *, bring: bool, prefix: bool = True
    ) -> Seek | None:
        """Look for ``keys`` below and, with ``bring``, bring them up; None: all is known, ``seeker`` has been told."""
        return self._seeking.seek(tenant, keys, seeker or _Nobody(), now, bring=bring, prefix=prefix)

    def cancel(self, seek: Seek) -> None:
        """Nobody waits for this any more."""
        self._seeking.cancel(seek)

    def offer(self, rows: bytes, _now: float) -> None:
        """These objects will be evicted soon: copy them down."""
        self._demoting.offer(memoryview(rows).cast("I"))

    def sealed(self, rows: Sequence[int]) -> None:
        """These objects are whole: copy them to the tiers that want them at once."""
        self._demoting.sealed(rows)

    def forget(self, tenant: int, keys: Sequence[bytes], now: float) -> None:
        """These objects were deleted, or found damaged: nobody shall be given them from below."""
        names = list(dict.fromkeys(Name(tenant, key) for key in keys))
        for name in names:
            self._seeking.forget(name, now)
        for tier in range(len(self._clerk.tiers)):
            at_once = [name for name in names if not self._demoting.doom(tier, name)]
            for name in at_once:
                self._clerk.promise(tier, name)
            self._clerk.remove(tier, at_once)

    def purge(self, tenant: int, now: float) -> None:
        """All of a tenant's objects were deleted, but for those in use."""
        self._seeking.forget_tenant(tenant, now)
        in_use = self._names(tenant)
        for tier in range(len(self._clerk.tiers)):
            self._demoting.doom_tenant(tier, tenant)
            self._demoting.evicted(tier, in_use)
            self._clerk.purge(tier, tenant)

    def _names(self, tenant: int) -> list[Name]:
        """What is left of a tenant's objects here: those in use."""
        names: list[Name] = []
        cursor = 0
        while True:
            rows, cursor = self._catalog.page(tenant, cursor, PAGE, b"")
            names += [Name(tenant, self._catalog.key(row)) for row in memoryview(rows).cast("I")]
            if not cursor:
                return names

    def tick(self, now: float) -> None:
        """Let time pass."""
        self._clerk.tick(now)

    def next_deadline(self) -> float | None:
        """When `tick` has something to do."""
        return self._clerk.next_deadline()

    def protected(self) -> Iterator[int]:
        """Rows that are pinned here, once for each pin."""
        yield from self._demoting.protected()
        yield from self._seeking.protected()

    # --- the shell's side ---

    def keep_all(self) -> None:
        """Copy down all that is in the arena and not below: the arena will be gone. `keeping`: that is not done yet."""
        self._demoting.keep_all()

    @property
    def keeping(self) -> bool:
        """Whether objects are to be copied down, or on their way."""
        return self._demoting.keeping

    def take_orders(self) -> list[Order]:
        """What is to be done now."""
        return self._clerk.take_orders()

    def found(self, op: int, forms: Sequence[Form | None], now: float) -> None:
        """A `Find` was answered: what each object is like; None for what is not there."""
        self._seeking.found(op, forms, now)

    def loaded(self, op: int, results: Sequence[Loaded], now: float) -> None:
        """A `Load` was answered."""
        self._seeking.loaded(op, results, now)

    def stored(self, op: int, outcomes: Sequence[Outcome], _now: float) -> None:
        """A `Store` was answered; `Outcome.CORRUPT`: the bytes in the arena do not match their checksums."""
        self._demoting.stored(op, outcomes)

    def removed(self, op: int, now: float, *, done: bool) -> None:
        """A `Remove` or `Purge` was answered."""
        self._clerk.removed(op, now, done=done)

    def evicted(self, tier: int, names: Sequence[Name]) -> None:
        """A tier has dropped these objects."""
        self._demoting.evicted(tier, names)

    def take_published(self) -> list[int]:
        """Rows that were filled and sealed: tell whoever waits for them."""
        rows, self._seeking.published = self._seeking.published, []
        return rows

    def take_abandoned(self) -> list[int]:
        """Rows that will not be filled: give them up."""
        rows, self._seeking.abandoned = self._seeking.abandoned, []
        return rows

    def take_damaged(self) -> list[int]:
        """Handles of sealed objects found not to match their checksums: forget them."""
        handles, self._demoting.damaged = self._demoting.damaged, []
        return handles

    # --- figures ---

    def stats(self) -> dict[str, int]:
        """Gauges: ``demoting_bytes``, ``promoting_bytes``, ``sought`` keys, ``removals``; counter: ``no_room``."""
        return {
            "demoting_bytes": self._demoting.under_way,
            "promoting_bytes": self._seeking.loading_bytes,
            "sought": self._seeking.quests,
            "removals": self._clerk.removals,
            "no_room": self._seeking.no_room,
        }

    def check_integrity(self) -> None:
        """Raise AssertionError unless bytes under way, pins and removals are accounted for."""
        self._clerk.check_integrity()
        self._demoting.check_integrity()
        self._seeking.check_integrity()
