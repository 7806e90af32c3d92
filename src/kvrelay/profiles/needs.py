"""What a way of serving needs of the connector: router and launcher refuse what it cannot, each in words of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

from kvrelay.types import Dispatch, FirstToken, OnLostKv

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvrelay.profiles.base import Profile


class Need(Struct, frozen=True, kw_only=True):
    """What some values of a setting need."""

    setting: str
    """Its name, in the router's settings and the launcher's."""
    values: tuple[str, ...]
    met_by: Callable[[Profile], bool]
    lacking: str
    """How decode engines are described whose connector does not meet it."""
    through_pool: str = ""
    """What the decode side does through the pool; empty if no pool is needed."""
    instead: str
    """The setting's value that needs nothing."""


_NEEDS = (
    Need(
        setting="on_lost_kv",
        values=tuple(policy for policy in OnLostKv if policy is not OnLostKv.RECOMPUTE),
        met_by=lambda profile: profile.tells_of_losses,
        lacking="do not tell of lost KV",
        through_pool="tells",
        instead=OnLostKv.RECOMPUTE,
    ),
    Need(
        setting="dispatch",
        values=(Dispatch.OVERLAPPED,),
        met_by=lambda profile: profile.overlaps,
        lacking="cannot follow a prefill that is still going on",
        through_pool="follows",
        instead=Dispatch.SEQUENTIAL,
    ),
    Need(
        setting="dispatch",
        values=(Dispatch.DECODE_FIRST,),
        met_by=lambda profile: profile.tells_of_losses,
        lacking="do not tell what they lack",
        through_pool="tells",
        instead=Dispatch.SEQUENTIAL,
    ),
    Need(
        setting="first_token",
        values=(FirstToken.PREFILL,),
        met_by=lambda profile: profile.continues,
        lacking="cannot go on from a prefill engine's token",
        instead=FirstToken.DECODE,
    ),
)


def needs_of(settings: object) -> Iterator[tuple[Need, str]]:
    """Each need there is, with the value of ``settings`` that has it."""
    for need in _NEEDS:
        value = getattr(settings, need.setting)
        if value in need.values:
            yield need, value
