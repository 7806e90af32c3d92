"""Which workers there should be, whatever happens to them."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from kvrelay.router.core.supervision import FIRST_PAUSE_S, LONGEST_PAUSE_S, STEADY_S, Supervision


def begun(count: int = 2) -> Supervision:
    supervision = Supervision(count, 0.0)
    for slot in supervision.due(0.0):
        supervision.started(slot, 100 + slot.number, 0.0)
    return supervision


def test_all_are_due_at_once_and_a_crash_makes_one_due_after_a_pause() -> None:
    supervision = begun()
    for slot in supervision.slots:
        supervision.came_up(slot)
    assert supervision.all_ready
    assert supervision.wait_s(5.0) is None
    supervision.ended(101, 5.0)
    assert list(supervision.due(5.0)) == []
    assert supervision.wait_s(5.0) == pytest.approx(FIRST_PAUSE_S)
    assert [slot.number for slot in supervision.due(5.0 + 2 * FIRST_PAUSE_S)] == [1]


def test_the_pause_doubles_up_to_its_limit_until_a_worker_has_lived_long() -> None:
    supervision = begun(1)
    (slot,) = supervision.slots
    supervision.came_up(slot)
    now, pauses = 0.0, []
    for pid in range(1, 12):
        supervision.ended(slot.pid, now)
        pauses.append(slot.due_at - now)
        now = slot.due_at
        supervision.started(slot, pid, now)
    assert pauses[:3] == pytest.approx([FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S])
    assert pauses[-2:] == pytest.approx([LONGEST_PAUSE_S] * 2)
    supervision.ended(slot.pid, now + STEADY_S)
    assert slot.due_at - (now + STEADY_S) == pytest.approx(FIRST_PAUSE_S)


def test_a_worker_that_never_came_up_is_not_started_again_and_nothing_is() -> None:
    supervision = begun()
    supervision.came_up(supervision.slots[0])
    supervision.ended(101, 1.0)
    assert supervision.failed
    assert list(supervision.due(100.0)) == []
    assert supervision.pids == [100]
    assert not supervision.over
    supervision.ended(100, 2.0)
    assert supervision.over


def test_others_children_concern_nobody() -> None:
    supervision = begun()
    assert supervision.ended(4711, 1.0) is None
    assert supervision.pids == [100, 101]


class Workers(RuleBasedStateMachine):
    """Processes come and go in any order."""

    alive = Bundle("alive")

    def __init__(self) -> None:
        super().__init__()
        self.now, self.pid = 0.0, 0
        self.supervision = Supervision(3, 0.0)
        self.running: set[int] = set()

    @rule(seconds=st.floats(0, 60))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(target=alive, data=st.data())
    @precondition(lambda self: bool(list(self.supervision.due(self.now))))
    def fill(self, data: st.DataObject) -> int:
        slot = data.draw(st.sampled_from(list(self.supervision.due(self.now))))
        self.pid += 1
        self.supervision.started(slot, self.pid, self.now)
        self.running.add(self.pid)
        return self.pid

    @rule(pid=alive)
    def come_up(self, pid: int) -> None:
        for slot in self.supervision.slots:
            if slot.pid == pid:
                self.supervision.came_up(slot)

    @rule(pid=consumes(alive))
    def crash(self, pid: int) -> None:
        self.supervision.ended(pid, self.now)
        self.running.discard(pid)

    @rule()
    def stop(self) -> None:
        self.supervision.stop()

    @invariant()
    def it_knows_who_runs_and_never_wants_more_than_there_are_places(self) -> None:
        supervision = self.supervision
        assert set(supervision.pids) == self.running
        ended = supervision.stopping or supervision.failed
        assert supervision.over == (ended and not self.running)
        if ended:
            assert list(supervision.due(self.now)) == []
            assert supervision.wait_s(self.now) is None
        elif len(self.running) < 3:
            assert supervision.wait_s(self.now) is not None


TestWorkers = Workers.TestCase
TestWorkers.settings = settings(deadline=None, max_examples=50, stateful_step_count=30)
