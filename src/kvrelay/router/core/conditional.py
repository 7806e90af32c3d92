"""Conditional disaggregation: which prompts are worth a prefill engine.

What a decode engine would have to compute of a prompt, its *rest*, is the prompt less what the engine has in its cache
already. A rest of up to the threshold is computed where it is decoded: no second queue, no transfer. The threshold is
given, or learnt (`LearntThreshold`) from times to the first byte.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct

from kvrelay.router.core.load import Smoothed

if TYPE_CHECKING:
    from kvrelay.router.core.policy.base import Rng

AUTO = "auto"
"""Instead of a number: learn it."""


class Verdict(Struct, frozen=True):
    """What was decided of one prompt, and on what grounds."""

    alone: bool
    """A decode engine does it all."""
    why: str
    """``short``, ``cached``, ``long``, ``unsized`` or ``explored``."""
    tokens: int
    """Of the prompt, estimated."""
    cached: int = 0
    """Of which the decode engine has, as far as is known."""
    above: int = 0
    """The threshold at that time."""
    decode: str = ""
    """The engine that has them."""


class Threshold(Protocol):
    """Decides by the size of a rest."""

    @property
    def above(self) -> int:
        """A rest of more tokens is worth a prefill engine, as things stand."""

    def alone(self, rest: int) -> tuple[bool, bool]:
        """Whether a decode engine does it all; and whether only to learn what that is worth."""

    def measured(self, rest: int, ttft_s: float, now: float, *, alone: bool) -> None:
        """What a streamed answer took to its first byte."""


class FixedThreshold:
    """A number given by hand."""

    def __init__(self, above: int) -> None:
        """0: every prompt is worth a prefill engine."""
        self.above = above

    def alone(self, rest: int) -> tuple[bool, bool]:
        """By the number."""
        return rest <= self.above, False

    def measured(self, rest: int, ttft_s: float, now: float, *, alone: bool) -> None:
        """Changes nothing."""


EDGES = tuple(round(32 * 2 ** (half / 2)) for half in range(31))
"""Upper ends of the size classes, in tokens: half an octave each, 32 to 1 Mi; one more class is above."""


class _Class:
    """What is known of rests of about one size."""

    __slots__ = ("alone", "alone_is_better", "split")

    HALF_LIFE_S = 300.0

    def __init__(self) -> None:
        self.alone = Smoothed(self.HALF_LIFE_S)
        self.split = Smoothed(self.HALF_LIFE_S)
        self.alone_is_better: bool | None = None
        """None: not measured both ways often enough."""


class LearntThreshold:
    """A threshold from measured times to the first byte, both ways, by size class.

    A way counts as better in a class when its mean is by a tenth below the other's, and stays so until the other's is
    (hysteresis). The threshold is the upper end of the largest class in which doing it alone is better while it is in
    every smaller one that has been measured. What is not known is found out: a share of the requests goes the other
    way, more while little is known, and never one that is expected to take more than twice as long for it.
    """

    MIN_MEASURED = 4
    """Times, each way, before a class is judged."""
    MARGIN = 0.1
    EXPLORE, EXPLORE_UNKNOWN = 0.02, 0.25
    """Share of requests that go the other way: where both ways are known; where one is not."""
    MAX_BLIND_TOKENS = 4_096
    """The largest rest tried alone when nothing is known of smaller ones."""
    MAX_WORSE = 2.0

    def __init__(self, rng: Rng) -> None:
        """At first, every prompt is worth a prefill engine."""
        self._rng = rng
        self._classes = [_Class() for _ in range(len(EDGES) + 1)]
        self.above = 0

    def alone(self, rest: int) -> tuple[bool, bool]:
        """By the threshold, or to learn."""
        usual = rest <= self.above
        known = self._classes[bisect_left(EDGES, rest)]
        other = known.split if usual else known.alone
        share = self.EXPLORE if other.count >= self.MIN_MEASURED else self.EXPLORE_UNKNOWN
        if self._rng.random() < share and (usual or self._bearable(rest)):
            return not usual, True
        return usual, False

    def measured(self, rest: int, ttft_s: float, now: float, *, alone: bool) -> None:
        """What a streamed answer took to its first byte."""
        known = self._classes[bisect_left(EDGES, rest)]
        (known.alone if alone else known.split).add(ttft_s, now)
        self._judge(known)
        self.above = self._find()

    def _judge(self, known: _Class) -> None:
        alone, split = known.alone, known.split
        if min(alone.count, split.count) < self.MIN_MEASURED or alone.value is None or split.value is None:
            return
        if alone.value < split.value * (1 - self.MARGIN):
            known.alone_is_better = True
        elif split.value < alone.value * (1 - self.MARGIN) or known.alone_is_better is None:
            known.alone_is_better = False

    def _find(self) -> int:
        above = 0
        for known, edge in zip(self._classes, (*EDGES, 1 << 62), strict=True):
            if known.alone_is_better is False:
                break
            if known.alone_is_better:
                above = edge
        return above

    def _bearable(self, rest: int) -> bool:
        """Whether trying a rest alone is not much worse, as far as its class, or the next smaller known, can say."""
        index = bisect_left(EDGES, rest)
        for below in range(index, -1, -1):
            known = self._classes[below]
            if known.alone.value is None:
                continue
            expected = known.alone.value * max(1.0, rest / EDGES[min(below, len(EDGES) - 1)])
            split = self._classes[index].split.value
            return split is not None and expected <= self.MAX_WORSE * split
        return rest <= self.MAX_BLIND_TOKENS


class Conditional:
    """Decides for each prompt."""

    __slots__ = ("threshold",)

    def __init__(self, threshold: Threshold) -> None:
        """By this threshold."""
        self.threshold = threshold

    def judge(self, tokens: int, *, sized: bool, cached: int = 0, decode: str = "") -> Verdict:
        """``cached``: what the engine ``decode`` has of the prompt; ``sized``: whether ``tokens`` means anything."""
        above = self.threshold.above
        if not sized:
            return Verdict(alone=False, why="unsized", tokens=tokens, above=above)
        rest = max(1, tokens - cached)
        alone, explored = self.threshold.alone(rest)
        if explored:
            why = "explored"
        elif alone:
            why = "short" if tokens <= above else "cached"
        else:
            why = "long"
        return Verdict(alone, why, tokens, cached, above, decode if alone and cached else "")
