"""Whether what has failed is tried again yet. Pure: callers bring the time.

Used for tiers below the pool, by the connector for its lookups, by the router for its tickets.
"""

from __future__ import annotations

from enum import StrEnum

FAILURES = 3
"""In a row, until it is left alone."""
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0


class State(StrEnum):
    """A circuit's state."""

    CLOSED = "closed"
    """In use."""
    OPEN = "open"
    """Left alone until the pause is over."""
    PROBING = "probing"
    """One operation has been let through to see."""


class Circuit:
    """Opens after `FAILURES` failures in a row; then lets one operation through after each pause, each twice as long.

    ::

        CLOSED ──failures──► OPEN ──pause over, allow──► PROBING ──success──► CLOSED
                               ▲───────────failure──────────┘
    """

    def __init__(
        self,
        *,
        failures: int = FAILURES,
        first_pause_s: float = FIRST_PAUSE_S,
        longest_pause_s: float = LONGEST_PAUSE_S,
    ) -> None:
        self.state = State.CLOSED
        self._most = failures
        self._first_pause_s = self._pause_s = first_pause_s
        self._longest_pause_s = longest_pause_s
        self._failures = 0
        self._until = 0.0

    def ready(self, now: float) -> bool:
        """Whether `allow` would allow an operation now."""
        return self.state is State.CLOSED or (self.state is State.OPEN and now >= self._until)

    def allow(self, now: float) -> bool:
        """Whether to try an operation now. A probe that is allowed must be reported, or nothing else ever is."""
        if self.state is State.CLOSED:
            return True
        if self.state is State.OPEN and now >= self._until:
            self.state = State.PROBING
            return True
        return False

    def succeeded(self) -> None:
        """An operation worked. One that began before the circuit opened does not close it."""
        if self.state is not State.OPEN:
            self.state = State.CLOSED
            self._failures = 0
            self._pause_s = self._first_pause_s

    def failed(self, now: float) -> None:
        """An operation failed."""
        self._failures += 1
        if self.state is State.PROBING:
            self._pause_s = min(2 * self._pause_s, self._longest_pause_s)
            self._open(now)
        elif self.state is State.CLOSED and self._failures >= self._most:
            self._open(now)

    def forgotten(self) -> None:
        """Nobody will know what became of an operation. If it was the probe, the next one is."""
        if self.state is State.PROBING:
            self.state = State.OPEN

    def reset(self) -> None:
        """What failed has been replaced by another, of which nothing is known."""
        self.state = State.CLOSED
        self._failures = 0
        self._pause_s = self._first_pause_s

    def _open(self, now: float) -> None:
        self.state = State.OPEN
        self._until = now + self._pause_s
