from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvrelay.pool.core.order import FRESH_SHARE, LEAST_SHARE, Order, Standing


class Thing:
    def __init__(self, name: int) -> None:
        self.name = name
        self.visited = False
        self.standing = Standing.FRESH
        self.pinned = False
        self.older: Thing | None = None
        self.newer: Thing | None = None


@dataclass
class Naive:
    """The same policy, written down with lists from its description."""

    fresh: list[Thing] = field(default_factory=list)
    trial: list[Thing] = field(default_factory=list)
    proven: list[Thing] = field(default_factory=list)
    ghosts: list[int] = field(default_factory=list)
    proven_ghosts: list[int] = field(default_factory=list)
    share: float = 0.5
    skip: bool = False

    def everything(self) -> list[Thing]:
        return self.fresh + self.trial + self.proven

    def add(self, thing: Thing) -> None:
        thing.visited = False
        steps, number = 0.0, len(self.everything())
        if thing.name in self.ghosts:
            steps = max(1, len(self.proven_ghosts) / len(self.ghosts))
            self.ghosts.remove(thing.name)
        elif thing.name in self.proven_ghosts:
            steps = -max(1, len(self.ghosts) / len(self.proven_ghosts))
            self.proven_ghosts.remove(thing.name)
        (self.proven if steps else self.fresh).append(thing)
        if steps:
            self.share = min(1 - LEAST_SHARE, max(LEAST_SHARE, self.share + steps / (number + 1)))
        while len(self.fresh) > FRESH_SHARE * len(self.everything()):
            self.trial.append(self.fresh.pop(0))
            self.trial[-1].visited = False

    def take(self, thing: Thing) -> bool:
        for queue in (self.fresh, self.trial, self.proven):
            if thing in queue:
                queue.remove(thing)
                return queue is self.proven
        raise AssertionError("not queued")

    def evict(self, thing: Thing) -> None:
        proven = self.take(thing)
        number = len(self.everything())
        if proven:
            self.proven_ghosts.append(thing.name)
            while len(self.proven_ghosts) > number * (1 - self.share):
                self.proven_ghosts.pop(0)
        else:
            self.ghosts.append(thing.name)
            del self.ghosts[: max(0, len(self.ghosts) - number)]

    def victim(self, skip: bool) -> Thing | None:
        """``skip``: queues are left alone when all of them is in use."""
        self.skip = skip
        if not self.proven or len(self.fresh + self.trial) >= self.share * len(self.everything()):
            found = self.of_trial() or self.of_proven()
        else:
            found = self.of_proven() or self.of_trial() or self.of_proven()
        return found or self.of_fresh()

    def of_trial(self) -> Thing | None:
        if self.skip and all(thing.pinned for thing in self.trial):
            return None
        for thing in list(self.trial):
            self.trial.remove(thing)
            if thing.visited:
                thing.visited = False
                self.proven.append(thing)
            else:
                self.trial.append(thing)
                if not thing.pinned:
                    return thing
        return None

    def of_proven(self) -> Thing | None:
        if all(thing.pinned for thing in self.proven):
            return None
        while True:
            thing = self.proven.pop(0)
            self.proven.append(thing)
            if not thing.pinned:
                if not thing.visited:
                    return thing
                thing.visited = False

    def of_fresh(self) -> Thing | None:
        if all(thing.pinned for thing in self.fresh):
            return None
        for thing in list(self.fresh):
            self.fresh.remove(thing)
            self.fresh.append(thing)
            if not thing.pinned:
                return thing
        return None


class OrderMachine(RuleBasedStateMachine):
    """Whatever comes, goes, is asked for and pinned: the order names the victims that its description names."""

    def __init__(self) -> None:
        super().__init__()
        self.order: Order[Thing] = Order(self._moved)
        self.idle = [0, 0, 0]
        self.naive = Naive()
        self.here: dict[int, tuple[Thing, Thing]] = {}

    def _moved(self, thing: Thing, before: Standing) -> None:
        self.idle[before] -= not thing.pinned
        self.idle[thing.standing] += not thing.pinned

    @rule(name=st.integers(0, 31))
    def add_or_ask(self, name: int) -> None:
        if name in self.here:
            for thing in self.here[name]:
                thing.visited = True
            return
        ours, naive = self.here[name] = Thing(name), Thing(name)
        self.order.add(ours, name)
        self.naive.add(naive)

    @rule(name=st.integers(0, 31))
    def remove(self, name: int) -> None:
        if name in self.here:
            ours, naive = self.here.pop(name)
            self.order.remove(ours)
            self.naive.take(naive)

    @rule(name=st.integers(0, 31))
    def pin_or_unpin(self, name: int) -> None:
        for thing in self.here.get(name, ()):
            thing.pinned = not thing.pinned

    @precondition(lambda self: self.here)
    @rule(evict=st.booleans(), skip=st.booleans())
    def victim(self, evict: bool, skip: bool) -> None:
        idle = [thing.standing for thing, _ in self.here.values() if not thing.pinned]
        self.idle = [idle.count(standing) for standing in Standing]
        victim = self.order.victim(lambda thing: not thing.pinned, self.idle if skip else None)
        expected = self.naive.victim(skip)
        assert (victim and victim.name) == (expected and expected.name)
        if victim is None or expected is None:
            assert all(thing.pinned for thing, _ in self.here.values())
        elif evict:
            self.order.evict(victim, victim.name)
            self.naive.evict(expected)
            del self.here[victim.name]

    @invariant()
    def both_hold_the_same(self) -> None:
        assert len(self.order) == len(self.here)
        assert sorted(thing.name for thing in self.order) == sorted(self.here)
        assert self.order.share == self.naive.share
        for ours, naive in self.here.values():
            assert ours.visited == naive.visited
            queue = {Standing.FRESH: self.naive.fresh, Standing.TRIAL: self.naive.trial}
            assert naive in queue.get(ours.standing, self.naive.proven)


