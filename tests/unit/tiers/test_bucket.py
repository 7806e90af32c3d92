from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.pool.tiers.core.bucket import TokenBucket


def test_a_rested_bucket_gives_a_burst_at_once_and_then_its_rate() -> None:
    bucket = TokenBucket(1_000, burst_s=0.5)
    assert bucket.take(500, now=0.0) == 0
    assert bucket.take(100, now=0.0) == 0
    assert bucket.take(100, now=0.0) == 0.1
    assert bucket.take(100, now=0.0) == 0.2
    assert bucket.take(100, now=0.3) == 0
    assert bucket.take(100, now=100.0) == 0


def test_a_take_larger_than_the_burst_is_granted_and_paid_for_by_the_next() -> None:
    bucket = TokenBucket(1_000, burst_s=0.5)
    assert bucket.take(5_500, now=0.0) == 0
    assert bucket.take(1, now=0.0) == 5.0


def test_a_clock_that_goes_back_gives_nothing() -> None:
    bucket = TokenBucket(1_000, burst_s=0.5)
    bucket.take(500, now=10.0)
    bucket.take(500, now=5.0)
    assert bucket.take(1, now=10.0) == 0.5


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 5_000), st.floats(0, 2)), min_size=1, max_size=50))
def test_no_stretch_of_time_lets_more_pass_than_rate_burst_and_one_take(takes: list[tuple[int, float]]) -> None:
    bucket = TokenBucket(1_000, burst_s=0.25)
    now = 0.0
    moved: list[tuple[float, int]] = []
    for size, pause in takes:
        now += pause
        moved.append((now + bucket.take(size, now), size))
    for first in range(len(moved)):
        for last in range(first, len(moved)):
            total = sum(size for _, size in moved[first : last + 1])
            largest = max(size for _, size in moved[first : last + 1])
            assert total <= 1_000 * (moved[last][0] - moved[first][0]) + 250 + largest + 1e-6
