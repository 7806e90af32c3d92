"""The life of one request."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.router.core.lifecycle import TABLE, TERMINAL, TIMESTAMPS, Event, IllegalTransitionError, Lifecycle, State


def test_the_straight_way_sets_all_seven_timestamps_in_order() -> None:
    life = Lifecycle("ho-1", 10.0)
    steps = [Event.PREFILL_SENT, Event.PREFILL_ANSWERED, Event.DECODE_SENT, Event.FIRST_BYTE, Event.LAST_BYTE]
    for now, event in enumerate(steps, start=11):
        life.handle(event, float(now))
    assert life.state is State.DONE
    stamps = [life.timestamps[name] for name in TIMESTAMPS]
    assert stamps == sorted(stamps)
    assert stamps == [10.0, 11.0, 12.0, 13.0, 14.0, 14.0, 15.0]
    assert life.ttft_s == 4.0


def test_a_lost_prefill_leaves_the_way_to_decode_open() -> None:
    life = Lifecycle("ho-1", 0.0)
    for event in (Event.PREFILL_SENT, Event.PREFILL_LOST, Event.DECODE_SENT, Event.FIRST_BYTE, Event.LAST_BYTE):
        life.handle(event, 1.0)
    assert life.state is State.DONE
    assert "prefill_end" not in life.timestamps


def test_an_illegal_step_raises_and_tells_the_whole_story() -> None:
    life = Lifecycle("ho-42", 5.0)
    life.handle(Event.PREFILL_SENT, 5.25)
    with pytest.raises(IllegalTransitionError) as raised:
        life.handle(Event.FIRST_BYTE, 6.0)
    assert "FIRST_BYTE in state PREFILLING" in str(raised.value)
    assert "ho-42: ISSUED +0.000s, PREFILL_SENT +0.250s" in str(raised.value)
    assert life.state is State.PREFILLING


def test_every_living_state_can_be_cancelled_and_fail_and_no_dead_one_goes_on() -> None:
    assert set(TABLE) == set(State) - TERMINAL
    for steps in TABLE.values():
        assert steps[Event.CANCELLED] is State.CANCELLED
        assert steps[Event.FAILED] is State.FAILED


def test_every_state_is_reachable() -> None:
    seen, frontier = {State.ISSUED}, [State.ISSUED]
    while frontier:
        for following in TABLE.get(frontier.pop(), {}).values():
            if following not in seen:
                seen.add(following)
                frontier.append(following)
    assert seen == set(State)


@given(st.lists(st.sampled_from(list(Event)), max_size=12))
def test_any_sequence_either_follows_the_table_or_is_refused_without_a_trace(events: list[Event]) -> None:
    life = Lifecycle("ho", 0.0)
    for now, event in enumerate(events, start=1):
        before, story = life.state, life.story()
        expected = TABLE.get(before, {}).get(event)
        if expected is None:
            with pytest.raises(IllegalTransitionError):
                life.handle(event, float(now))
            assert (life.state, life.story()) == (before, story)
        else:
            assert life.handle(event, float(now)) is expected
    assert life.ended is (life.state in TERMINAL)
