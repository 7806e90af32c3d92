"""All policies by name, and how a setting names one: ``NAME`` or ``NAME:OPTION=VALUE,OPTION=VALUE``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from kvrelay.errors import BadRequestError
from kvrelay.router.core.policy.consistent_hash import ConsistentHash, HashOptions
from kvrelay.router.core.policy.kv_aware import KvAware, KvOptions
from kvrelay.router.core.policy.latency import Latency, LatencyOptions
from kvrelay.router.core.policy.loads import Chance, LeastLoaded, LoadOptions, PowerOfTwo
from kvrelay.router.core.policy.prefix_aware import PrefixAware, PrefixOptions
from kvrelay.router.core.policy.round_robin import RoundRobin

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvrelay.router.core.fleet import Role
    from kvrelay.router.core.policy.base import Policy


class NoOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """Of a policy that has none."""


class Kind(Struct, frozen=True):
    """One kind of policy."""

    make: Callable[[Any, Role], Policy]
    """Of an instance of ``options``, for engines of one role."""
    options: type[Struct] = NoOptions
    """Fields with defaults and limits; unknown ones forbidden."""


POLICIES: dict[str, Kind] = {
    RoundRobin.name: Kind(lambda _options, _role: RoundRobin()),
    Chance.name: Kind(lambda _options, _role: Chance()),
    LeastLoaded.name: Kind(LeastLoaded, LoadOptions),
    PowerOfTwo.name: Kind(PowerOfTwo, LoadOptions),
    ConsistentHash.name: Kind(lambda options, _role: ConsistentHash(options), HashOptions),
    PrefixAware.name: Kind(PrefixAware, PrefixOptions),
    KvAware.name: Kind(KvAware, KvOptions),
    Latency.name: Kind(Latency, LatencyOptions),
}
DEFAULT = RoundRobin.name


def make_policy(spec: str, role: Role) -> Policy:
    """The policy that ``spec`` names, for engines of ``role``.

    Raises:
        BadRequestError: there is no such policy or option, or a value is not legal; the message says which are.
    """
    name, _, text = spec.partition(":")
    kind = POLICIES.get(name)
    if kind is None:
        raise BadRequestError(f"{name!r} is not a policy: choose one of {', '.join(sorted(POLICIES))}")
    given: dict[str, str] = {}
    for item in filter(None, text.split(",")):
        option, equals, value = item.partition("=")
        if not equals or option in given:
            raise BadRequestError(f"{item!r} in {spec!r}: write NAME:OPTION=VALUE,OPTION=VALUE, each option once")
        given[option] = value
    try:
        return kind.make(msgspec.convert(given, type=kind.options, strict=False), role)
    except msgspec.ValidationError as error:
        legal = ", ".join(kind.options.__struct_fields__) or "none"
        raise BadRequestError(f"{spec!r}: {error}; options of {name}: {legal}") from None
