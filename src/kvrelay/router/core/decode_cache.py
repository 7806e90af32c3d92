"""What decode engines have of a prompt in their own caches, as far as a router can tell.

An engine that has answered a prompt has it, until something gives way in its cache, which nobody tells. Its proofs do
say how much of a later prompt it found there; what it is thought to have counts by as much as it turned out to have
lately.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvrelay.router.core.load import Smoothed
from kvrelay.router.core.policy.prefixes import PrefixTracker, bytes_up_to

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvrelay.router.core.policy.base import EngineView, RequestView

CAPACITY = 1 << 17
"""Pieces of prompts remembered."""
MIN_TOLD_TOKENS = 64
"""From here on it is compared what an engine was thought to have, and what it had."""
TRUST_HALF_LIFE_S = 300.0


class DecodeCache:
    """Of all decode engines."""

    __slots__ = ("_tracker", "_trust")

    def __init__(self, capacity: int = CAPACITY) -> None:
        """Nothing is known."""
        self._tracker = PrefixTracker(capacity)
        self._trust: dict[str, Smoothed] = {}

    def best(
        self, request: RequestView, engines: Sequence[EngineView], spare: int, told: Mapping[str, int]
    ) -> tuple[str, int]:
        """The engine that should have a request alone, and how many of its tokens it has; no name if none has any.

        ``spare``: tokens that any engine may compute: of those that have the rest, the least busy is the best; if none
        has, the one that has the most. ``told``: what engines have, where something better than memory says so.
        """
        if not engines:
            return "", 0
        depths = self._tracker.depths(request.prefix, [engine.name for engine in engines])
        held = [
            max(self._trusted(engine.name, _tokens(request, depth)), told.get(engine.name, 0))
            for engine, depth in zip(engines, depths, strict=True)
        ]
        most = max(held)
        if not most:
            return "", 0
        enough = min(most, max(1, request.num_tokens - spare))
        able = [index for index, tokens in enumerate(held) if tokens >= enough]
        best = min(able, key=lambda index: (engines[index].in_flight, -held[index]))
        return engines[best].name, held[best]

    def answered(self, request: RequestView, engine: str) -> int:
        """An engine has computed a prompt, or loaded it. How many of its tokens it was thought to have before."""
        (depth,) = self._tracker.depths(request.prefix, [engine])
        self._tracker.add(request.prefix, engine)
        return _tokens(request, depth)

    def proven(self, engine: str, *, thought: int, had: int, now: float) -> None:
        """It was thought to have so many tokens of a prompt, and says how many it had."""
        if thought >= MIN_TOLD_TOKENS:
            trust = self._trust.get(engine)
            if trust is None:
                trust = self._trust[engine] = Smoothed(TRUST_HALF_LIFE_S)
            trust.add(min(1.0, had / thought), now)

    def forget(self, engine: str) -> None:
        """It has nothing any more."""
        self._tracker.forget(engine)
        self._trust.pop(engine, None)

    def _trusted(self, engine: str, tokens: int) -> int:
        trust = self._trust.get(engine)
        return tokens if trust is None or trust.value is None else int(tokens * trust.value)


def _tokens(request: RequestView, depth: int) -> int:
    """About how many tokens the prompt's first pieces have."""
    return request.num_tokens * bytes_up_to(depth) // request.num_bytes if depth else 0
