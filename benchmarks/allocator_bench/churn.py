"""Scenarios: how much of the arena can hold live objects, and what an operation costs."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from allocator_bench.mixes import MIXES
from kvrelay.bench.report import median
from kvrelay.pool.core.blocks import Blocks
from kvrelay.pool.core.clearing import COST, HOT_COST, window
from kvrelay.pool.core.order import Order, Standing

if TYPE_CHECKING:
    from collections.abc import Callable

    from allocator_bench.candidates import Allocator

TRIES = 32
HOT_SHARE = 0.2


class _Thing:
    __slots__ = ("at", "name", "newer", "older", "size", "standing", "visited")

    def __init__(self, name: int, size: int, at: int) -> None:
        self.name = name
        self.size = size
        self.at = at
        self.visited = False
        self.standing = Standing.FRESH
        self.older: _Thing | None = None
        self.newer: _Thing | None = None


@dataclass
class Phase:
    """One phase of a churn. Shares are of the arena: bytes of live objects, as they were asked for.

    Only steps after the first eviction of the churn count; ``steady`` is the mean over all but the phase's first fifth.
    """

    mix: str
    steady: float
    least: float
    operations: int
    evicted: float
    """Bytes evicted for each byte stored."""
    seconds: float


class Pool:
    """Live objects over an allocator, evicted to make room: at random or in the pool's order; alone, or by windows."""

    def __init__(self, allocator: Allocator, rng: random.Random, *, ordered: bool, windows: bool) -> None:
        if windows and not isinstance(allocator, Blocks):
            raise ValueError("only blocks know their neighbours")
        self.allocator = allocator
        self.rng = rng
        self.ordered = ordered
        self.windows = windows
        self.live_bytes = 0
        self.evicted_bytes = 0
        self._order: Order[_Thing] = Order()
        self._at: dict[int, _Thing] = {}
        self._drawn: list[_Thing] = []  # the objects, and some that are gone
        self._hot: list[_Thing] = []
        self._stored = 0

    def store(self, size: int, *, evict: bool = True) -> bool:
        """Store an object, whatever must go for it; False if it does not fit."""
        at = self.allocator.allocate(size)
        while at is None:
            if not evict or not self._at:
                return False
            self._make_room(size)
            at = self.allocator.allocate(size)
        self._stored += 1
        thing = self._at[at] = _Thing(self._stored, size, at)
        self.live_bytes += size
        self._order.add(thing, thing.name)
        thing.visited = True  # whoever takes it over reads it
        if not self.ordered:
            self._drawn.append(thing)
        if self.rng.random() < HOT_SHARE:
            self._hot.append(thing)
        return True

    def ask(self) -> None:
        """Ask for one of the hot fifth of all objects."""
        while self._hot:
            at = self.rng.randrange(len(self._hot))
            thing = self._hot[at]
            if self._at.get(thing.at) is thing:
                thing.visited = True
                return
            self._hot[at] = self._hot[-1]
            self._hot.pop()

    def drop(self, thing: _Thing) -> None:
        """Delete an object."""
        del self._at[thing.at]
        self.allocator.free(thing.at)
        self.live_bytes -= thing.size
        self._order.evict(thing, thing.name)

    def drop_share(self, share: float) -> None:
        """Delete that share of all objects, chosen at random."""
        things = sorted(self._at.values(), key=lambda thing: thing.name)
        for thing in self.rng.sample(things, round(share * len(things))):
            self.drop(thing)

    def _victim(self) -> _Thing:
        if self.ordered:
            victim = self._order.victim(lambda _: True)
            assert victim is not None
            return victim
        while True:
            at = self.rng.randrange(len(self._drawn))
            self._drawn[at], self._drawn[-1] = self._drawn[-1], self._drawn[at]
            if self._at.get(self._drawn[-1].at) is self._drawn[-1]:
                return self._drawn[-1]
            self._drawn.pop()

    def _cost(self, block: int) -> float:
        thing = self._at[block]
        return thing.size * (HOT_COST if self.ordered and self._order.spares(thing) else COST)

    def _make_room(self, size: int) -> None:
        going = [self._victim().at]
        if self.windows and isinstance(self.allocator, Blocks):
            for _ in range(TRIES):
                found = window(self.allocator, going[0], size, self._cost)
                if found is not None:
                    going = found
                    break
                going = [self._victim().at]
        for at in going:
            self.evicted_bytes += self._at[at].size
            self.drop(self._at[at])


