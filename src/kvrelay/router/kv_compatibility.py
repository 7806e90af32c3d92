"""Whether the engines behind the router can exchange KV, by what they registered with the pool.

Nobody refuses to serve over it: a decode engine that finds nothing recomputes, correctly and slowly. So it is told.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from kvrelay.identity.core.compat import difference, known_as, strangers
from kvrelay.router.core.kv.pool_keys import naming_of, takes_parts

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from kvrelay.router.core.kv.pool_keys import Naming
    from kvrelay.router.metrics import RouterMetrics
    from kvrelay.wire.messages import Engine

logger = logging.getLogger(__name__)


class KvCompatibility:
    """What the last look at the pool's registered engines found."""

    def __init__(self, names: Collection[str], metrics: RouterMetrics) -> None:
        """``names``: what this router calls its engines, which is what `kvrelay up` registers them as."""
        self._names = names
        self._metrics = metrics
        self.mismatches: tuple[str, ...] = ()
        """One sentence for each two engines that were meant for each other and share no key."""

        self.naming: Naming | None = None
        """How the engines name KV in the pool, where the router can follow."""

        self.can_follow = True
        """Whether decode engines can follow a prefill that is under way: not those that load all or nothing."""

    def take(self, registered: Sequence[Engine]) -> None:
        """Compare. Engines that bear other names count only where none of the router's is registered.

        While one of these is away, started again perhaps, nobody else stands in for it.
        """
        engines = known_as(registered, self._names) or registered
        self.naming = naming_of(engines)
        self.can_follow = all(map(takes_parts, engines))
        apart = strangers(engines)
        pairs: dict[frozenset[str], str] = {}
        for one, other in apart:
            pairs.setdefault(frozenset({one.engine, other.engine}), difference(one, other))
        mismatches = tuple(pairs.values())
        if mismatches and mismatches != self.mismatches:
            logger.error("prompts are computed again on the decode side: %s", ". ".join(mismatches))
        elif self.mismatches and not mismatches:
            logger.info("all registered engines can exchange KV now")
        self.mismatches = mismatches
        self._metrics.kv_mismatches.set(len(apart))
