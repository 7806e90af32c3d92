"""Rates: so many a minute, as buckets that fill all the time. Pure."""

from __future__ import annotations

import math

MINUTE_S = 60.0


class Bucket:
    """Allows ``per_minute`` on average, and as many at once at most. What was estimated can be corrected afterwards."""

    __slots__ = ("_at", "_level", "per_minute")

    def __init__(self, per_minute: float, now: float) -> None:
        """Full. ``per_minute``: above 0."""
        self.per_minute = per_minute
        self._level = per_minute
        self._at = now

    def left(self, now: float) -> float:
        """What may be taken at once; below 0 when more was used than estimated."""
        if now > self._at:
            self._level = min(self.per_minute, self._level + (now - self._at) * self.per_minute / MINUTE_S)
            self._at = now
        return self._level

    def wait_s(self, amount: float, now: float) -> float:
        """How long until ``amount`` may be taken; 0 if now. More than a minute's is taken from a full bucket."""
        missing = min(amount, self.per_minute) - self.left(now)
        return max(0.0, missing * MINUTE_S / self.per_minute)

    def take(self, amount: float, now: float) -> None:
        """Take it, whatever is left; a negative ``amount`` gives back."""
        self._level = min(self.per_minute, self.left(now) - amount)

    def reset_s(self, now: float) -> float:
        """How long until it is full."""
        return max(0.0, (self.per_minute - self.left(now)) * MINUTE_S / self.per_minute)

    def resize(self, per_minute: float, now: float) -> None:
        """Another limit from now on; what was used stays used."""
        used = self.per_minute - self.left(now)
        self.per_minute = per_minute
        self._level = per_minute - used


def in_words(seconds: float) -> str:
    """As OpenAI writes durations in its headers: ``20ms``, ``1.5s``, ``6m0s``."""
    milliseconds = math.ceil(seconds * 1e3)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    rest_s = f"{rest / 1e3:g}s"
    return f"{minutes}m{rest_s}" if minutes else rest_s
