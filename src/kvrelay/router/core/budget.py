"""How much asking again a fleet can bear: a token bucket that requests fill and retries empty.

When engines fail, every request would be sent to two of them or three, and what was slow would be down. So retries are
a share of requests: each request puts a part of a token in, each retry takes a whole one out. A floor per second lets a
router with few requests retry at all. (Finagle's ``RetryBudget`` and Envoy's ``retry_budget`` do the same.)

Over any stretch of ``t`` seconds with ``r`` requests there are at most ``burst + share * r + floor_per_s * t`` retries.
"""

from __future__ import annotations

from msgspec import Struct


class BudgetSettings(Struct, frozen=True):
    """``share``: retries per request. ``floor_per_s``: granted besides. ``burst``: what can be saved up at most."""

    share: float = 0.2
    floor_per_s: float = 10.0
    burst: float = 100.0


class RetryBudget:
    """What is left of the budget. A new one is full."""

    __slots__ = ("_at", "_settings", "_tokens")

    def __init__(self, settings: BudgetSettings, now: float) -> None:
        """``now``: on the clock of all other calls, in seconds."""
        self._settings = settings
        self._tokens = settings.burst
        self._at = now

    def request(self) -> None:
        """A request is sent for the first time."""
        self._tokens = min(self._tokens + self._settings.share, self._settings.burst)

    def affords(self, now: float) -> bool:
        """Whether a retry may be sent."""
        self._refill(now)
        return self._tokens >= 1.0

    def retry(self, now: float) -> None:
        """A retry is sent: only when `affords` said so."""
        self._refill(now)
        self._tokens -= 1.0

    def change(self, settings: BudgetSettings, now: float) -> None:
        """Other settings from now on."""
        self._refill(now)
        self._settings = settings
        self._tokens = min(self._tokens, settings.burst)

    def _refill(self, now: float) -> None:
        settings = self._settings
        passed_s, self._at = max(0.0, now - self._at), max(now, self._at)
        self._tokens = min(self._tokens + passed_s * settings.floor_per_s, settings.burst)