TestOrder = OrderMachine.TestCase
TestOrder.settings = settings(max_examples=80, stateful_step_count=60, deadline=None)


def stored(order: Order[Thing], *names: int) -> list[Thing]:
    things = [Thing(name) for name in names]
    for thing in things:
        order.add(thing, thing.name)
    return things


def next_victim(order: Order[Thing]) -> Thing:
    victim = order.victim(lambda thing: not thing.pinned)
    assert victim is not None
    return victim


def test_the_latest_tenth_is_fresh_and_what_is_asked_of_it_is_forgotten() -> None:
    order: Order[Thing] = Order()
    things = stored(order, *range(20))
    assert [thing.standing for thing in things] == 18 * [Standing.TRIAL] + 2 * [Standing.FRESH]
    taken_over = things[18]
    taken_over.visited = True
    stored(order, *range(20, 30))
    assert taken_over.standing is Standing.TRIAL
    assert not taken_over.visited


def test_an_object_asked_for_on_trial_is_proven_when_its_turn_comes() -> None:
    order: Order[Thing] = Order()
    asked, never, *_ = stored(order, *range(10))
    asked.visited = True
    assert next_victim(order) is never
    assert asked.standing is Standing.PROVEN


def test_an_object_stored_again_soon_after_it_went_is_proven() -> None:
    order: Order[Thing] = Order()
    stored(order, 1, 2, 3)
    order.evict(next_victim(order), 1)
    (again,) = stored(order, 1)
    assert again.standing is Standing.PROVEN
    assert order.share > 0.5


def test_a_scan_of_new_objects_does_not_push_out_proven_ones() -> None:
    order: Order[Thing] = Order()
    asked = stored(order, *range(5))
    stored(order, *range(5, 20))
    for thing in asked:
        thing.visited = True
    order.evict(next_victim(order), 5)  # proves the first five
    for name in range(20, 200):
        victim = next_victim(order)
        order.evict(victim, victim.name)
        assert victim not in asked
        stored(order, name)


def test_what_is_in_use_is_stepped_over() -> None:
    order: Order[Thing] = Order()
    first, second = stored(order, 1, 2)
    first.pinned = True
    assert next_victim(order) is second
    second.pinned = True
    assert order.victim(lambda thing: not thing.pinned) is None


def test_queues_all_of_which_is_in_use_are_not_searched() -> None:
    """With 900,000 of a million objects leased, each of the fresh ones cost a walk over all: a purge took 7 minutes."""
    order: Order[Thing] = Order()
    things = stored(order, *range(1000))
    idle = [0, 0, 0]
    for thing in things:
        thing.pinned = thing.standing is Standing.TRIAL
        idle[thing.standing] += not thing.pinned
    looked: list[Thing] = []

    def may(thing: Thing) -> bool:
        looked.append(thing)
        return not thing.pinned

    victim = order.victim(may, idle)
    assert victim is not None
    assert looked == [victim]


def test_the_only_one_that_may_go_is_named_though_it_is_being_proven() -> None:
    """The proven give, all in use; the last of those on trial was asked for, so that its turn makes it proven."""
    order: Order[Thing] = Order()
    proven = stored(order, *range(20))[:17]
    for thing in proven:
        thing.visited = True
    order.evict(next_victim(order), 17)
    stored(order, 20)
    on_trial, *fresh = (thing for thing in order if thing not in proven)
    assert [thing.standing for thing in (on_trial, *fresh)] == [Standing.TRIAL, Standing.FRESH, Standing.FRESH]
    on_trial.visited = True
    for thing in (*proven, *fresh):
        thing.pinned = True
    assert next_victim(order) is on_trial


def test_a_victim_that_is_not_evicted_is_the_last_to_be_named_again() -> None:
    order: Order[Thing] = Order()
    stored(order, 1, 2, 3)
    assert [next_victim(order).name for _ in range(4)] == [1, 2, 3, 1]
