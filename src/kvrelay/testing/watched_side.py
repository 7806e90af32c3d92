"""The scheduler's side of a connector that counts how its loads went: whether a random life came across all of it."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from kvrelay.connector.core.orders import LoadKind
from kvrelay.connector.scheduler_side import SchedulerSide

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvrelay.connector.core.orders import LoadOrder, LoadOutcome, RankReport, StepOrders


class _Load(Struct):
    """A load under way."""

    order: LoadOrder
    left: int
    """Ranks that have not reported it."""
    valid_end: int


class WatchedSide(SchedulerSide):
    """A scheduler's side that remembers the loads under way.

    ``seen`` counts loads by their kind (``now``, ``later``, ``early``), their end (``whole``, ``part``, ``nothing``)
    and both (``early whole``), those ``cancelled``, and those of what was ``staged`` before.
    """

    def __init__(self, *args: Any, ranks: int, **more: Any) -> None:
        self._ranks = ranks
        self._under_way: dict[str, _Load] = {}
        self.seen: Counter[str] = Counter()
        super().__init__(*args, ranks=ranks, **more)

    def step(self, *args: Any, **more: Any) -> StepOrders:
        """One step's orders."""
        orders = super().step(*args, **more)
        for load in orders.loads:
            self._under_way[load.request_id] = _Load(load, self._ranks, load.end)
        self.seen["staged"] += sum(load.staged > 0 for load in orders.loads)
        self.seen["cancelled"] += len(orders.cancelled)
        return orders

    def update(self, report: RankReport | None, sent: Iterable[str], received: Iterable[str]) -> None:
        """What the workers report."""
        for request_id, outcome in (report.loads if report is not None else {}).items():
            self._note(request_id, outcome)
        super().update(report, sent, received)

    def _note(self, request_id: str, outcome: LoadOutcome) -> None:
        load = self._under_way.get(request_id)
        if load is None:
            return
        load.left -= outcome.ranks
        load.valid_end = min(load.valid_end, outcome.valid_end)
        if load.left > 0:
            return
        del self._under_way[request_id]
        order = load.order
        kind = {LoadKind.NOW: "now", LoadKind.LATER: "later", LoadKind.EARLY: "early"}[order.kind]
        end = "whole" if load.valid_end >= order.end else "part" if load.valid_end > order.start else "nothing"
        self.seen.update((kind, end, f"{kind} {end}"))
