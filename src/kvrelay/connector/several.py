"""A decode engine with several pools, each a prefill engine's own: one side for every pool, and who has which request.

A request's KV is in the pool of the engine that prefilled it, which the router names. Nothing is shared between the
sides but the engine's steps: connections, lookups, circuits, leases, threads and deadlines are each side's own, so that
a pool that is away or slow costs the requests of its prefill engine, and no others. Where nobody prefilled, the first
pool that is there has the request: for its proof, and for what it generates.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec import Struct

from kvrelay.connector.core.rank import Results
from kvrelay.connector.scheduler_side import read_hand_over

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from kvrelay.connector.core.orders import RankReport, StepOrders
    from kvrelay.connector.scheduler_side import SchedulerSide
    from kvrelay.connector.worker_side import WorkerSide


class SeveralOrders(Struct, frozen=True):
    """One step's orders of each side, in their order."""

    parts: tuple[StepOrders, ...]


class SeveralReports(Struct):
    """What happened on one rank, or, joined, on several, of each side."""

    parts: tuple[RankReport, ...]

    @property
    def tells(self) -> bool:
        """Whether anything happened."""
        return any(part.tells for part in self.parts)

    def join(self, other: SeveralReports) -> SeveralReports:
        """Both reports as one."""
        pairs = zip(self.parts, other.parts, strict=True)
        return SeveralReports(tuple(one.join(another) for one, another in pairs))


class SeveralSchedulers:
    """The scheduler's sides, called as if they were one."""

    def __init__(self, sides: Mapping[str, SchedulerSide]) -> None:
        """``sides``: by the names the router has for the prefill engines."""
        self._by_name = dict(sides)
        self.sides = tuple(sides.values())
        self._of: dict[str, SchedulerSide] = {}
        for side in self.sides:
            side.share_engine([other for other in self.sides if other is not side])

    def start(self) -> None:
        """Connect all; raises `ConfigError` if a pool refuses us."""
        for side in self.sides:
            side.start()

    def on_new_request(
        self,
        request_id: str,
        token_ids: Sequence[int] | None,
        prompt_tokens: int,
        *,
        params: dict[str, Any] | None,
        **more: Any,
    ) -> None:
        """Give it to the side of whoever prefilled it."""
        over = read_hand_over(params)
        side = self._by_name.get(over.prefill) if over is not None else None
        if side is None:
            side = next((one for one in self.sides if one.connected), self.sides[0])
        self._of[request_id] = side
        side.on_new_request(request_id, token_ids, prompt_tokens, params=params, **more)

    def num_matched(self, request_id: str, local: int) -> tuple[int | None, bool]:
        """As its side says; nothing yet while another side is about to load what it would share."""
        side = self._of.get(request_id)
        if any(one.must_wait(local) for one in self.sides if one is not side):
            return None, False
        return (0, False) if side is None else side.num_matched(request_id, local)

    def allocated(self, request_id: str, block_ids: Sequence[Sequence[int]], external: int) -> None:
        """The engine gave the request blocks."""
        if (side := self._of.get(request_id)) is not None:
            side.allocated(request_id, block_ids, external)

    def step(
        self,
        scheduled: Iterable[tuple[str, int, int]],
        preempted: Iterable[str],
        block_ids: Callable[[str], Sequence[Sequence[int]]],
    ) -> SeveralOrders:
        """One step's orders."""
        of: dict[int, list[tuple[str, int, int]]] = {id(side): [] for side in self.sides}
        for one in scheduled:
            if (side := self._of.get(one[0])) is not None:
                of[id(side)].append(one)
        lost = tuple(preempted)
        foreign = any(side.loads_elsewhere(of[id(side)]) for side in self.sides)
        return SeveralOrders(tuple(side.step(of[id(side)], lost, block_ids, foreign=foreign) for side in self.sides))

    def update(self, report: SeveralReports | None, sent: Iterable[str], received: Iterable[str]) -> None:
        """What the workers report: names concern the side that knows them."""
        ended, loaded = tuple(sent), tuple(received)
        for at, side in enumerate(self.sides):
            side.update(None if report is None else report.parts[at], ended, loaded)

    def finished(self, request_id: str, computed: int = 0, block_ids: Sequence[Sequence[int]] = ()) -> bool:
        """Whether the engine must keep the blocks."""
        side = self._of.pop(request_id, None)
        return side is not None and side.finished(request_id, computed, block_ids)

    def reset(self) -> bool:
        """The engine drops its caches."""
        idle = [side.reset() for side in self.sides]
        return all(idle)

    def close(self) -> None:
        """Disconnect."""
        for side in self.sides:
            side.close()


class SeveralWorkers:
    """One rank's sides, called as if they were one. They share the rank's blocks."""

    def __init__(self, sides: Sequence[WorkerSide]) -> None:
        self._sides = tuple(sides)

    def before_step(self, orders: SeveralOrders) -> None:
        """Be done with blocks that change hands."""
        for side, part in zip(self._sides, orders.parts, strict=True):
            side.before_step(part)

    def begin_step(self, orders: SeveralOrders) -> None:
        """Take the step's orders on."""
        for side, part in zip(self._sides, orders.parts, strict=True):
            side.begin_step(part)

    def layer_computed(self, layer: int) -> None:
        """The step's tokens are in this layer's blocks."""
        for side in self._sides:
            side.layer_computed(layer)

    def end_step(self) -> None:
        """The forward pass is over."""
        for side in self._sides:
            side.end_step()

    def take_results(self) -> Results:
        """What ended since the last step."""
        each = [side.take_results() for side in self._sides]
        report: Any = SeveralReports(tuple(results.report for results in each))
        return Results(
            finished_sending=set().union(*(results.finished_sending for results in each)),
            finished_recving=set().union(*(results.finished_recving for results in each)),
            invalid_block_ids=set().union(*(results.invalid_block_ids for results in each)),
            failed_recving=set().union(*(results.failed_recving for results in each)),
            report=report,
        )

    def close(self) -> None:
        """Stop the threads."""
        for side in self._sides:
            side.close()
