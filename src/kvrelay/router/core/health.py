"""Whether an engine is worth asking: a circuit breaker of consecutive failures.

Only what says something about the engine counts: no connection, a connection lost, silence, a 5xx. What a client can
bring about by what it sends, a 4xx or a 501, never does; nor does 429, by which an engine asks to be left alone now.
"""

from __future__ import annotations

import math

from msgspec import Struct


class HealthSettings(Struct, frozen=True):
    """``failures``: how many in a row open the breaker. Then it rests for ``rest_s``, twice that the next time, ..."""

    failures: int = 3
    rest_s: float = 1.0
    max_rest_s: float = 30.0
    probe_failures: int = 3
    """How many probes in a row must fail for an engine to be down."""


def is_engine_fault(status: int) -> bool:
    """Whether an HTTP status is held against the engine; 501 is about the request, and the same everywhere."""
    return status >= 500 and status != 501


def is_busy(status: int) -> bool:
    """Whether an engine has too much to do: another may have less."""
    return status == 429


def status_reason(status: int) -> str:
    """What a status that another engine is asked over is called in metrics and records."""
    return "busy" if is_busy(status) else "status_5xx"


class Suspicion:
    """Whether one request brings down the engines that are asked. The next is asked only while that is unlikely.

    Engines that were not reached, or that did not take the request (429, 503), prove nothing. Any others that failed
    were working on it.
    """

    __slots__ = ("_failed",)

    LIMIT = 2

    def __init__(self) -> None:
        """Of a new request nothing is known."""
        self._failed = 0

    def confirmed(self, status: int) -> bool:
        """An engine failed with ``status``, its own or what its failure is for a client. Whether to ask no other."""
        if not is_busy(status) and status != 503:
            self._failed += 1
        return self._failed >= self.LIMIT


class Health:
    """The record of one engine."""

    __slots__ = ("_missed", "_on_trial", "_rests", "_settings", "_wakes_at", "down", "failures")

    def __init__(self, settings: HealthSettings) -> None:
        """A new engine is trusted."""
        self._settings = settings
        self._rests = 0
        self._on_trial = False
        self.failures = 0
        """In a row, up to now."""
        self._wakes_at = 0.0
        self._missed = 0
        self.down = False
        """By its probes, which failed several times in a row."""

    @property
    def troubled(self) -> bool:
        """Whether it may be passed over now or later, without anything more happening."""
        return self.down or self._wakes_at > 0.0

    @property
    def resting_until(self) -> float:
        """When its rest ends: never, as far as is known, while it is down."""
        return math.inf if self.down else self._wakes_at

    def is_resting(self, now: float) -> bool:
        """Whether it should be passed over. After a rest it is tried again, and one more failure rests it longer."""
        return self.down or now < self._wakes_at

    def probed(self, now: float, *, well: bool) -> bool:
        """The answer to a probe. Whether it changes what is thought of the engine.

        One that answers probes again is tried with one request at once, whatever was left of its rest. While it
        answers them a probe says nothing about its requests: those have the breaker.
        """
        if not well:
            self._missed += 1
            turned = not self.down and self._missed >= self._settings.probe_failures
            self.down = self.down or turned
            return turned
        turned, self.down, self._missed = self.down, False, 0
        if turned and not self._on_trial:
            self._wakes_at = min(self._wakes_at, now)
        return turned

    def asked(self, now: float) -> None:
        """A request is sent. The first after a rest is a trial: for a while the others go past the engine still."""
        if self.failures >= self._settings.failures and not self.is_resting(now):
            self._on_trial = True
            self._wakes_at = now + self._settings.rest_s

    def succeeded(self) -> None:
        """The engine answered something it is not to be blamed for."""
        self._on_trial = False
        self.failures = 0
        self._rests = self._missed = 0
        self._wakes_at = 0.0
        self.down = False

    def failed(self, now: float) -> bool:
        """A failure of the engine. Whether it goes to rest with this one."""
        self.failures += 1
        if self.failures < self._settings.failures or (self.is_resting(now) and not self._on_trial):
            return False
        self._on_trial = False
        rest = min(self._settings.rest_s * 2**self._rests, self._settings.max_rest_s)
        self._rests = min(self._rests + 1, 32)
        self._wakes_at = now + rest
        return True
