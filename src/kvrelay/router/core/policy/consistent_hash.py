"""Sessions stay where they are: highest random weight hashing with bounded loads.

Every engine has a weight for every session, by a hash of both; the heaviest that is not overfull takes it. So a session
moves only when its engine leaves, joins, rests or is overfull, and an engine that leaves spreads its sessions over all
others. (Thaler and Ravishankar 1996; bounded loads: Mirrokni, Thorup and Zadimoghaddam 2016.)
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated

import xxhash
from msgspec import Meta, Struct

from kvrelay.router.core.policy.base import Choice, Policy, Want
from kvrelay.router.core.policy.loads import least_loaded

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvrelay.router.core.policy.base import EngineView, RequestView, Rng


class HashOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """How far loads may differ."""

    bound: Annotated[float, Meta(gt=1.0, le=1000.0)] = 1.25
    """No engine takes a request of a session if it then has more than so many times the mean of requests in flight."""


class ConsistentHash(Policy):
    """One session, one engine. A request of no session goes to the least loaded."""

    name = "consistent-hash"
    wants = frozenset({Want.SESSION})

    def __init__(self, options: HashOptions) -> None:
        """Nothing is remembered of sessions."""
        self._bound = options.bound
        self._seeds: dict[str, int] = {}

    def choose(self, request: RequestView, engines: Sequence[EngineView], now: float, rng: Rng) -> Choice:  # noqa: ARG002
        """The heaviest that has room."""
        if not request.session:
            return Choice(least_loaded(engines, rng, by_tokens=False).name, "no_session")
        in_flight = sum(engine.in_flight for engine in engines) + 1
        room = math.ceil(self._bound * in_flight / len(engines))
        digest = xxhash.xxh3_64_intdigest
        weights = {engine.name: digest(request.session, self._seed(engine.name)) for engine in engines}
        home = max(weights, key=weights.__getitem__)
        with_room = [engine.name for engine in engines if engine.in_flight < room]
        chosen = max(with_room, key=weights.__getitem__)  # not all can be over the mean
        return Choice(chosen, "session" if chosen == home else "overfull")

    def forget(self, engine: str) -> None:
        """It may come again under the same name: with the same weights."""
        self._seeds.pop(engine, None)

    def _seed(self, name: str) -> int:
        seed = self._seeds.get(name)
        if seed is None:
            seed = self._seeds[name] = xxhash.xxh3_64_intdigest(name.encode())
        return seed
