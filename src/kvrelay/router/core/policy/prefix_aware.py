"""Prompts go where their beginnings are: approximate, from what this router has sent where.

As SGLang's and vllm-router's ``cache_aware``: an engine that has seen enough of the prompt takes it, unless loads are
out of balance; then, and where no engine has seen enough, the least loaded does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from kvrelay.router.core.policy.base import Choice, Policy, Want
from kvrelay.router.core.policy.loads import LoadOptions, load_of
from kvrelay.router.core.policy.prefixes import PrefixTracker

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvrelay.router.core.fleet import Role
    from kvrelay.router.core.policy.base import EngineView, RequestView, Rng


class PrefixOptions(LoadOptions, frozen=True, forbid_unknown_fields=True):
    """When a known prefix counts."""

    threshold: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.5
    """The part of a prompt that an engine must have seen."""
    balance_abs: Annotated[int, Meta(ge=0)] = 32
    """Loads are out of balance when the most requests in flight are more than this above the fewest ..."""
    balance_rel: Annotated[float, Meta(ge=1.0)] = 1.5
    """... and more than this many times as many."""
    capacity: Annotated[int, Meta(ge=1_024, le=1 << 24)] = 1 << 17
    """Pieces of prompts remembered."""


class PrefixAware(Policy):
    """The engine that has seen the most of the prompt."""

    name = "prefix-aware"
    wants = frozenset({Want.PREFIX})

    def __init__(self, options: PrefixOptions, role: Role) -> None:
        """For engines of ``role``."""
        self._options = options
        self._by_tokens = options.counts_tokens(role)
        self._tracker = PrefixTracker(options.capacity)

    def choose(self, request: RequestView, engines: Sequence[EngineView], now: float, rng: Rng) -> Choice:  # noqa: ARG002
        """And remembers that this engine will have it."""
        prefix = request.prefix
        best = self._best(prefix, engines)
        if best is None:
            chosen, why = self._emptiest(engines, rng), "new"
        elif self._out_of_balance(engines):
            chosen, why = self._emptiest(engines, rng), "balance"
        else:
            chosen, why = best, "prefix"
        if prefix:
            self._tracker.add(prefix, chosen.name)
        return Choice(chosen.name, why)

    def forget(self, engine: str) -> None:
        """It has nothing any more."""
        self._tracker.forget(engine)

    def _best(self, prefix: Sequence[int], engines: Sequence[EngineView]) -> EngineView | None:
        if not prefix:
            return None
        depths = self._tracker.depths(prefix, [engine.name for engine in engines])
        deepest = max(depths)
        if not deepest or deepest < self._options.threshold * len(prefix):
            return None
        best = [engine for engine, depth in zip(engines, depths, strict=True) if depth == deepest]
        return min(best, key=lambda engine: load_of(engine, by_tokens=self._by_tokens))

    def _out_of_balance(self, engines: Sequence[EngineView]) -> bool:
        in_flight = [engine.in_flight for engine in engines]
        most, least = max(in_flight), min(in_flight)
        return most - least > self._options.balance_abs and most > self._options.balance_rel * least

    def _emptiest(self, engines: Sequence[EngineView], rng: Rng) -> EngineView:
        """The least loaded; of equals, the one that has seen least, so that prompts spread."""
        sizes = self._tracker.size
        ranks = [(*load_of(engine, by_tokens=self._by_tokens), sizes(engine.name)) for engine in engines]
        least = min(ranks)
        equal = [engine for engine, rank in zip(engines, ranks, strict=True) if rank == least]
        return equal[rng.randrange(len(equal))]
