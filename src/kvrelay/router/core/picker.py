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
        offered = [engine for engine in engines if engine not in tried] if tried else engines
        engine = _named(prefer, offered) if prefer else None
        if engine is not None and not engine.draining and not engine.health.is_resting(now):
            self.why = "preferred"
        else:
            choice = select(self.policy, request, Snapshot(now, self.views(offered, now)), self._rng)
            if choice is None:
                return None
            engine, self.why = _named(choice.engine, offered), choice.why
            assert engine is not None
        engine.health.asked(now)
        return engine

    def views(self, engines: Iterable[Engine], now: float, without: Collection[Engine] = ()) -> tuple[EngineView, ...]:
        """Engines as they are now. From one request to the next few of a fleet change: the others' views are kept."""
        views = []
        for engine in engines:
            if without and engine in without:
                continue
            view = engine.load.view
            if (
                view is None
                or engine.health.troubled
                or view.resting
                or view.draining is not engine.draining
                or view.role is not engine.role
            ):
                view = engine.load.view = self._view(engine, now)
            views.append(view)
        return tuple(views)

    def _forget_others(self, engines: Collection[Engine]) -> None:
        for engine in [known for known in self._orders if known not in engines]:
            del self._orders[engine]
            engine.load.view = None
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


def _named(name: str, engines: Iterable[Engine]) -> Engine | None:
    for engine in engines:
        if engine.name == name:
            return engine
    return None
