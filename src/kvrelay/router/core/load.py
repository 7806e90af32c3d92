"""What an engine is doing for us, and how fast it lately was."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvrelay.router.core.policy.base import EngineView


class Smoothed:
    """A mean in which what was measured counts less as it ages: half of it after ``half_life_s``."""

    __slots__ = ("_at", "_half_life_s", "_weight", "count", "value")

    def __init__(self, half_life_s: float) -> None:
        """Nothing is measured yet."""
        self._half_life_s = half_life_s
        self._weight = 0.0
        self._at = 0.0
        self.count = 0
        self.value: float | None = None

    def add(self, measured: float, now: float) -> None:
        """One more. The mean of the first few is their plain mean."""
        self._weight = self._weight * math.exp2(-max(0.0, now - self._at) / self._half_life_s) + 1.0
        self._at = now
        self.count += 1
        self.value = measured if self.value is None else self.value + (measured - self.value) / self._weight


class Load:
    """Of one engine."""

    __slots__ = ("handovers", "in_flight", "in_flight_tokens", "itl", "ttft", "view")

    HALF_LIFE_S = 10.0

    def __init__(self) -> None:
        """Idle and unknown."""
        self.in_flight = 0
        self.handovers = 0
        """Prompts it has prefilled and no decode engine has taken yet: it may hold their KV."""
        self.in_flight_tokens = 0
        """Of prompts, estimated."""
        self.ttft = Smoothed(self.HALF_LIFE_S)
        """Seconds from sending a leg to its first byte; `add_ttft` adds to it."""
        self.itl = Smoothed(self.HALF_LIFE_S)
        """Seconds between two tokens of a stream; `add_itl` adds to it."""
        self.view: EngineView | None = None
        """What a policy was last shown of the engine; None once the load is another."""

    def add_ttft(self, seconds: float, now: float) -> None:
        """One more."""
        self.ttft.add(seconds, now)
        self.view = None

    def add_itl(self, seconds: float, now: float) -> None:
        """One more."""
        self.itl.add(seconds, now)
        self.view = None

    @property
    def idle(self) -> bool:
        """Whether nobody needs it now."""
        return not self.in_flight and not self.handovers

    def begin(self, num_tokens: int) -> None:
        """A request with a prompt of so many tokens is sent."""
        self.in_flight += 1
        self.in_flight_tokens += num_tokens
        self.view = None

    def end(self, num_tokens: int) -> None:
        """It is over, however."""
        self.in_flight -= 1
        self.in_flight_tokens -= num_tokens
        self.view = None
