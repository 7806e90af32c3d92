"""A deadline that is cheap to move: the timer is left alone and looks, when it fires, whether it still applies."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable


class Deadline:
    """Calls ``expired`` once the time last given to `set` has come. One timer at most is pending."""

    __slots__ = ("_at", "_expired", "_loop", "_timer", "_timer_at")

    def __init__(self, loop: asyncio.AbstractEventLoop, expired: Callable[[], None]) -> None:
        """Nothing is due yet."""
        self._loop = loop
        self._expired = expired
        self._at = math.inf
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf

    def set(self, after_s: float) -> None:
        """Due in ``after_s`` seconds from now, instead of before."""
        self._at = at = self._loop.time() + after_s
        if self._timer is not None:
            if self._timer_at <= at:
                return
            self._timer.cancel()
        self._arm(at)

    def clear(self) -> None:
        """Not due at all; a pending timer will find nothing to do."""
        self._at = math.inf

    def close(self) -> None:
        """Clear, and let go of the timer."""
        self._at = math.inf
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self, at: float) -> None:
        self._timer_at = at
        self._timer = self._loop.call_at(at, self._fire)

    def _fire(self) -> None:
        self._timer = None
        if self._at == math.inf:
            return
        if self._loop.time() < self._at:
            self._arm(self._at)
            return
        self._at = math.inf
        self._expired()
