"""Engines in turn."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvrelay.router.core.policy.base import Choice, Policy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvrelay.router.core.policy.base import EngineView, RequestView, Rng


class RoundRobin(Policy):
    """Each in turn: over any stretch in which all are well each is chosen equally often, give or take one."""

    name = "round-robin"

    def __init__(self) -> None:
        """Begins with the first."""
        self._last = -1

    def choose(self, request: RequestView, engines: Sequence[EngineView], now: float, rng: Rng) -> Choice:  # noqa: ARG002
        """The one behind the last chosen, whoever joined or left since."""
        chosen = next((engine for engine in engines if engine.order > self._last), engines[0])
        self._last = chosen.order
        return Choice(chosen.name, "turn")
