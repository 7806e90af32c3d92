"""A cap on bandwidth: a token bucket that is told the time."""

from __future__ import annotations

BURST_S = 0.25
"""How much of its rate a bucket that has rested gives at once."""


class TokenBucket:
    """Lets ``rate`` bytes a second pass, and at most ``burst_s`` seconds' worth of them at once after a rest.

    A take larger than what is there is granted whole and leaves a debt, which the takes behind it wait for: over any
    stretch of time no more than ``rate * time + burst + one take`` passes.
    """

    def __init__(self, rate: float, *, burst_s: float = BURST_S) -> None:
        self.rate = rate
        self._burst = rate * burst_s
        self._level = self._burst
        self._at: float | None = None

    def take(self, size: int, now: float) -> float:
        """Take ``size`` bytes; how many seconds to wait before moving them."""
        if self._at is not None:
            self._level = min(self._burst, self._level + max(0.0, now - self._at) * self.rate)
        self._at = now if self._at is None else max(now, self._at)
        delay = max(0.0, -self._level / self.rate)
        self._level -= size
        return delay
