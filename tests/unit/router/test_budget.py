"""The retry budget: what it promises over any stretch of time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvrelay.router.core.budget import BudgetSettings, RetryBudget

steps = st.lists(
    st.one_of(st.just("request"), st.just("retry"), st.floats(0.0, 3.0, allow_nan=False)), min_size=1, max_size=200
)


@given(steps, st.floats(0.0, 1.0), st.floats(0.0, 20.0), st.floats(0.0, 50.0))
def test_retries_never_exceed_burst_plus_share_plus_floor_over_any_stretch(
    events: list[str | float], share: float, floor: float, burst: float
) -> None:
    budget, now = RetryBudget(BudgetSettings(share, floor, burst), 0.0), 0.0
    story: list[tuple[str, float]] = []
    for event in events:
        if isinstance(event, float):
            now += event
        elif event == "request":
            budget.request()
            story.append(("request", now))
        elif budget.affords(now):
            budget.retry(now)
            story.append(("retry", now))
    for first in range(len(story)):
        stretch = story[first:]
        requests = sum(kind == "request" for kind, _ in stretch)
        retries = sum(kind == "retry" for kind, _ in stretch)
        assert retries <= burst + share * requests + floor * (now - stretch[0][1]) + 1e-6


def test_a_fleet_that_fails_every_request_is_sent_a_fifth_more_and_not_twice_as_much() -> None:
    budget = RetryBudget(BudgetSettings(share=0.2, floor_per_s=0.0, burst=10.0), 0.0)
    retries = 0
    for _ in range(1000):
        budget.request()
        if budget.affords(0.0):
            budget.retry(0.0)
            retries += 1
    assert 200 <= retries <= 210


def test_a_router_with_few_requests_may_retry_again_after_a_while() -> None:
    budget = RetryBudget(BudgetSettings(share=0.0, floor_per_s=1.0, burst=1.0), 0.0)
    assert budget.affords(0.0)
    budget.retry(0.0)
    assert not budget.affords(0.9)
    assert budget.affords(1.0)


def test_a_clock_that_goes_back_grants_nothing() -> None:
    budget = RetryBudget(BudgetSettings(share=0.0, floor_per_s=1.0, burst=1.0), 10.0)
    budget.retry(10.0)
    assert not budget.affords(5.0)
    assert not budget.affords(10.5)
    assert budget.affords(11.0)


def test_a_smaller_burst_takes_what_was_saved_up() -> None:
    budget = RetryBudget(BudgetSettings(share=0.0, floor_per_s=0.0, burst=5.0), 0.0)
    budget.change(BudgetSettings(share=0.0, floor_per_s=0.0, burst=1.0), 0.0)
    budget.retry(0.0)
    assert not budget.affords(0.0)
