"""Who is measured: a way KV gets from P to D, how its engines are started and how its legs are called."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvrelay.profiles.registry import PROFILES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvrelay.profiles.base import Profile


@dataclass(frozen=True)
class Contestant:
    """``connector``: of ``kvrelay up``, with ``flags``; ``options``: more of its configuration, as TOML values."""

    name: str
    connector: str
    flags: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    over_tcp: bool = False
    """Engines reach the pool over TCP on loopback."""
    caches: bool = True
    """D has a prefix cache of its own; else a hit is one in the plain engine's."""
    longer_by: int = 0
    """Its prompts are so many tokens longer, and D computes so many more of them: it cannot hand over the others."""

    keeps: bool = False
    """P keeps a prompt's KV until D has read it, or for half a minute: what nobody will read is not announced."""

    @property
    def pooled(self) -> bool:
        """Whether it hands over through our pool."""
        return self.connector == "kvrelay"

    @property
    def profile(self) -> Profile:
        """How its legs are called."""
        return PROFILES[self.connector]

    def toml(self, pool: str) -> str:
        """The file with its options; ``pool``: the pool's address over TCP."""
        options = {**self.options, **({"pool": pool} if self.over_tcp else {})}
        lines = [f"{name} = {json.dumps(value)}" for name, value in options.items()]
        return "\n".join(["[connector_options]", *lines, ""])


CONTESTANTS = {
    contestant.name: contestant
    for contestant in (
        Contestant("kvrelay", "kvrelay"),
        Contestant("kvrelay-async", "kvrelay", options={"sync_load_bytes": 0}),
        Contestant("kvrelay-native", "kvrelay", options={"packing": "native"}),
        Contestant("kvrelay-tcp", "kvrelay", over_tcp=True),
        Contestant("shared-storage", "shared-storage", caches=False, longer_by=1),
        Contestant("nixl", "nixl", keeps=True),
    )
}
"""By the name ``--only`` takes."""
