"""Requests go where answers come soonest, as measured.

What is expected of an engine is its smoothed time to a first byte, times what it has in flight (Finagle's Peak EWMA).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from msgspec import Meta, Struct

from kvrelay.router.core.fleet import Role
from kvrelay.router.core.policy.base import Choice, Policy, Want
from kvrelay.router.core.policy.loads import least_loaded

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvrelay.router.core.policy.base import EngineView, RequestView, Rng

Milliseconds = Annotated[float, Meta(ge=0.0)]


class LatencyOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """Targets, and how much is risked to learn."""

    ttft_ms: Milliseconds = 0.0
    """The time to a leg's first byte that is good enough; 0: none is."""
    itl_ms: Milliseconds = 0.0
    """The time between two tokens that is good enough; 0: none is. Means nothing to prefill engines."""
    explore: Annotated[float, Meta(ge=0.0, le=0.5)] = 0.02
    """The part of requests that goes anywhere: what an engine that was slow would otherwise never get again."""


class Latency(Policy):
    """With targets, the least loaded of those that meet them; else, or if none does, the one expected to be soonest."""

    name = "latency"
    wants = frozenset({Want.LATENCY})

    def __init__(self, options: LatencyOptions, role: Role) -> None:
        """For engines of ``role``."""
        self._ttft_s = options.ttft_ms / 1e3
        self._itl_s = options.itl_ms / 1e3 if role is Role.DECODE else 0.0
        self._explore = options.explore
        self._by_tokens = role is Role.PREFILL

    def choose(self, request: RequestView, engines: Sequence[EngineView], now: float, rng: Rng) -> Choice:  # noqa: ARG002
        """Engines of which nothing is known yet come first."""
        unknown = [engine for engine in engines if engine.ttft_s is None and not engine.in_flight]
        if unknown:
            return Choice(unknown[rng.randrange(len(unknown))].name, "unknown")
        if self._explore and rng.random() < self._explore:
            return Choice(engines[rng.randrange(len(engines))].name, "explored")
        if self._ttft_s or self._itl_s:
            meeting = [engine for engine in engines if self._lateness(engine) <= 1.0]
            if meeting:
                return Choice(least_loaded(meeting, rng, by_tokens=self._by_tokens).name, "in_time")
        costs = self._costs(engines)
        least = min(costs)
        best = [engine for engine, cost in zip(engines, costs, strict=True) if cost == least]
        return Choice(best[rng.randrange(len(best))].name, "soonest")

    def _lateness(self, engine: EngineView) -> float:
        """The worse of both times as a multiple of its target; what is not known is good."""
        ttft = (engine.ttft_s or 0.0) / self._ttft_s if self._ttft_s else 0.0
        itl = (engine.itl_s or 0.0) / self._itl_s if self._itl_s else 0.0
        return max(ttft, itl)

    def _costs(self, engines: Sequence[EngineView]) -> list[float]:
        """An engine that has not answered yet is taken for as good as the best, and is not overrun."""
        measure = self._lateness if self._ttft_s or self._itl_s else _ttft_s
        measured = [None if engine.ttft_s is None else measure(engine) for engine in engines]
        best = min((value for value in measured if value is not None), default=1.0)
        return [
            (best if value is None else value) * (engine.in_flight + 1)
            for engine, value in zip(engines, measured, strict=True)
        ]


def _ttft_s(engine: EngineView) -> float:
    return engine.ttft_s or 0.0
