"""The decisions about tiers, against a model of the arena and of tiers that fail, forget and answer in any order."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvrelay.pool.core.catalog import Catalog
from kvrelay.pool.core.row import State
from kvrelay.pool.core.tiering import Tiering, TierRules
from kvrelay.pool.tiers.core.orders import Copy, Find, Form, Load, Name, Order, Purge, Remove, Store
from kvrelay.pool.tiers.core.tier import Loaded, Outcome

if TYPE_CHECKING:
    from kvrelay.pool.tiers.core.seeking import Seek

ARENA = 64 << 10
SIZE = 4 << 10
KEYS = [bytes([number]) for number in range(10)]
TENANTS = (0, 1)

keys = st.sampled_from(KEYS)
tenants = st.sampled_from(TENANTS)
some_keys = st.lists(keys, min_size=1, max_size=8)


@dataclass
class Lookout:
    """A seeker that counts what it is told."""

    bring: bool
    seek: Seek | None = None
    looked_at: list[int] = field(default_factory=list)
    settled_at: int = 0
    cancelled: bool = False

    def looked(self, found: int, _now: float) -> None:
        assert not self.cancelled
        self.looked_at.append(found)

    def settled(self, _now: float) -> None:
        assert not self.cancelled
        assert self.looked_at
        self.settled_at += 1


class TieringMachine(RuleBasedStateMachine):
    eager = (False, False)

    def __init__(self) -> None:
        super().__init__()
        self.catalog = Catalog(ARENA)
        rules = [TierRules(eager=eager, storing_bytes=3 * SIZE) for eager in self.eager]
        self.tiering = Tiering(self.catalog, rules)
        self.now = 0.0
        self.version = 0
        self.arena: dict[int, int] = {}
        """What lies at an offset: a version, the object's content."""
        self.below: list[dict[Name, tuple[int, Form]]] = [{}, {}]
        self.deleted: set[int] = set()
        """Versions nobody must see again."""
        self.refused: set[int] = set()
        self.newest: dict[Name, int] = {}
        self.pending: list[Order] = []
        self.lookouts: list[Lookout] = []
        self.leases: list[int] = []

    def take(self) -> None:
        """What the shell does after every call."""
        new = self.tiering.take_orders()
        self.pending += new
        for row in self.tiering.take_published():
            info = self.catalog.info(row)
            assert info.state is State.SEALED
        for row in self.tiering.take_abandoned():
            assert self.catalog.state(row) is State.WRITING
            self.catalog.forget(row)
            self.catalog.unhold(row)
        for handle in self.tiering.take_damaged():
            row_ = self.catalog.row_of(handle)
            if row_ is not None:
                info = self.catalog.info(row_)
                self.catalog.forget(row_)
                self.delete_below(info.tenant, [info.key])

    def delete_below(self, tenant: int, some: list[bytes]) -> None:
        for key in some:
            version = self.newest.pop(Name(tenant, key), None)
            if version is not None:
                self.deleted.add(version)
        self.tiering.forget(tenant, some, self.now)

    @initialize(places=st.lists(st.sampled_from(["arena", "first", "second", "both", ""]), min_size=20, max_size=20))
    def begin(self, places: list[str]) -> None:
        """An earlier life has left objects here and there."""
        for name, place in zip([Name(tenant, key) for tenant in TENANTS for key in KEYS], places, strict=True):
            if place == "arena":
                self.put(name.tenant, name.key, 1, 0)
            elif place:
                self.version += 1
                self.newest[name] = self.version
                for tier in {"first": [0], "second": [1], "both": [0, 1]}[place]:
                    self.below[tier][name] = (self.version, Form(SIZE, 1, 1, math.inf))

    # --- what clients do ---

    @rule(tenant=tenants, key=keys, segments=st.sampled_from([1, 2]), ttl=st.sampled_from([0, 0, 5]))
    def put(self, tenant: int, key: bytes, segments: int, ttl: int) -> None:
        if self.catalog.find(tenant, key) is not None:
            return
        row = self.catalog.add(tenant, key, SIZE, 1, segments)
        if row is None:
            return
        self.version += 1
        name = Name(tenant, key)
        old = self.newest.get(name)
        if old is not None:
            self.deleted.add(old)  # other bytes under the same name: the old ones are not to be seen again
            self.tiering.forget(tenant, [key], self.now)
        self.newest[name] = self.version
        self.arena[self.catalog.geometry(row)[0]] = self.version
        self.catalog.seal(row, self.version.to_bytes(8, "little") * segments, self.now + ttl if ttl else math.inf)
        self.tiering.sealed([row])
        self.take()

    @rule(tenant=tenants, some=some_keys)
    def delete(self, tenant: int, some: list[bytes]) -> None:
        for key in some:
            row = self.catalog.find(tenant, key)
            if row is not None:
                self.catalog.forget(row)
        self.delete_below(tenant, some)
        self.take()

    @rule(tenant=tenants)
    def purge(self, tenant: int) -> None:
        self.catalog.trim(1 << 60, tenant)
        for name in [name for name in self.newest if name.tenant == tenant and self.catalog.find(*name) is None]:
            self.deleted.add(self.newest.pop(name))
        self.tiering.purge(tenant, self.now)
        self.take()

    @rule(tenant=tenants, some=some_keys, bring=st.booleans(), prefix=st.booleans())
    def seek(self, tenant: int, some: list[bytes], bring: bool, prefix: bool) -> None:
        lookout = Lookout(bring)
        self.lookouts.append(lookout)
        lookout.seek = self.tiering.seek(tenant, some, lookout, self.now, bring=bring, prefix=prefix)
        if lookout.seek is None:
            assert lookout.looked_at
        self.take()

    @precondition(lambda self: self.lookouts)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.cancel_one(data.draw(st.sampled_from(self.lookouts)))

    def cancel_one(self, lookout: Lookout) -> None:
        if lookout.seek is not None and not self.told(lookout):
            lookout.cancelled = True
            self.tiering.cancel(lookout.seek)
            self.take()

    @rule(tenant=tenants, key=keys)
    def lease(self, tenant: int, key: bytes) -> None:
        row = self.catalog.find(tenant, key)
        if row is not None and len(self.leases) < 8:
            self.catalog.pin(row)
            self.leases.append(row)

    @precondition(lambda self: self.leases)
    @rule()
    def release(self) -> None:
        self.catalog.unpin(self.leases.pop())

    # --- what the pool does ---

    @rule(limit=st.integers(1, 16))
    def offer(self, limit: int) -> None:
        self.tiering.offer(self.catalog.victims(limit), self.now)
        self.take()

    @rule()
    def sink(self) -> None:
        """Everything that can be goes below, and leaves the arena."""
        self.tiering.offer(self.catalog.victims(100), self.now)
        self.take()
        for order in [order for order in self.pending if isinstance(order, Store)]:
            self.pending.remove(order)
            self.carry_out(order, None)
        self.catalog.trim(ARENA, clean=True)
        self.take()

    @rule()
    def keep_all(self) -> None:
        """The arena will be gone: all of it is to go below, and some of it may be, before it is not after all."""
        self.tiering.keep_all()
        self.take()

    @rule(size=st.integers(1, ARENA), clean=st.booleans())
    def trim(self, size: int, clean: bool) -> None:
        self.catalog.trim(size, clean=clean)

    @rule(seconds=st.sampled_from([1.0, 10.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.catalog.expire(self.now, 100)
        self.tiering.tick(self.now)
        self.take()

    # --- what tiers do ---

    @rule(tier=st.sampled_from([0, 1]), data=st.data())
    def tier_evicts(self, tier: int, data: st.DataObject) -> None:
        if self.below[tier]:
            self.evict_below(tier, data.draw(st.sampled_from(sorted(self.below[tier]))))

    def evict_below(self, tier: int, name: Name) -> None:
        del self.below[tier][name]
        self.tiering.evicted(tier, [name])

    @precondition(lambda self: self.pending)
    @rule(count=st.integers(1, 4), data=st.data())
    def answer(self, count: int, data: st.DataObject) -> None:
        for _ in range(min(count, len(self.pending))):
            self.answer_one(data)

    def answer_one(self, data: st.DataObject) -> None:
        order = self.pending.pop(data.draw(st.integers(0, len(self.pending) - 1)))
        outcomes = st.sampled_from(
            [Outcome.DONE, Outcome.DONE, Outcome.DONE, Outcome.FAILED, Outcome.CORRUPT, Outcome.REFUSED]
        )
        self.carry_out(order, lambda: data.draw(outcomes))
        self.take()

    def carry_out(self, order: Order, luck: object) -> None:
        draw = luck if callable(luck) else lambda: Outcome.DONE
        store = self.below[order.tier]
        match order:
            case Find():
                forms = [
                    store[name][1] if name in store and draw() is not Outcome.FAILED else None for name in order.names
                ]
                if order.prefix and None in forms:
                    first = forms.index(None)
                    forms[first:] = [None] * (len(forms) - first)
                self.tiering.found(order.op, forms, self.now)
            case Load():
                self.tiering.loaded(order.op, [self.load(store, copy, draw()) for copy in order.copies], self.now)
            case Store():
                outcomes = [draw() for _ in order.copies]
                for copy, outcome in zip(order.copies, outcomes, strict=True):
                    version = int.from_bytes(copy.sums[:8], "little")
                    assert self.arena[copy.offset] == version, "the bytes were given away during the demotion"
                    if outcome is Outcome.DONE:
                        store[copy.name] = (version, copy.form)
                    elif outcome is Outcome.REFUSED:
                        self.refused.add(version)
                self.tiering.stored(order.op, outcomes, self.now)
            case Remove() | Purge():
                done = draw() is not Outcome.FAILED
                if done:
                    names = order.names if isinstance(order, Remove) else [n for n in store if n.tenant == order.tenant]
                    for name in names:
                        store.pop(name, None)
                self.tiering.removed(order.op, self.now, done=done)

    def load(self, store: dict[Name, tuple[int, Form]], copy: Copy, outcome: Outcome) -> Loaded:
        if copy.name not in store or store[copy.name][1][:3] != copy.form[:3]:
            return Loaded(Outcome.ABSENT)
        version, form = store[copy.name]
        if outcome is not Outcome.DONE:
            self.arena[copy.offset] = -1
            return Loaded(outcome if outcome is not Outcome.REFUSED else Outcome.ABSENT)
        self.arena[copy.offset] = version
        return Loaded(Outcome.DONE, version.to_bytes(8, "little") * form.segments)

    # --- what must hold ---

    @staticmethod
    def told(lookout: Lookout) -> bool:
        return bool(lookout.settled_at if lookout.bring else lookout.looked_at)

    @invariant()
    def all_is_accounted_for(self) -> None:
        self.catalog.check_integrity()
        self.tiering.check_integrity()
        pins = Counter([*self.tiering.protected(), *self.leases])
        live = [row for row in range(2 * ARENA // SIZE) if self.catalog.state(row) is not State.FREE]
        assert {row: self.catalog.info(row).pins for row in live if self.catalog.info(row).pins} == dict(pins)

    @invariant()
    def nobody_sees_other_bytes_than_the_newest(self) -> None:
        column, _ = self.catalog.page(None, 0, 10_000, b"")
        for row in memoryview(column).cast("I"):
            info = self.catalog.info(row)
            if info.state is State.SEALED:
                version = int.from_bytes(self.catalog.sums(row, 0, 1), "little")
                assert version not in self.deleted, "an object that was deleted came back"
                assert self.arena[info.offset] == version, "sealed over other bytes"

    @invariant()
    def what_is_clean_is_below(self) -> None:
        column, _ = self.catalog.page(None, 0, 10_000, b"")
        for row in memoryview(column).cast("I"):
            info = self.catalog.info(row)
            if info.clean:
                version = int.from_bytes(self.catalog.sums(row, 0, 1), "little")
                there = [store.get(Name(info.tenant, info.key), (0, None))[0] for store in self.below]
                assert version in there or version in self.refused, "it would be lost"

    @invariant()
    def nobody_is_told_twice(self) -> None:
        for lookout in self.lookouts:
            assert len(lookout.looked_at) <= 1
            assert lookout.settled_at <= lookout.bring

    def teardown(self) -> None:
        """With everything answered, nothing is under way any more, and everybody has been told."""
        for _ in range(10_000):
            if not self.pending:
                self.now += 100
                self.tiering.tick(self.now)
                self.take()
                if not self.pending:
                    break
            self.carry_out(self.pending.pop(0), None)
            self.take()
        stats = self.tiering.stats()
        assert (stats["demoting_bytes"], stats["promoting_bytes"], stats["sought"], stats["removals"]) == (0, 0, 0, 0)
        assert all(self.told(lookout) for lookout in self.lookouts if not lookout.cancelled)
        self.all_is_accounted_for()
        assert not list(self.tiering.protected())
        for store in self.below:
            assert not self.deleted & {version for version, _ in store.values()}, "a deleted object was left below"


class EagerMachine(TieringMachine):
    eager = (True, True)


class MixedMachine(TieringMachine):
    eager = (False, True)


TestTiering = TieringMachine.TestCase
TestTiering.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
TestEagerTiering = EagerMachine.TestCase
TestEagerTiering.settings = settings(max_examples=20, stateful_step_count=40, deadline=None)
TestMixedTiering = MixedMachine.TestCase
TestMixedTiering.settings = settings(max_examples=20, stateful_step_count=40, deadline=None)


# Hypothesis leaves out rules at random, and seldom goes the long way down and up again; a walk with weights does.

WEIGHTS = {
    "put": 20, "delete": 3, "purge": 1, "seek": 20, "cancel": 3, "lease": 3, "release": 3, "offer": 5, "sink": 5,
    "trim": 3, "wait": 1, "tier_evicts": 3, "answer": 40,
}  # fmt: skip
LUCK = [Outcome.DONE] * 8 + [Outcome.FAILED, Outcome.CORRUPT, Outcome.REFUSED]


def walk(machine: TieringMachine, rng: random.Random, steps: int) -> None:  # noqa: C901 (a table of what may happen)
    """Do ``steps`` things at random, checking after each."""
    machine.begin(rng.choices(["arena", "first", "second", "both", ""], k=20))
    for _ in range(steps):
        tenant, key = rng.choice(TENANTS), rng.choice(KEYS)
        some = rng.sample(KEYS, rng.randint(1, 6))
        match rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]:
            case "put":
                machine.put(tenant, key, rng.choice([1, 2]), rng.choice([0, 0, 5]))
            case "delete":
                machine.delete(tenant, some[:2])
            case "purge":
                machine.purge(tenant)
            case "seek":
                machine.seek(tenant, some, rng.random() < 0.8, rng.random() < 0.5)
            case "cancel":
                open_ones = [one for one in machine.lookouts if one.seek is not None and not machine.told(one)]
                if open_ones:
                    machine.cancel_one(rng.choice(open_ones))
            case "lease":
                machine.lease(tenant, key)
            case "release":
                if machine.leases:
                    machine.release()
            case "offer":
                machine.offer(rng.randint(1, 16))
            case "sink":
                machine.sink()
            case "trim":
                machine.trim(rng.randint(1, ARENA), rng.random() < 0.5)
            case "wait":
                machine.wait(rng.choice([1.0, 10.0]))
            case "tier_evicts":
                tier = rng.choice([0, 1])
                if machine.below[tier]:
                    machine.evict_below(tier, rng.choice(sorted(machine.below[tier])))
            case "answer":
                if machine.pending:
                    order = machine.pending.pop(rng.randrange(len(machine.pending)))
                    machine.carry_out(order, lambda: rng.choice(LUCK))
                    machine.take()
        machine.all_is_accounted_for()
        machine.nobody_sees_other_bytes_than_the_newest()
        machine.what_is_clean_is_below()
        machine.nobody_is_told_twice()
    machine.teardown()


@pytest.mark.parametrize("machine", [TieringMachine, EagerMachine, MixedMachine])
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_a_long_walk_breaks_nothing(machine: type[TieringMachine], seed: int) -> None:
    walk(machine(), random.Random(seed), 200)
