"""Changes of the fleet while the router runs: what `Membership` decides, done to connections, metrics and tasks.

An engine that drains gets no new requests. One that is removed drains first, and goes when nobody needs it: its legs
are over, and what it prefilled has been taken by a decode engine, since some connectors have it read from there. What
is not over at the deadline is cut off.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from msgspec import Struct

from kvrelay.errors import ConflictError
from kvrelay.router.core.fleet import Role
from kvrelay.router.core.router_state import FleetMember

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

    from kvrelay.router.core.fleet import Address, Engine, KvEndpoint
    from kvrelay.router.core.membership import Membership, Plan
    from kvrelay.router.engines import Engines

logger = logging.getLogger(__name__)

CUT_OFF_S = 5.0
"""For requests that were cut off to let go."""


async def _nobody_else(engine: str, by: float) -> None:
    """Where there is one worker."""


class Changes(Struct, frozen=True):
    """What a new configuration changed of the fleet, by engines' names."""

    added: list[str]
    kept: list[str]
    moved: list[str]
    leaving: list[str]


class FleetManager:
    """Runs in the router's loop; every method but `close` returns at once."""

    def __init__(
        self,
        membership: Membership,
        engines: Engines,
        changed: Callable[[], None],
        left: Callable[[str, float], Awaitable[None]] = _nobody_else,
    ) -> None:
        """``changed`` is called after every change.

        ``left``: waits until nobody else needs an engine that leaves, by a time on the host's monotonic clock at most.
        """
        self._membership = membership
        self._engines = engines
        self._changed = changed
        self._configured_events: Mapping[Address, Sequence[KvEndpoint]] = {
            engine.address: engine.kv_events for engine in membership.engines
        }
        self._left = left
        self._leaving: dict[str, asyncio.Task[None]] = {}
        self._leave_by: dict[str, float] = {}

    @property
    def engines(self) -> tuple[Engine, ...]:
        """Everybody, in the order in which they joined."""
        return self._membership.engines

    def find(self, name: str) -> Engine:
        """See `Membership.find`."""
        return self._membership.find(name)

    def add(
        self,
        role: Role,
        address: Address,
        name: str = "",
        *,
        configured: bool = False,
        kv_events: Sequence[KvEndpoint] | None = None,
    ) -> Engine:
        """See `Membership.add`. ``kv_events``: None for what the configuration says of the address."""
        if kv_events is None:
            kv_events = self._configured_events.get(address, ())
        engine = self._membership.add(role, address, name, configured=configured, kv_events=kv_events)
        self._engines.join(engine)
        logger.info("%s joins: %s, %s", engine.name, engine.role, engine.address.url)
        self._settle()
        return engine

    def drain(self, name: str) -> Engine:
        """See `Membership.drain`."""
        engine = self._membership.find(name)
        self._membership.drain(engine)
        logger.info("%s drains", name)
        self._changed()
        return engine

    def resume(self, name: str) -> Engine:
        """Have an engine that drains, or is about to leave, take requests again."""
        engine = self._membership.find(name)
        if (task := self._leaving.pop(name, None)) is not None:
            task.cancel()
        self._leave_by.pop(name, None)
        self._membership.resume(engine)
        logger.info("%s takes requests again", name)
        self._changed()
        return engine

    def set_role(self, name: str, role: Role) -> Engine:
        """See `Membership.set_role`. Legs that are under way end as they began."""
        engine = self._membership.find(name)
        if engine.leaving:
            raise ConflictError(f"{name} is leaving: it keeps its role")
        moved = self._membership.set_role(engine, role)
        if moved is not engine:
            self._engines.change_role(engine, moved)
            logger.info("%s is a %s engine now", name, role)
            self._settle()
        return moved

    def set_kv_events(self, name: str, kv_events: Sequence[KvEndpoint]) -> Engine:
        """See `Membership.set_kv_events`. What was known of other publishers of the engine is forgotten."""
        engine = self._membership.find(name)
        self._membership.set_kv_events(engine, kv_events)
        logger.info("%s publishes its KV cache events at %s", name, ", ".join(map(str, kv_events)) or "no place")
        self._settle()
        return engine

    def remove(self, name: str, timeout_s: float) -> Engine:
        """Let an engine go, when nobody needs it or ``timeout_s`` are over; then what is not over is cut off.

        Asked for again the new deadline counts.
        """
        engine = self._membership.find(name)
        self._membership.leave(engine)
        if (task := self._leaving.pop(name, None)) is not None:
            task.cancel()
        self._leave_by[name] = time.monotonic() + timeout_s
        self._leaving[name] = asyncio.create_task(self._leave(engine, timeout_s))
        self._changed()
        return engine

    def plan(self, wanted: Mapping[Address, Role], kv_events: Mapping[Address, Sequence[KvEndpoint]]) -> Plan:
        """See `Membership.plan`."""
        return self._membership.plan(wanted, [where for ranks in kv_events.values() for where in ranks])

    def apply(
        self, plan: Plan, timeout_s: float, kv_events: Mapping[Address, Sequence[KvEndpoint]] | None = None
    ) -> Changes:
        """Carry out a plan made just now. ``timeout_s``: what requests on engines that leave are given.

        ``kv_events``: where the engines that are configured then publish.
        """
        self._configured_events = kv_events = kv_events or {}
        for engine in self._membership.engines:
            if engine.configured or engine in plan.keep:  # before others join, who may publish where they did
                engine.kv_events = tuple(kv_events.get(engine.address, ()))
        added = [self.add(role, address, configured=True).name for role, address in plan.add]
        for engine in plan.keep:
            if engine.leaving:
                self.resume(engine.name)
            engine.configured = True
        moves = sorted(plan.move, key=lambda move: move[1] is Role.PREFILL)  # so that somebody can always answer
        for engine, role in moves:
            self.set_role(engine.name, role)
        for engine in plan.remove:
            self.remove(engine.name, timeout_s)
        self._settle()
        return Changes(
            added,
            [engine.name for engine in plan.keep],
            [engine.name for engine, _ in plan.move],
            [engine.name for engine in plan.remove],
        )

    @property
    def members(self) -> tuple[FleetMember, ...]:
        """Everybody, as another worker is told of them."""
        return tuple(
            FleetMember(
                engine.name, engine.role, engine.address, engine.kv_events, engine.configured, engine.draining,
                self._leave_by.get(engine.name),
            )
            for engine in self._membership.engines
        )  # fmt: skip

    @property
    def numbers(self) -> dict[Role, int]:
        """See `Membership.numbers`."""
        return self._membership.numbers

    def adopt(
        self,
        members: Sequence[FleetMember],
        numbers: Mapping[Role, int],
        kv_events: Mapping[Address, Sequence[KvEndpoint]],
        timeout_s: float,
    ) -> None:
        """Go over to another worker's fleet. ``kv_events``: as of the configuration.

        ``timeout_s``: what requests on engines that are not there any more are given. May be repeated.

        Raises:
            ConflictError: an engine that has to leave first is still here.
        """
        self._configured_events = kv_events
        staying = {member.name: member for member in members if member.leave_by is None}
        for engine in self._membership.engines:
            if (member := staying.get(engine.name)) is not None and engine.kv_events != member.kv_events:
                engine.kv_events = ()
        where = {member.name: member.address for member in members}
        for engine in self._membership.engines:
            if where.get(engine.name) != engine.address and not engine.leaving and engine.load.idle:
                self._drop(engine)
        problem = self._let_in(staying.values())
        for member in sorted(staying.values(), key=lambda member: member.role is Role.PREFILL):
            self._take_up(member)
        for member in members:
            self._rest(member)
        for engine in self._membership.engines:
            if where.get(engine.name) != engine.address and not engine.leaving:
                self.remove(engine.name, timeout_s)
        self._membership.numbers = dict(numbers)
        self._settle()
        if problem is not None:
            raise problem

    def _take_up(self, member: FleetMember) -> None:
        """An engine that stays has the other worker's role for it, and takes requests, if it does there."""
        there = self._known(member.name)
        if there is None or there.address != member.address:
            return
        if there.leaving or (there.draining and not member.draining):
            self.resume(member.name)
        moved = self.set_role(member.name, member.role)
        moved.configured, moved.kv_events = member.configured, member.kv_events

    def _rest(self, member: FleetMember) -> None:
        """An engine takes no requests, or leaves, if it does not there."""
        there = self._known(member.name)
        if there is None or there.address != member.address:
            return
        if member.leave_by is not None and member.leave_by != self._leave_by.get(member.name):
            self.remove(member.name, max(0.0, member.leave_by - time.monotonic()))
            self._leave_by[member.name] = member.leave_by
        elif member.draining and not there.draining:
            self.drain(member.name)

    def _let_in(self, members: Iterable[FleetMember]) -> ConflictError | None:
        """Those that are not here yet, unless another has to leave first."""
        problem = None
        for member in members:
            there = self._known(member.name)
            if there is None or there.address != member.address:
                try:
                    self.add(
                        member.role, member.address, member.name, configured=member.configured,
                        kv_events=member.kv_events,
                    )  # fmt: skip
                except ConflictError as error:
                    problem = error
        return problem

    def _known(self, name: str) -> Engine | None:
        return next((engine for engine in self._membership.engines if engine.name == name), None)

    async def close(self) -> None:
        """Wait for nobody any longer."""
        tasks = list(self._leaving.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _leave(self, engine: Engine, timeout_s: float) -> None:
        load = engine.load
        if not await self._engines.idle(engine, timeout_s):
            logger.warning(
                "%s leaves after %g s: %d requests and %d hand-overs are cut off",
                engine.name, timeout_s, load.in_flight, load.handovers,
            )  # fmt: skip
            self._engines.cut_off(engine)
            await self._engines.idle(engine, CUT_OFF_S)
        await self._left(engine.name, self._leave_by[engine.name] + 2 * CUT_OFF_S)
        del self._leaving[engine.name], self._leave_by[engine.name]
        self._drop(engine)
        self._settle()

    def _drop(self, engine: Engine) -> None:
        self._membership.remove(engine)
        self._engines.leave(engine)
        logger.info("%s has left: %s", engine.name, engine.address.url)

    def _settle(self) -> None:
        self._engines.order(self._membership.engines)
        self._changed()
