"""How a router stands: who its engines are, and the settings that can change while it runs.

Of several workers the first one decides, and the others go over to how it stands: all of it, each time. So it does not
matter what one of them missed, and a worker that comes later, or in another's place, has it from any other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

from kvrelay.router.core.fleet import Address, KvEndpoint, Role  # noqa: TC001 - msgspec looks at them
from kvrelay.router.core.resilience import Resilience  # noqa: TC001
from kvrelay.types import OnLostKv  # noqa: TC001

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvrelay.router.core.fleet import Engine


class FleetMember(Struct, frozen=True):
    """An engine of the fleet."""

    name: str
    role: Role
    address: Address
    kv_events: tuple[KvEndpoint, ...] = ()
    configured: bool = True
    draining: bool = False
    leave_by: float | None = None
    """When it is cut off, on the host's monotonic clock, if it is leaving."""


class LiveSettings(Struct, frozen=True, kw_only=True):
    """Settings that can change, as of the router's configuration; those that are mappings there as pairs."""

    prefills: tuple[Address, ...]
    decodes: tuple[Address, ...]
    kv_events: tuple[tuple[Address, tuple[KvEndpoint, ...]], ...]
    prefill_timeout_s: float
    handover_timeout_s: float
    decode_timeout_s: float
    drain_timeout_s: float
    on_lost_kv: OnLostKv
    max_reprefills: int
    resilience: Resilience


class RouterState(Struct, frozen=True, kw_only=True):
    """All of it. ``version``: what is later is larger; ``numbers``: of each role's next engine."""

    version: int
    members: tuple[FleetMember, ...]
    numbers: dict[Role, int]
    live: LiveSettings


class EngineStatus(Struct, frozen=True):
    """What a worker knows of an engine: the requests it has there, and how it finds it."""

    in_flight: int = 0
    handovers: int = 0
    failures: int = 0
    resting: bool = False
    down: bool = False


def status_of(engine: Engine, now: float) -> EngineStatus:
    """As one worker sees it."""
    health, load = engine.health, engine.load
    return EngineStatus(load.in_flight, load.handovers, health.failures, health.is_resting(now), health.down)


def combined(statuses: Iterable[EngineStatus]) -> EngineStatus:
    """As all workers see it: what they have there is added up, and whoever finds it ill counts."""
    found = list(statuses)
    return EngineStatus(
        sum(status.in_flight for status in found),
        sum(status.handovers for status in found),
        max((status.failures for status in found), default=0),
        any(status.resting for status in found),
        any(status.down for status in found),
    )
