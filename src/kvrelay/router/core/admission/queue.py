"""Admission: a bounded number of requests at once, and a bounded queue before them that is fair between clients.

A request belongs to a *flow*: one API key's requests, or everybody's where there are no keys. Free slots go to flows by
start-time fair queueing (Goyal, Vin, Cheng 1996): each flow has a virtual time that its requests move on by their cost
over its weight, and the flow whose time is earliest is next. A flow that was idle begins at the time of those being
served, so that it neither saves up nor is punished. Within a flow the lowest priority number is first, then whoever
came first.

Requests with a priority below zero are *express*: they go before all others, by the same rules among themselves. But
while others wait, at most `EXPRESS_RUN` of them in a row, so that nobody waits for ever.

When the queue is full, room is made at the expense of the flow that takes most of it for its weight: that flow's last
request is turned away rather than the newcomer, if the newcomer's flow would not then be the larger one.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import deque
from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Iterator

EXPRESS_RUN = 4
HELD_WEIGHT = 0.1
"""Of the newest duration in the mean of how long slots are held."""
FIRST_GUESS_S = 1.0
"""How long a slot is held, while none has been given back yet."""
MAX_RETRY_S = 120
MAX_NOTES = 1024
"""Of flows that are ahead, until those that no longer are get cleared away."""


class Limits(Struct, frozen=True, kw_only=True):
    """Bounds. ``slots`` and ``wait_s`` may be infinite."""

    slots: float = math.inf
    """Requests at once."""
    queue: int = 100
    """Requests waiting for a slot."""
    wait_s: float = 60.0
    """How long each waits at most."""


class Entrant(Struct, eq=False):
    """A request at the entrance. Made by `AdmissionQueue.enter`; its fields are for reading."""

    flow: str
    priority: int
    cost: float
    order: int
    expires_at: float
    let_in_at: float | None = None
    """When it got its slot; None while it waits."""

    @property
    def express(self) -> bool:
        """Whether it goes before others."""
        return self.priority < 0


class Admitted(Struct, frozen=True):
    """It has a slot, until `AdmissionQueue.leave`."""

    entrant: Entrant


class Rejected(Struct, frozen=True):
    """It has no slot, and waits no longer. ``reason``: ``queue_full`` or ``queue_timeout``."""

    entrant: Entrant
    reason: str
    retry_after_s: int


Decision = Admitted | Rejected


class _Flow:
    """What waits of one flow, in one lane."""

    __slots__ = ("at", "name", "waiting", "weight")

    def __init__(self, name: str, weight: float, at: float) -> None:
        self.name = name
        self.weight = weight
        self.at = at
        """Virtual time at which its first request begins."""
        self.waiting: deque[Entrant] = deque()
        """By priority, then order."""

    def add(self, entrant: Entrant) -> None:
        waiting = self.waiting
        if not waiting or waiting[-1].priority <= entrant.priority:
            waiting.append(entrant)
        else:
            insort(waiting, entrant, key=lambda other: (other.priority, other.order))


class _Lane:
    """Flows in fair order."""

    def __init__(self) -> None:
        self._flows: dict[str, _Flow] = {}
        self._now = 0.0
        """Virtual time: when the request served last began."""
        self._ends: dict[str, float] = {}
        """Of flows with nothing waiting: where they are ahead of the virtual time."""
        self.size = 0

    def __iter__(self) -> Iterator[Entrant]:
        for flow in self._flows.values():
            yield from flow.waiting

    def last_of(self, flow: str) -> Entrant | None:
        """Who of a flow is served last, if anybody of it waits."""
        found = self._flows.get(flow)
        return None if found is None else found.waiting[-1]

    def add(self, entrant: Entrant, weight: float) -> None:
        flow = self._flows.get(entrant.flow)
        if flow is None:
            at = max(self._now, self._ends.pop(entrant.flow, 0.0))
            flow = self._flows[entrant.flow] = _Flow(entrant.flow, weight, at)
        flow.weight = weight
        flow.add(entrant)
        self.size += 1

    def take(self) -> Entrant:
        """The next, of a lane that is not empty."""
        flow = min(self._flows.values(), key=lambda flow: (flow.at, flow.waiting[0].order))
        entrant = flow.waiting.popleft()
        self.size -= 1
        self._charge(flow, entrant)
        return entrant

    def pass_by(self, entrant: Entrant, weight: float) -> None:
        """A request that found a free slot: it counts like one that waited."""
        at = max(self._now, self._ends.get(entrant.flow, 0.0))
        self._now = max(self._now, at)
        self._ends[entrant.flow] = at + entrant.cost / weight
        self._forget()

    def remove(self, entrant: Entrant) -> None:
        flow = self._flows[entrant.flow]
        if flow.waiting[-1] is entrant:
            flow.waiting.pop()
        else:
            flow.waiting.remove(entrant)
        self.size -= 1
        if not flow.waiting:
            del self._flows[flow.name]
            self._ends[flow.name] = flow.at

    def _charge(self, flow: _Flow, entrant: Entrant) -> None:
        self._now = max(self._now, flow.at)
        flow.at += entrant.cost / flow.weight
        if not flow.waiting:
            del self._flows[flow.name]
            self._ends[flow.name] = flow.at
            self._forget()

    def _forget(self) -> None:
        """Flows the virtual time has caught up with need no note."""
        if len(self._ends) > MAX_NOTES:
            self._ends = {name: end for name, end in self._ends.items() if end > self._now}


class AdmissionQueue:
    """Slots and the queue before them. Every method that can free or give a slot returns what is decided by it."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.slots = limits.slots
        """As many as there are now."""
        self._inside = 0
        self._order = 0
        self._express, self._ordinary = _Lane(), _Lane()
        self._weights: dict[str, float] = {}
        self._queued: dict[str, int] = {}
        """By flow, of both lanes."""
        self._run = 0
        """Express requests let in since an ordinary one, while one waited."""
        self._held_s = 0.0

    @property
    def inside(self) -> int:
        """Requests that have a slot."""
        return self._inside

    @property
    def queued(self) -> int:
        """Requests that wait for one."""
        return self._express.size + self._ordinary.size

    @property
    def next_expiry(self) -> float:
        """When `expire` is to be called next; infinite if nobody waits."""
        return min(
            (entrant.expires_at for lane in (self._express, self._ordinary) for entrant in lane), default=math.inf
        )

    def enter(
        self, flow: str, now: float, *, priority: int = 0, cost: float = 1.0, weight: float = 1.0
    ) -> tuple[Entrant, list[Decision]]:
        """A request comes. If no decision is about it, it waits. ``cost`` and ``weight`` are above 0."""
        self._order += 1
        entrant = Entrant(flow, priority, cost, self._order, now + self.limits.wait_s)
        lane = self._lane(entrant)
        if self._inside < self.slots and not self.queued:
            lane.pass_by(entrant, weight)
            return entrant, [self._let_in(entrant, now)]
        decisions: list[Decision] = []
        if self.queued >= self.limits.queue:
            last = self._over_represented(entrant, weight)
            if last is None:
                return entrant, [Rejected(entrant, "queue_full", self.retry_after_s())]
            self._take_out(last)
            decisions.append(Rejected(last, "queue_full", self.retry_after_s()))
        self._weights[flow] = weight
        self._queued[flow] = self._queued.get(flow, 0) + 1
        lane.add(entrant, weight)
        return entrant, decisions

    def leave(self, entrant: Entrant, now: float) -> list[Decision]:
        """A request is over, or its client is gone while it waited. Not for those that were turned away."""
        if entrant.let_in_at is None:
            self._take_out(entrant)
            return []
        self._inside -= 1
        held_s = now - entrant.let_in_at
        self._held_s = held_s if not self._held_s else self._held_s + HELD_WEIGHT * (held_s - self._held_s)
        return self._fill(now)

    def expire(self, now: float) -> list[Decision]:
        """Turn away whoever has waited too long."""
        late = [entrant for lane in (self._express, self._ordinary) for entrant in lane if entrant.expires_at <= now]
        for entrant in late:
            self._take_out(entrant)
        return [Rejected(entrant, "queue_timeout", self.retry_after_s()) for entrant in late]

    def resize(self, slots: float, now: float) -> list[Decision]:
        """There are more slots now, or fewer: whoever is inside stays."""
        self.slots = slots
        return self._fill(now)

    def retry_after_s(self) -> int:
        """In how many seconds those who are here now should be through: at least 1."""
        held_s = self._held_s or FIRST_GUESS_S
        if not self.slots:
            return MAX_RETRY_S
        return max(1, min(MAX_RETRY_S, math.ceil(held_s * (self.queued + 1) / self.slots)))

    def check_integrity(self) -> None:
        """For tests: every number agrees with every other."""
        assert self._inside >= 0
        counted: dict[str, int] = {}
        for entrant in [*self._express, *self._ordinary]:
            assert entrant.let_in_at is None
            counted[entrant.flow] = counted.get(entrant.flow, 0) + 1
        assert counted == self._queued
        assert sum(counted.values()) == self.queued <= self.limits.queue
        assert set(self._weights) == set(counted)
        assert not self.queued or self._inside >= self.slots

    def _lane(self, entrant: Entrant) -> _Lane:
        return self._express if entrant.express else self._ordinary

    def _let_in(self, entrant: Entrant, now: float) -> Admitted:
        entrant.let_in_at = now
        self._inside += 1
        return Admitted(entrant)

    def _fill(self, now: float) -> list[Decision]:
        decisions: list[Decision] = []
        while self._inside < self.slots and self.queued:
            decisions.append(self._let_in(self._next(), now))
        return decisions

    def _next(self) -> Entrant:
        express, ordinary = self._express.size, self._ordinary.size
        if express and not (ordinary and self._run >= EXPRESS_RUN):
            self._run = self._run + 1 if ordinary else 0
            entrant = self._express.take()
        else:
            self._run = 0
            entrant = self._ordinary.take()
        self._count_out(entrant)
        return entrant

    def _take_out(self, entrant: Entrant) -> None:
        self._lane(entrant).remove(entrant)
        self._count_out(entrant)

    def _count_out(self, entrant: Entrant) -> None:
        self._queued[entrant.flow] -= 1
        if not self._queued[entrant.flow]:
            del self._queued[entrant.flow], self._weights[entrant.flow]

    def _over_represented(self, newcomer: Entrant, weight: float) -> Entrant | None:
        """Who goes in the newcomer's place: the last of the largest flow, or of its own if that is less urgent."""
        if not self._queued:
            return None
        largest = max(self._queued, key=lambda flow: self._queued[flow] / self._weights[flow])
        own = (self._queued.get(newcomer.flow, 0) + 1) / weight
        if largest != newcomer.flow and self._queued[largest] / self._weights[largest] > own:
            return self._last_of(largest)
        last = self._last_of(newcomer.flow)
        return last if last is not None and last.priority > newcomer.priority else None

    def _last_of(self, flow: str) -> Entrant | None:
        return self._ordinary.last_of(flow) or self._express.last_of(flow)
