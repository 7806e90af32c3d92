"""Admission against a model: no slot lost or leaked, bounds kept, order within a flow, nobody starved."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvrelay.router.core.admission.queue import (
    EXPRESS_RUN,
    MAX_RETRY_S,
    AdmissionQueue,
    Admitted,
    Decision,
    Entrant,
    Limits,
    Rejected,
)

FLOWS = {"a": 1.0, "b": 1.0, "c": 4.0}
priorities = st.sampled_from([-5, -1, 0, 0, 0, 1, 7])
costs = st.sampled_from([1.0, 3.0, 100.0])


class Admission(RuleBasedStateMachine):
    @initialize(slots=st.integers(0, 4), queue=st.integers(0, 6), wait_s=st.sampled_from([5.0, 50.0, math.inf]))
    def start(self, slots: int, queue: int, wait_s: float) -> None:
        self.gate = AdmissionQueue(Limits(slots=slots, queue=queue, wait_s=wait_s))
        self.now = 0.0
        self.waiting: list[Entrant] = []
        self.inside: list[Entrant] = []
        self.gone: list[Entrant] = []
        """Turned away, or left."""
        self.express_run = 0

    def apply(self, decisions: list[Decision], *, newcomer: Entrant | None = None) -> None:
        for decision in decisions:
            entrant = decision.entrant
            if entrant in self.waiting:
                if isinstance(decision, Admitted):
                    self.check_order(entrant)
                self.waiting.remove(entrant)
            else:
                assert entrant is newcomer, "a decision about somebody who does not wait"
            assert entrant not in self.inside + self.gone, "decided twice"
            if isinstance(decision, Admitted):
                assert entrant.let_in_at == self.now
                self.inside.append(entrant)
                assert len(self.inside) <= self.gate.slots
            else:
                assert 1 <= decision.retry_after_s <= MAX_RETRY_S
                self.gone.append(entrant)

    def check_order(self, entrant: Entrant) -> None:
        """Of its flow nobody in front; and of the express lane no more in a row than allowed while others wait."""
        for other in self.waiting:
            if other.flow == entrant.flow and other.express == entrant.express:
                assert (other.priority, other.order) >= (entrant.priority, entrant.order)
        if any(not other.express for other in self.waiting if other is not entrant) and entrant.express:
            self.express_run += 1
            assert self.express_run <= EXPRESS_RUN
        else:
            self.express_run = 0

    @rule(flow=st.sampled_from(sorted(FLOWS)), priority=priorities, cost=costs)
    def enter(self, flow: str, priority: int, cost: float) -> None:
        was_full = self.gate.queued >= self.gate.limits.queue
        entrant, decisions = self.gate.enter(flow, self.now, priority=priority, cost=cost, weight=FLOWS[flow])
        self.apply(decisions, newcomer=entrant)
        if entrant not in self.inside + self.gone:
            self.waiting.append(entrant)
        turned = [decision for decision in decisions if isinstance(decision, Rejected)]
        assert len(turned) <= 1
        assert not turned or was_full

    @precondition(lambda self: self.inside)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        entrant = data.draw(st.sampled_from(self.inside))
        self.inside.remove(entrant)
        self.gone.append(entrant)
        self.apply(self.gate.leave(entrant, self.now))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def go_away_while_waiting(self, data: st.DataObject) -> None:
        entrant = data.draw(st.sampled_from(self.waiting))
        self.waiting.remove(entrant)
        self.gone.append(entrant)
        assert self.gate.leave(entrant, self.now) == []

    @rule(seconds=st.sampled_from([0.0, 0.5, 4.0, 60.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        due = [entrant for entrant in self.waiting if entrant.expires_at <= self.now]
        assert (self.gate.next_expiry <= self.now) == bool(due)
        decisions = self.gate.expire(self.now)
        assert [decision.entrant for decision in decisions if isinstance(decision, Rejected)] == [
            decision.entrant for decision in decisions
        ]
        assert {id(decision.entrant) for decision in decisions} == {id(entrant) for entrant in due}
        self.apply(decisions)

    @rule(slots=st.one_of(st.integers(0, 5), st.just(math.inf)))
    def resize(self, slots: float) -> None:
        inside = len(self.inside)
        decisions = self.gate.resize(slots, self.now)
        assert inside <= slots or not decisions
        self.apply(decisions)

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "gate"):
            self.gate.check_integrity()
            assert (self.gate.inside, self.gate.queued) == (len(self.inside), len(self.waiting))

    def teardown(self) -> None:
        """Whatever happened: everybody who waits gets in as slots come free, and at the end nothing is held."""
        if not hasattr(self, "gate"):
            return
        self.apply(self.gate.resize(max(1, self.gate.slots), self.now))
        while self.inside:
            entrant = self.inside.pop(0)
            self.apply(self.gate.leave(entrant, self.now))
        assert not self.waiting
        assert (self.gate.inside, self.gate.queued) == (0, 0)
        self.gate.check_integrity()


TestAdmission = Admission.TestCase
TestAdmission.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@settings(max_examples=40, deadline=None)
@given(
    weights=st.lists(st.sampled_from([0.5, 1.0, 2.0, 8.0]), min_size=2, max_size=4),
    served=st.lists(costs, min_size=40, max_size=40),
    data=st.data(),
)
def test_flows_that_always_wait_are_served_by_their_weights(
    weights: list[float], served: list[float], data: st.DataObject
) -> None:
    """The bound of start-time fair queueing: no two flows that both wait are ever further apart, in cost over weight,
    than one request of each.
    """
    gate = AdmissionQueue(Limits(slots=1, queue=1000))
    (_, [first]) = gate.enter("first", 0.0)
    inside = first.entrant
    largest = dict.fromkeys(range(len(weights)), 0.0)
    for flow, weight in enumerate(weights):
        for cost in data.draw(st.permutations(served)):
            gate.enter(str(flow), 0.0, cost=cost, weight=weight)
            largest[flow] = max(largest[flow], cost / weight)
    got = dict.fromkeys(range(len(weights)), 0.0)
    left = dict.fromkeys(range(len(weights)), len(served))
    while all(left.values()):
        ((decision),) = gate.leave(inside, 0.0)
        assert isinstance(decision, Admitted)
        inside = decision.entrant
        flow = int(inside.flow)
        got[flow] += inside.cost / weights[flow]
        left[flow] -= 1
        for one, other in pairwise(sorted(got)):
            assert abs(got[one] - got[other]) <= largest[one] + largest[other] + 1e-6


def test_one_flow_that_fills_the_queue_does_not_keep_another_out() -> None:
    gate = AdmissionQueue(Limits(slots=1, queue=4))
    gate.enter("greedy", 0.0)
    flood = [gate.enter("greedy", 0.0)[0] for _ in range(4)]
    _, [refused] = gate.enter("greedy", 0.0)
    assert isinstance(refused, Rejected)
    modest, decisions = gate.enter("modest", 0.0)
    assert [decision.entrant for decision in decisions] == flood[-1:]
    assert gate.queued == 4
    assert modest.let_in_at is None


def test_a_flow_that_was_idle_neither_saves_up_nor_is_punished() -> None:
    """1. One flow is served alone for long. 2. Another comes: from then on they take turns."""
    gate = AdmissionQueue(Limits(slots=1, queue=100))
    inside, _ = gate.enter("old", 0.0)
    for _ in range(50):
        gate.leave(inside, 0.0)
        inside, _ = gate.enter("old", 0.0)
    for flow in ("old", "new"):
        for _ in range(10):
            gate.enter(flow, 0.0)
    order = []
    for _ in range(20):
        ((decision),) = gate.leave(inside, 0.0)
        inside = decision.entrant
        order.append(inside.flow)
    assert all(set(pair) == {"old", "new"} for pair in zip(order[::2], order[1::2], strict=True))


def test_an_urgent_request_takes_the_place_of_one_of_its_flow_that_is_less_so() -> None:
    gate = AdmissionQueue(Limits(slots=1, queue=2))
    gate.enter("a", 0.0)
    gate.enter("a", 0.0, priority=1)
    late, _ = gate.enter("a", 0.0, priority=3)
    assert [decision.entrant for decision in gate.enter("a", 0.0, priority=2)[1]] == [late]
    newcomer, [refused] = gate.enter("a", 0.0, priority=2)
    assert refused.entrant is newcomer


@pytest.mark.parametrize(
    ("held_s", "waiting", "slots", "expected"), [(10.0, 4, 1, 50), (0.1, 4, 1, 1), (500.0, 4, 1, 120)]
)
def test_retry_after_is_how_long_those_who_are_here_will_take(
    held_s: float, waiting: int, slots: int, expected: int
) -> None:
    gate = AdmissionQueue(Limits(slots=slots, queue=10))
    first, _ = gate.enter("a", 0.0)
    gate.leave(first, held_s)
    gate.enter("a", held_s)
    for _ in range(waiting):
        gate.enter("a", held_s)
    assert gate.retry_after_s() == expected
