"""Each policy beside the plainest way to write it down."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Protocol

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eviction_bench.policies.adaptive import Adaptive
from eviction_bench.policies.arc import Arc
from eviction_bench.policies.lru import Fifo, Lru
from eviction_bench.policies.s3fifo import S3Fifo
from eviction_bench.policies.sieve import Sieve
from eviction_bench.policies.tinylfu import TinyLfu

if TYPE_CHECKING:
    from collections.abc import Callable

    from eviction_bench.policies import Policy

ALL: dict[str, Callable[[], Policy]] = {
    "fifo": Fifo,
    "lru": Lru,
    "sieve": Sieve,
    "sieve with a counter": lambda: Sieve(most=3, spared=1),
    "s3-fifo": S3Fifo,
    "arc": Arc,
    "w-tinylfu": TinyLfu,
    "adaptive": Adaptive,
}
STEPS = st.lists(st.tuples(st.sampled_from("aaaard"), st.integers(0, 12)), max_size=120)


@pytest.mark.parametrize("make", ALL.values(), ids=ALL)
@settings(max_examples=40, deadline=None)
@given(steps=STEPS, capacity=st.integers(1, 6))
def test_a_policy_knows_what_is_in_and_evicts_only_that(
    make: Callable[[], Policy], steps: list[tuple[str, int]], capacity: int
) -> None:
    policy = make()
    held: set[int] = set()
    for step, item in steps:
        if step == "r":
            if item in held:
                policy.remove(item)
                held.remove(item)
        elif step == "d":
            if held:
                held.remove(policy.evict())
        elif item in held:
            policy.hit(item)
        else:
            if len(held) == capacity:
                held.remove(policy.evict())
            policy.add(item)
            held.add(item)
        assert len(policy) == len(held)
    assert {policy.evict() for _ in range(len(held))} == held


class Reference(Protocol):
    """A whole cache in one call: ask for ``item``, store it if it is missing; whether it was there."""

    def ask(self, item: int) -> bool: ...


class NaiveLru:
    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.last: dict[int, int] = {}
        self.now = 0

    def ask(self, item: int) -> bool:
        self.now += 1
        there = item in self.last
        if not there and len(self.last) == self.capacity:
            del self.last[min(self.last, key=lambda other: self.last[other])]
        self.last[item] = self.now
        return there


class NaiveSieve:
    """After the pseudo-code of the paper: the queue as a list, its head (the newest) first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.queue: list[list[int]] = []  # [item, visited]
        self.hand: list[int] | None = None

    def ask(self, item: int) -> bool:
        for entry in self.queue:
            if entry[0] == item:
                entry[1] = 1
                return True
        if len(self.queue) == self.capacity:
            at = len(self.queue) - 1 if self.hand is None else self.queue.index(self.hand)
            while self.queue[at][1]:
                self.queue[at][1] = 0
                at = at - 1 if at else len(self.queue) - 1
            self.hand = self.queue[at - 1] if at else None
            del self.queue[at]
        self.queue.insert(0, [item, 0])
        return False


class NaiveS3Fifo:
    """After the pseudo-code of the paper, with a small queue of a third."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.small: list[int] = []
        self.main: list[int] = []
        self.ghost: list[int] = []
        self.freq: Counter[int] = Counter()

    def ask(self, item: int) -> bool:
        if item in self.small + self.main:
            self.freq[item] = min(3, self.freq[item] + 1)
            return True
        if len(self.small + self.main) == self.capacity:
            self.evict()
        if item in self.ghost:
            self.ghost.remove(item)
            self.main.append(item)
        else:
            self.small.append(item)
        self.freq[item] = 0
        return False

    def evict(self) -> None:
        share = self.capacity / 3
        while self.small and (len(self.small) >= share or not self.main):
            item = self.small.pop(0)
            if self.freq[item] > 1:
                self.freq[item] = 0
                self.main.append(item)
            else:
                self.ghost.append(item)
                del self.ghost[: max(0, len(self.ghost) - self.capacity)]
                return
        while True:
            item = self.main.pop(0)
            if not self.freq[item]:
                return
            self.freq[item] -= 1
            self.main.append(item)


REFERENCES: dict[str, tuple[Callable[[], Policy], Callable[[int], Reference]]] = {
    "lru": (Lru, NaiveLru),
    "sieve": (Sieve, NaiveSieve),
    "s3-fifo": (lambda: S3Fifo(small=1 / 3), NaiveS3Fifo),
}


@pytest.mark.parametrize(("make", "reference"), REFERENCES.values(), ids=REFERENCES)
@settings(max_examples=60, deadline=None)
@given(asked=st.lists(st.integers(0, 9), max_size=150), capacity=st.integers(1, 6))
def test_a_policy_finds_what_its_reference_finds(
    make: Callable[[], Policy], reference: Callable[[int], Reference], asked: list[int], capacity: int
) -> None:
    policy, naive = make(), reference(capacity)
    held: set[int] = set()
    for item in asked:
        there = item in held
        if there:
            policy.hit(item)
        else:
            if len(held) == capacity:
                held.remove(policy.evict())
            policy.add(item)
            held.add(item)
        assert naive.ask(item) == there


def test_sieve_spares_what_was_asked_for_once_and_clears_its_mark() -> None:
    policy = Sieve()
    for item in (1, 2, 3):
        policy.add(item)
    policy.hit(1)
    assert policy.evict() == 2
    assert policy.evict() == 3
    assert policy.evict() == 1


def test_arc_gives_recency_more_room_when_it_let_go_of_something_too_early() -> None:
    policy = Arc()
    for item in (1, 2):
        policy.add(item)
    policy.hit(1)
    policy.add(3)
    assert policy.evict() == 2  # the oldest of those seen once
    policy.add(2)  # its ghost is there: two more places for those seen once, and 2 is frequent
    assert policy.evict() == 1
    assert len(policy) == 2


def test_w_tinylfu_does_not_admit_a_newcomer_that_is_asked_for_less() -> None:
    policy = TinyLfu(window=0.4)
    for item in (1, 2, 3, 4, 5):
        policy.add(item)
        for _ in range(3 if item < 4 else 0):
            policy.hit(item)
    first = policy.evict()  # 1 to 3 leave the window for probation: the last to do so competes
    assert first in (1, 2, 3)
    policy.add(6)
    assert policy.evict() == 4
