"""How long requests take, by operation: counts in buckets, cheap enough to be kept for every request."""

from __future__ import annotations

from bisect import bisect_left

BOUNDS_S = (
    25e-6, 50e-6, 100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3, 50e-3, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0,
)  # fmt: skip
"""Upper bounds of the buckets, in seconds; one more holds what is above."""


class Latencies:
    """Counts of one pool."""

    def __init__(self) -> None:
        self._counts: dict[str, list[int]] = {}
        self._sums: dict[str, float] = {}

    def observe(self, operation: str, seconds: float) -> None:
        """Count one request of ``operation`` that took ``seconds``."""
        counts = self._counts.get(operation)
        if counts is None:
            counts = self._counts[operation] = [0] * (len(BOUNDS_S) + 1)
            self._sums[operation] = 0.0
        counts[bisect_left(BOUNDS_S, seconds)] += 1
        self._sums[operation] += seconds

    def snapshot(self) -> dict[str, tuple[tuple[int, ...], float]]:
        """By operation: how many in each bucket, and the sum in seconds."""
        return {operation: (tuple(counts), self._sums[operation]) for operation, counts in self._counts.items()}