@dataclass
class Refill:
    """Live shares of the arena."""

    full: float
    """When the first object of the first sizes did not fit."""
    again: float
    """When half of them were freed at random and the first object of the second sizes did not fit."""
    settled: float
    """When objects were evicted from then on, and half of the arena's bytes of the second sizes were stored in all."""
    lost: float
    """What was evicted for that."""


def refill(pool: Pool, arena: int, before: str, after: str) -> Refill:
    """Fill, free half of the objects at random, refill with other sizes."""
    while pool.store(MIXES[before](pool.rng), evict=False):
        pass
    full = pool.live_bytes
    pool.drop_share(0.5)
    halved = pool.live_bytes
    size = MIXES[after](pool.rng)
    while pool.store(size, evict=False):
        size = MIXES[after](pool.rng)
    again = pool.live_bytes
    while pool.live_bytes + pool.evicted_bytes - halved < arena / 2:
        pool.store(MIXES[after](pool.rng))
    return Refill(full / arena, again / arena, pool.live_bytes / arena, pool.evicted_bytes / arena)


def churn(pool: Pool, arena: int, mixes: list[str], turnover: float) -> list[Phase]:
    """Store objects of one mix after another, ``turnover`` times the arena's bytes of each, and ask for hot ones."""
    phases = []
    for mix in mixes:
        draw, rng = MIXES[mix], pool.rng
        stored = operations = 0
        steady, counted, least = 0.0, 0, 1.0
        evicted_before = pool.evicted_bytes
        begin = time.process_time()
        while stored < turnover * arena:
            size = draw(rng)
            if not pool.store(size):
                raise AssertionError(f"{size} bytes do not fit into an empty arena of {arena}")
            pool.ask()
            stored += size
            operations += 1
            if pool.evicted_bytes:
                share = pool.live_bytes / arena
                least = min(least, share)
                if stored > turnover * arena / 5:
                    steady += share
                    counted += 1
        seconds = time.process_time() - begin
        evicted = (pool.evicted_bytes - evicted_before) / stored
        phases.append(Phase(mix, steady / counted, least, operations, evicted, seconds))
    return phases


def cost(make: Callable[[int], Allocator], live: int, pairs: int, seed: int) -> tuple[float, float]:
    """Seconds an allocation and seconds a freeing take, with ``live`` objects of mixed sizes and a tenth as many holes.

    Processor time, the median of batches: other processes on this machine count for little.
    """
    rng = random.Random(seed)
    draw = MIXES["uniform"]
    sizes = [draw(rng) for _ in range(live)]
    allocator = make(sum(sizes) * 5 // 4)
    names = [name for size in sizes if (name := allocator.allocate(size)) is not None]
    for _ in range(live // 10):
        at = rng.randrange(len(names))
        names[at], names[-1] = names[-1], names[at]
        allocator.free(names.pop())
    batch = min(1_000, live // 20)
    taking, giving = [], []
    for _ in range(pairs // batch):
        going = []
        for _ in range(batch):
            at = rng.randrange(len(names))
            names[at], names[-1] = names[-1], names[at]
            going.append(names.pop())
        new = [draw(rng) for _ in range(batch)]
        begin = time.process_time()
        for name in going:
            allocator.free(name)
        middle = time.process_time()
        found = [allocator.allocate(size) for size in new]
        taking.append((time.process_time() - middle) / batch)
        giving.append((middle - begin) / batch)
        names += [name for name in found if name is not None]
    return median(taking), median(giving)
