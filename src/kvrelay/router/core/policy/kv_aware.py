"""Prompts go where their KV is, by the engines' own word: from the events that their caches publish.

As Dynamo's KV router and llm-d's precise prefix scoring: what an engine would have to compute, plus what it has to do
already, both in tokens; the least of it wins. Requests whose token ids are not known go by text, as with
`kvrelay.router.core.policy.prefix_aware`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from kvrelay.router.core.fleet import Role
from kvrelay.router.core.policy.base import Choice, Policy, Want
from kvrelay.router.core.policy.prefix_aware import PrefixAware, PrefixOptions

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvrelay.router.core.kv.index import KvIndex
    from kvrelay.router.core.policy.base import EngineView, RequestView, Rng

SHARE_WEIGHT = 0.1
"""What one request counts in the share of tokens that an engine had to compute lately."""


class KvOptions(PrefixOptions, frozen=True, forbid_unknown_fields=True):
    """What counts how much; the others are those of ``prefix-aware``, for prompts whose token ids are not known."""

    overlap: Annotated[float, Meta(ge=0.0, le=1_000.0)] = 1.0
    """A token that the engine would have to compute."""
    load: Annotated[float, Meta(ge=0.0, le=1_000.0)] = 1.0
    """A token that it has to do already."""


class KvAware(Policy):
    """The engine with the least to compute."""

    name = "kv-aware"
    wants = frozenset({Want.PREFIX, Want.TOKENS})

    def __init__(self, options: KvOptions, role: Role, index: KvIndex | None = None) -> None:
        """For engines of ``role``. ``index``: what they hold; without one, all goes by text."""
        self._overlap, self._load = options.overlap, options.load
        self._computes = role is Role.PREFILL
        self._by_text = PrefixAware(options, role)
        self._shares: dict[str, float] = {}
        self.index = index

    def choose(self, request: RequestView, engines: Sequence[EngineView], now: float, rng: Rng) -> Choice:
        """``kv``: the most of the prompt is there; ``new``: nobody has any; ``balance``: another has more."""
        index, num_tokens = self.index, len(request.tokens)
        if index is None or not num_tokens:
            return Choice(self._by_text.choose(request, engines, now, rng).engine, "by_text")
        found = index.cached(request.tokens, model=request.model, salt=request.salt)
        held = [found.get(engine.name, 0) for engine in engines]
        overlap, load = self._overlap, self._load
        costs = [load * self._to_do(engine) - overlap * here for engine, here in zip(engines, held, strict=True)]
        least = min(costs)
        equal = [at for at, cost in enumerate(costs) if cost == least]
        chosen = equal[0 if len(equal) == 1 else rng.randrange(len(equal))]
        name, here = engines[chosen].name, held[chosen]
        self._remember(name, 1.0 - here / num_tokens)
        if here < max(held):
            return Choice(name, "balance")
        return Choice(name, "kv" if here else "new")

    def cached(self, request: RequestView) -> Mapping[str, int]:
        """By the index, where the token ids are known."""
        if self.index is None or not request.tokens:
            return {}
        return self.index.cached(request.tokens, model=request.model, salt=request.salt)

    def forget(self, engine: str) -> None:
        """The index hears of it from the engine itself."""
        self._shares.pop(engine, None)
        self._by_text.forget(engine)

    def _to_do(self, engine: EngineView) -> float:
        """Tokens: of prompts being prefilled, those it has to compute, as far as can be told; of decodes, all."""
        if not self._computes or not engine.in_flight_tokens:
            return engine.in_flight_tokens
        return engine.in_flight_tokens * self._shares.get(engine.name, 1.0)

    def _remember(self, engine: str, share: float) -> None:
        before = self._shares.get(engine, 1.0)
        self._shares[engine] = before + SHARE_WEIGHT * (share - before)
