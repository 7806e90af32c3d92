"""Who is in the fleet: engines join, drain, change their role and leave while the router runs.

Pure bookkeeping: names, rules, and what a new configuration changes. Waiting and connections are the shell's.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from msgspec import Struct

from kvrelay.errors import BadRequestError, ConflictError, NotFoundError
from kvrelay.router.core.fleet import Address, Engine, Role
from kvrelay.router.core.health import Health, HealthSettings
from kvrelay.router.core.kv.settings import POLICY

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from kvrelay.router.core.fleet import KvEndpoint

MAX_ENGINES = 4_096
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class Plan(Struct, frozen=True):
    """What it takes to get from the fleet there is to the one that is wanted."""

    add: tuple[tuple[Role, Address], ...] = ()
    keep: tuple[Engine, ...] = ()
    """Those that were about to leave, or an administrator had added: they stay, as configured ones."""
    move: tuple[tuple[Engine, Role], ...] = ()
    remove: tuple[Engine, ...] = ()


class Membership:
    """All engines, in the order in which they joined. Every change keeps a decode engine that takes requests."""

    def __init__(
        self, engines: Sequence[Engine], settings: HealthSettings, *, prefills: bool = True, listens: bool = True
    ) -> None:
        """``settings``: of new engines. ``prefills``: whether there may be prefill engines at all.

        ``listens``: whether somebody wants to know what engines' KV caches hold.
        """
        self._engines = list(engines)
        self._settings = settings
        self._prefills = prefills
        self._listens = listens
        self._numbers = {role: sum(engine.role is role for engine in engines) for role in Role}

    @property
    def numbers(self) -> dict[Role, int]:
        """Of each role's next engine."""
        return dict(self._numbers)

    @numbers.setter
    def numbers(self, numbers: Mapping[Role, int]) -> None:
        self._numbers.update(numbers)

    @property
    def engines(self) -> tuple[Engine, ...]:
        """Everybody, draining ones too."""
        return tuple(self._engines)

    def of(self, role: Role) -> tuple[Engine, ...]:
        """Those of one role."""
        return tuple(engine for engine in self._engines if engine.role is role)

    def find(self, name: str) -> Engine:
        """The engine of that name.

        Raises:
            NotFoundError: there is none.
        """
        for engine in self._engines:
            if engine.name == name:
                return engine
        names = ", ".join(engine.name for engine in self._engines)
        raise NotFoundError(f"no engine {name!r}: there are {names}")

    def add(
        self,
        role: Role,
        address: Address,
        name: str = "",
        *,
        configured: bool = False,
        kv_events: Sequence[KvEndpoint] = (),
    ) -> Engine:
        """A new engine; without a ``name`` it gets the next one of its role, P0, P1, ..., D0, D1, ....

        Raises:
            BadRequestError: the name or the role is not legal, or nobody listens to ``kv_events``.
            ConflictError: the name, the address or a publisher is taken, or there are too many engines.
        """
        self._check_role(role)
        self._check_events(kv_events)
        for engine in self._engines:
            if engine.address == address:
                raise ConflictError(f"{address.url} is {engine.name} already, which {_state(engine)}")
            if engine.name == name:
                raise ConflictError(f"{name} is {engine.address.url} already: choose another name")
        if len(self._engines) >= MAX_ENGINES:
            raise ConflictError(f"there are {MAX_ENGINES} engines already: remove one first")
        if name and not _NAME.fullmatch(name):
            raise BadRequestError(f"{name!r} is not a name: letters, digits, dots, dashes and underscores, up to 64")
        engine = Engine(name or self._next_name(role), role, address, Health(self._settings))
        engine.configured, engine.kv_events = configured, tuple(kv_events)
        self._engines.append(engine)
        return engine

    def set_kv_events(self, engine: Engine, kv_events: Sequence[KvEndpoint]) -> None:
        """Its ranks publish there, and nowhere else.

        Raises:
            BadRequestError: nobody listens.
            ConflictError: another engine publishes there.
        """
        self._check_events(kv_events, engine)
        engine.kv_events = tuple(kv_events)

    def drain(self, engine: Engine) -> None:
        """It takes no more requests. May be repeated.

        Raises:
            ConflictError: it is the last decode engine that does.
        """
        self._check_spare(engine)
        engine.draining = True

    def resume(self, engine: Engine) -> None:
        """It takes requests again, and stays."""
        engine.draining = engine.leaving = False

    def leave(self, engine: Engine) -> None:
        """It takes no more requests, and goes once nobody needs it.

        Raises:
            ConflictError: it is the last decode engine that does.
        """
        self.drain(engine)
        engine.leaving = True

    def remove(self, engine: Engine) -> None:
        """It is gone."""
        self._engines.remove(engine)

    def set_role(self, engine: Engine, role: Role) -> Engine:
        """The same engine in another role: another object, which keeps name, health and load.

        Raises:
            BadRequestError: there are no engines of that role here.
            ConflictError: it is the last decode engine that takes requests.
        """
        if engine.role is role:
            return engine
        self._check_role(role)
        self._check_spare(engine)
        moved = Engine(engine.name, role, engine.address, engine.health)
        moved.load, moved.configured, moved.kv_events = engine.load, engine.configured, engine.kv_events
        moved.load.view = None  # it shows the other role
        moved.draining, moved.leaving = engine.draining, engine.leaving
        self._engines.remove(engine)
        self._engines.append(moved)
        return moved

    def plan(self, wanted: Mapping[Address, Role], kv_events: Iterable[KvEndpoint] = ()) -> Plan:
        """What changes if the configuration names these engines. Whom an administrator added, or drained, stays so.

        ``kv_events``: where all of them publish.

        Raises:
            ConflictError: no decode engine would take requests, or one that stays publishes where another is to.
        """
        endpoints = {where.endpoint for where in kv_events}
        for engine in self._engines:
            stays = not engine.configured and engine.address not in wanted
            if stays and (taken := endpoints & {where.endpoint for where in engine.kv_events}):
                raise ConflictError(f"{engine.name}, which was added, publishes at {', '.join(sorted(taken))} already")
        known = {engine.address: engine for engine in self._engines}
        shared = [(known[address], role) for address, role in wanted.items() if address in known]
        joining = [role for address, role in wanted.items() if address not in known]
        staying = [wanted.get(engine.address, engine.role) for engine in self._engines if _will_serve(engine, wanted)]
        if Role.DECODE not in joining + staying:
            raise ConflictError("no decode engine would take requests: add one, or resume one that drains")
        return Plan(
            add=tuple((role, address) for address, role in wanted.items() if address not in known),
            keep=tuple(engine for engine, _ in shared if engine.leaving or not engine.configured),
            move=tuple((engine, role) for engine, role in shared if engine.role is not role),
            remove=tuple(
                engine
                for engine in self._engines
                if engine.configured and not engine.leaving and engine.address not in wanted
            ),
        )

    def check_integrity(self) -> None:
        """For tests: names and addresses are unique, and somebody can answer."""
        for seen in ([engine.name for engine in self._engines], [engine.address for engine in self._engines]):
            assert len(set(seen)) == len(seen)
        assert any(_takes_decodes(engine) for engine in self._engines)
        assert all(engine.draining for engine in self._engines if engine.leaving)

    def _check_events(self, kv_events: Sequence[KvEndpoint], engine: Engine | None = None) -> None:
        if kv_events and not self._listens:
            raise BadRequestError(f"kv_events have no effect without --policy {POLICY}: leave them out")
        endpoints = {where.endpoint for where in kv_events}
        for other in self._engines:
            if other is not engine and (taken := endpoints & {where.endpoint for where in other.kv_events}):
                raise ConflictError(f"{other.name} publishes at {', '.join(sorted(taken))} already")

    def _check_role(self, role: Role) -> None:
        if role is Role.PREFILL and not self._prefills:
            raise BadRequestError("this connector does not hand KV over: there are decode engines only")

    def _check_spare(self, engine: Engine) -> None:
        others = (other for other in self._engines if other is not engine)
        if _takes_decodes(engine) and not any(_takes_decodes(other) for other in others):
            raise ConflictError(f"{engine.name} is the last decode engine that takes requests: add another one first")

    def _next_name(self, role: Role) -> str:
        taken = {engine.name for engine in self._engines}
        while True:
            name = f"{role.value[0].upper()}{self._numbers[role]}"
            self._numbers[role] += 1
            if name not in taken:
                return name


def wanted(prefills: Iterable[Address], decodes: Iterable[Address]) -> dict[Address, Role]:
    """As `Membership.plan` takes it."""
    return {**dict.fromkeys(prefills, Role.PREFILL), **dict.fromkeys(decodes, Role.DECODE)}


def _will_serve(engine: Engine, wanted: Mapping[Address, Role]) -> bool:
    """Whether it takes requests once these are configured."""
    named = engine.address in wanted
    return (named or not engine.configured) and (not engine.draining or (named and engine.leaving))


def _takes_decodes(engine: Engine) -> bool:
    return engine.role is Role.DECODE and not engine.draining


def _state(engine: Engine) -> str:
    return "is leaving: wait until it has" if engine.leaving else "drains" if engine.draining else "takes requests"
