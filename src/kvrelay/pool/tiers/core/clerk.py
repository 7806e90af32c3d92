"""What all decisions about tiers share: the catalog, the orders and their numbers, and what is being removed."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, TypeVar

from msgspec import Struct

from kvrelay.pool.tiers.core.orders import Name, Order, Purge, Remove

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvrelay.pool.core.catalog import Catalog

T = TypeVar("T")

RETRY_S = 5.0
"""Until a removal that failed is tried again."""
MAX_NAMES = 4_096
"""In one removal."""


class TierRules(Struct, frozen=True, kw_only=True):
    """How one tier is used. ``eager``: objects are copied to it when they are sealed, not when they are to be evicted.

    ``storing_bytes``: how much may be on its way down at once.
    """

    eager: bool = False
    storing_bytes: int = 64 << 20


class Clerk:
    """``removing``: of each tier, how many removals of a name are promised or under way; ``purging``: of a tenant."""

    def __init__(self, catalog: Catalog, tiers: Sequence[TierRules]) -> None:
        self.catalog = catalog
        self.tiers = tuple(tiers)
        self.removing: list[Counter[Name]] = [Counter() for _ in tiers]
        self.purging: list[Counter[int]] = [Counter() for _ in tiers]
        self._removals: dict[int, Remove | Purge] = {}
        self._again: list[tuple[float, Remove | Purge]] = []
        self._orders: list[Order] = []
        self._last = 0

    def number(self) -> int:
        """A number never given before."""
        self._last += 1
        return self._last

    def order(self, order: Order) -> None:
        """Have the shell do something."""
        self._orders.append(order)

    def take_orders(self) -> list[Order]:
        """What is to be done now."""
        orders, self._orders = self._orders, []
        return orders

    # --- removals ---

    def gone(self, tier: int, name: Name) -> bool:
        """Whether a tier must be taken not to have an object, whatever it says: it is being removed."""
        return name in self.removing[tier] or name.tenant in self.purging[tier]

    def promise(self, tier: int, name: Name) -> None:
        """An object will be removed: it counts as gone from now on."""
        self.removing[tier][name] += 1

    def remove(self, tier: int, names: Sequence[Name]) -> None:
        """Remove what was promised to be."""
        for first in range(0, len(names), MAX_NAMES):
            self._issue(Remove(self.number(), tier, list(names[first : first + MAX_NAMES])))

    def purge(self, tier: int, tenant: int) -> None:
        """Remove all of a tenant."""
        self.purging[tier][tenant] += 1
        self._issue(Purge(self.number(), tier, tenant))

    def _issue(self, order: Remove | Purge) -> None:
        self._removals[order.op] = order
        self.order(order)

    def removed(self, op: int, now: float, *, done: bool) -> None:
        """A removal was answered; one that failed is tried again, for what it names must not come back."""
        order = self._removals.pop(op)
        if not done:
            self._again.append((now + RETRY_S, order))
        elif isinstance(order, Purge):
            _decrease(self.purging[order.tier], order.tenant)
        else:
            for name in order.names:
                _decrease(self.removing[order.tier], name)

    def tick(self, now: float) -> None:
        """Try again what failed long enough ago."""
        while self._again and self._again[0][0] <= now:
            order = self._again.pop(0)[1]
            if isinstance(order, Purge):
                self._issue(Purge(self.number(), order.tier, order.tenant))
            else:
                self._issue(Remove(self.number(), order.tier, order.names))

    def next_deadline(self) -> float | None:
        """When `tick` has something to do."""
        return self._again[0][0] if self._again else None

    @property
    def removals(self) -> int:
        """Removals that are not done."""
        return len(self._removals) + len(self._again)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every removal that is promised or under way is counted."""
        pending = [*self._removals.values(), *(order for _, order in self._again)]
        for tier in range(len(self.tiers)):
            purges = Counter(o.tenant for o in pending if isinstance(o, Purge) and o.tier == tier)
            assert self.purging[tier] == purges
            names = Counter(n for o in pending if isinstance(o, Remove) and o.tier == tier for n in o.names)
            assert not names - self.removing[tier], "a removal under way is not counted"


def _decrease(counter: Counter[T], key: T) -> None:
    counter[key] -= 1
    if not counter[key]:
        del counter[key]
