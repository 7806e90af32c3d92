"""One tenant's many questions to a slow tier do not make another's objects absent."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvrelay.pool.core.catalog import new_catalog
from kvrelay.pool.core.tiering import Tiering, TierRules
from kvrelay.pool.tiers.core import seeking
from kvrelay.pool.tiers.core.orders import Find, Form

if TYPE_CHECKING:
    import pytest


class Told:
    """A seeker that remembers how many of its keys there are."""

    found: int | None = None

    def looked(self, found: int, _now: float) -> None:
        self.found = found

    def settled(self, _now: float) -> None:
        pass


def test_keys_beyond_a_tenants_share_are_absent_and_another_tenants_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seeking, "MAX_QUESTS", 3)
    tiers = Tiering(new_catalog(1 << 20), [TierRules()])
    greedy, modest, again = Told(), Told(), Told()
    tiers.seek(0, [bytes([number]) for number in range(10)], greedy, 0.0, bring=False)
    tiers.seek(1, [b"a", b"b"], modest, 0.0, bring=False)
    tiers.check_integrity()
    for order in tiers.take_orders():
        assert isinstance(order, Find)
        tiers.found(order.op, [Form(1, 1, 1, float("inf"))] * len(order.names), 0.0)
    assert (greedy.found, modest.found) == (3, 2)
    tiers.check_integrity()
    tiers.seek(0, [b"x", b"y", b"z"], again, 0.0, bring=False)
    (order,) = tiers.take_orders()
    assert isinstance(order, Find)
    assert len(order.names) == 3, "what has been answered leaves its place to others"
