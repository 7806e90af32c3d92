"""The queue at work: requests wait for its decisions, and a timer tells it the time."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kvrelay.router.core.admission.queue import AdmissionQueue, Decision, Entrant, Rejected

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvrelay.router.core.admission.queue import Limits
    from kvrelay.router.metrics import RouterMetrics

TICK_S = 0.25
"""How often engines that came back and waits that are over are looked for, while somebody waits."""


class Slots:
    """Gives slots to requests, and takes them back."""

    def __init__(self, limits: Limits, count: Callable[[], float], metrics: RouterMetrics) -> None:
        """``count``: how many there are to be now."""
        self._queue = AdmissionQueue(limits)
        self._count = count
        self._metrics = metrics
        self._waiting: dict[Entrant, asyncio.Future[Decision]] = {}
        self._timer: asyncio.TimerHandle | None = None

    async def take(self, flow: str, *, priority: int, cost: float, weight: float) -> Entrant | Rejected:
        """Wait for a slot, to be given back with `give_back`, or to be turned away. Cancelled, it leaves nothing."""
        loop = asyncio.get_running_loop()
        came = loop.time()
        self._decide(self._queue.resize(self._count(), came))
        entrant, decisions = self._queue.enter(flow, came, priority=priority, cost=cost, weight=weight)
        own = self._decide(decisions, entrant)
        if own is None:
            own = await self._wait(entrant)
        if isinstance(own, Rejected):
            return own
        self._metrics.wait_seconds.observe(loop.time() - came)
        return entrant

    def give_back(self, entrant: Entrant) -> None:
        """The request is over."""
        now = asyncio.get_running_loop().time()
        self._decide(self._queue.resize(self._count(), now))
        self._decide(self._queue.leave(entrant, now))

    async def _wait(self, entrant: Entrant) -> Decision:
        loop = asyncio.get_running_loop()
        told: asyncio.Future[Decision] = loop.create_future()
        self._waiting[entrant] = told
        self._watch_the_clock()
        try:
            await asyncio.wait({told})  # unlike the future itself it can be cancelled and still be decided about
        except asyncio.CancelledError:
            if not (told.done() and isinstance(told.result(), Rejected)):
                self._waiting.pop(entrant, None)
                self.give_back(entrant)
            raise
        return told.result()

    def _decide(self, decisions: Iterable[Decision], newcomer: Entrant | None = None) -> Decision | None:
        """Tell those who wait; what is decided about ``newcomer``, who does not wait yet."""
        own = None
        for decision in decisions:
            if decision.entrant is newcomer:
                own = decision
            else:
                told = self._waiting.pop(decision.entrant, None)
                if told is not None:  # else it is being cancelled, and gives back what it got
                    told.set_result(decision)
        self._metrics.waiting.set(self._queue.queued)
        self._metrics.admitted.set(self._queue.inside)
        return own

    def _watch_the_clock(self) -> None:
        if self._timer is None and self._waiting:
            self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def _tick(self) -> None:
        self._timer = None
        now = asyncio.get_running_loop().time()
        self._decide(self._queue.resize(self._count(), now))
        self._decide(self._queue.expire(now))
        self._watch_the_clock()
