"""Policies by load: chance, the least loaded of all, the less loaded of two."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from msgspec import Struct

from kvrelay.router.core.fleet import Role
from kvrelay.router.core.policy.base import Choice, Policy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvrelay.router.core.policy.base import EngineView, RequestView, Rng


class LoadOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """What a load is."""

    by: Literal["requests", "tokens", "role"] = "role"
    """Requests in flight, or their prompts' tokens. ``role``: tokens for prefill engines, whose work they are; requests
    for decode engines, where each is a place in the batch."""

    def counts_tokens(self, role: Role) -> bool:
        """Whether tokens count first."""
        return self.by == "tokens" or (self.by == "role" and role is Role.PREFILL)


def load_of(engine: EngineView, *, by_tokens: bool) -> tuple[int, int]:
    """To compare by: the other measure decides where the first is equal."""
    requests, tokens = engine.in_flight, engine.in_flight_tokens
    return (tokens, requests) if by_tokens else (requests, tokens)


def least_loaded(engines: Sequence[EngineView], rng: Rng, *, by_tokens: bool) -> EngineView:
    """The engine with the least to do; chance decides between equals."""
    loads = [load_of(engine, by_tokens=by_tokens) for engine in engines]
    least = min(loads)
    equal = [engine for engine, load in zip(engines, loads, strict=True) if load == least]
    return equal[0] if len(equal) == 1 else equal[rng.randrange(len(equal))]


class Chance(Policy):
    """Any."""

    name = "random"

    def choose(self, request: RequestView, engines: Sequence[EngineView], now: float, rng: Rng) -> Choice:  # noqa: ARG002
        """Each with the same probability."""
        return Choice(engines[rng.randrange(len(engines))].name, "chance")


class LeastLoaded(Policy):
    """The one with the least to do, of ours: what others send there is not seen."""

    name = "least-loaded"

    def __init__(self, options: LoadOptions, role: Role) -> None:
        """For engines of ``role``."""
        self._by_tokens = options.counts_tokens(role)

    def choose(self, request: RequestView, engines: Sequence[EngineView], now: float, rng: Rng) -> Choice:  # noqa: ARG002
        """Looks at all."""
        return Choice(least_loaded(engines, rng, by_tokens=self._by_tokens).name, "least")


class PowerOfTwo(Policy):
    """The less loaded of two that chance picks: nearly as even as the least loaded, and no herd of many routers."""

    name = "power-of-two"

    def __init__(self, options: LoadOptions, role: Role) -> None:
        """For engines of ``role``."""
        self._by_tokens = options.counts_tokens(role)

    def choose(self, request: RequestView, engines: Sequence[EngineView], now: float, rng: Rng) -> Choice:  # noqa: ARG002
        """Looks at two."""
        count = len(engines)
        if count == 1:
            return Choice(engines[0].name, "only")
        first = rng.randrange(count)
        second = rng.randrange(count - 1)
        pair = (engines[first], engines[second if second < first else second + 1])
        return Choice(min(pair, key=self._load).name, "less")

    def _load(self, engine: EngineView) -> tuple[int, int]:
        return load_of(engine, by_tokens=self._by_tokens)
