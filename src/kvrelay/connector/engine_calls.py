"""What an engine is told to do of which vLLM tells connectors nothing, or too little, for the scheduler's sides.

Two things may change what an engine's KV is worth without any file of the model changing: adapters that are loaded, and
weights that are replaced while it runs. And caches are dropped for either of two reasons: the engine needs their room,
as before it sleeps, or its weights are others.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvrelay.connector.adapters import Adapter, Adapters
    from kvrelay.connector.scheduler_side import SchedulerSide


class EngineCalls:
    """Told by `kvrelay.connector.compat.watch_engine`, on the scheduler's thread."""

    def __init__(self, sides: Sequence[SchedulerSide], adapters: Adapters | None) -> None:
        self._sides = tuple(sides)
        self._adapters = adapters

    def end(self) -> None:
        """The connector is closed; its process may run another engine."""
        self._sides, self._adapters = (), None

    def adapter_loading(self, adapter: Adapter) -> None:
        """The engine is about to read an adapter's files."""
        if self._adapters is not None:
            self._adapters.loading(adapter)

    def weights_replaced(self, by: str) -> None:
        """The engine's weights are about to become others, or may be."""
        for side in self._sides:
            side.weights_replaced(by)

    @contextmanager
    def dropping(self, *, weights_stay: bool) -> Iterator[None]:
        """While the engine drops its caches, the connector's too, for its own reasons.

        ``weights_stay``: they are what they were, unless `weights_replaced` was called.
        """
        for side in self._sides:
            side.weights_stay = weights_stay
        try:
            yield
        finally:
            for side in self._sides:
                side.weights_stay = False

    def prefix_cache_dropped(self) -> None:
        """The engine's own prefix cache holds nothing any more."""
        if self._adapters is not None:
            self._adapters.cache_dropped({number for side in self._sides for number in side.adapters_in_use})
        for side in self._sides:
            side.prefix_cache_dropped()
