"""How a router stands: who its engines are, and the settings that can change while it runs.

Of several workers the first one decides, and the others go over to how it stands: all of it, each time. So it does not
matter what one of them missed, and a worker that comes later, or in another's place, has it from any colleague.
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


class Member(Struct, frozen=True):
    """An engine of the fleet."""

    name: str
    role: Role
    address: Address
    kv_events: tuple[KvEndpoint, ...] = ()
    configured: bool = True
    draining: bool = False
    leave_by: float | None = None
    """When it is cut off, on the host's monotonic clock, if it is leaving."""


class Live(Struct, frozen=True, kw_only=True):
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


class Standing(Struct, frozen=True, kw_only=True):
    """All of it. ``version``: what is later is larger; ``numbers``: of each role's next engine."""

    version: int
    members: tuple[Member, ...]
    numbers: dict[Role, int]
    live: Live


class Duty(Struct, frozen=True):
    """What a worker knows of an engine: the requests it has there, and how it finds it."""

    in_flight: int = 0
    handovers: int = 0
    failures: int = 0
    resting: bool = False
    down: bool = False


def duty_of(engine: Engine, now: float) -> Duty:
    """As one worker sees it."""
    health, load = engine.health, engine.load
    return Duty(load.in_flight, load.handovers, health.failures, health.is_resting(now), health.down)


def together(duties: Iterable[Duty]) -> Duty:
    """As all workers see it: what they have there is added up, and whoever finds it ill counts."""
    found = list(duties)
    return Duty(
        sum(duty.in_flight for duty in found),
        sum(duty.handovers for duty in found),
        max((duty.failures for duty in found), default=0),
        any(duty.resting for duty in found),
        any(duty.down for duty in found),
    )
