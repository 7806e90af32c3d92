"""The engines of one role as a policy sees them, and what its choice means for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvrelay.router.core.policy.base import NO_REQUEST, EngineView, Snapshot, select

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from kvrelay.router.core.fleet import Engine
    from kvrelay.router.core.policy.base import Policy, RequestView, Rng


class Picker:
    """Asks one policy about engines of one role."""

    __slots__ = ("_num_joined", "_orders", "_rng", "on_forgotten", "policy", "why")

    def __init__(self, policy: Policy, rng: Rng) -> None:
        """``rng``: what chance the policy gets."""
        self.policy = policy
        self.why = ""
        """Of the last pick."""
        self.on_forgotten: Callable[[str], None] | None = None
        """Who else is to hear of an engine that has nothing in its cache any more."""
        self._rng = rng
        self._orders: dict[Engine, int] = {}
        self._num_joined = 0

    def pick(
        self,
        engines: Sequence[Engine],
        now: float,
        tried: Collection[Engine] = (),
        request: RequestView = NO_REQUEST,
        prefer: str = "",
    ) -> Engine | None:
        """The engine to ask; None if there is none. ``prefer``: the engine to ask if it is well, whatever the policy.

        ``engines``: all there are, in the order in which they joined; one that was among them and is not any more is
        forgotten. ``tried``: those not to be asked again.
        """
        if len(self._orders) > len(engines):
            self._forget_others(engines)
        offered = {engine.name: engine for engine in engines if engine not in tried}
        engine = offered.get(prefer)
        if engine is not None and not engine.draining and not engine.health.is_resting(now):
            self.why = "preferred"
        else:
            fleet = Snapshot(now, self.views(offered.values(), now))
            choice = select(self.policy, request, fleet, self._rng)
            if choice is None:
                return None
            engine, self.why = offered[choice.engine], choice.why
        engine.health.asked(now)
        return engine

    def views(self, engines: Iterable[Engine], now: float, without: Collection[Engine] = ()) -> tuple[EngineView, ...]:
        """Engines as they are now."""
        return tuple(self._view(engine, now) for engine in engines if engine not in without)

    def _forget_others(self, engines: Collection[Engine]) -> None:
        for engine in [known for known in self._orders if known not in engines]:
            del self._orders[engine]
            self.forget(engine)

    def forget(self, engine: Engine) -> None:
        """What an engine had in its cache it has no more: it is gone, or not the process it was."""
        self.policy.forget(engine.name)
        if self.on_forgotten is not None:
            self.on_forgotten(engine.name)

    def _view(self, engine: Engine, now: float) -> EngineView:
        order = self._orders.get(engine)
        if order is None:
            order = self._orders[engine] = self._num_joined
            self._num_joined += 1
        health, load = engine.health, engine.load
        return EngineView(
            engine.name, engine.role, order, health.is_resting(now), health.resting_until, engine.draining,
            load.in_flight, load.in_flight_tokens, load.ttft.value, load.itl.value,
        )  # fmt: skip
