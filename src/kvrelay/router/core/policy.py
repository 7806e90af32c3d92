"""Who is asked next."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from kvrelay.router.core.fleet import Engine


class RoundRobin:
    """Engines in turn. Those at rest are passed over, unless all are: then the one whose rest ends first is asked."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        """``engines``: of one role, in rotation order."""
        self._engines = tuple(engines)
        self._next = 0

    def pick(self, now: float, tried: Collection[Engine] = ()) -> Engine | None:
        """The next engine that is not among ``tried``; None if there is none.

        The rotation moves on to the one behind the picked one, so that over any stretch in which all are well each is
        picked equally often, give or take one.
        """
        count = len(self._engines)
        best: tuple[float, int] | None = None
        for step in range(count):
            index = (self._next + step) % count
            engine = self._engines[index]
            if engine in tried:
                continue
            if not engine.health.is_resting(now):
                return self._turn_of(index, now)
            if best is None or engine.health.resting_until < best[0]:
                best = (engine.health.resting_until, index)
        return None if best is None else self._turn_of(best[1], now)

    def _turn_of(self, index: int, now: float) -> Engine:
        engine = self._engines[index]
        engine.health.asked(now)
        self._next = (index + 1) % len(self._engines)
        return engine
