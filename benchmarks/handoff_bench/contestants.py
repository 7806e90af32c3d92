"""Who is measured: a way KV gets from P to D, how its engines are started and how its legs are called."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvrelay.profiles.base import DecodeLeg
from kvrelay.profiles.registry import PROFILES
from kvrelay.router.core.legs import ClientBody, Endpoint
from kvrelay.types import OnLostKv

if TYPE_CHECKING:
    from collections.abc import Mapping


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

    restless: bool = False
    """Its engines keep cores busy while they have nothing to do: they are halted while it is not its turn."""

    @property
    def pooled(self) -> bool:
        """Whether it hands over through our pool."""
        return self.connector == "kvrelay"

    def prefill_params(self) -> dict[str, Any] | None:
        """What the prefill leg is given."""
        if self.pooled:
            return None  # content-addressed: a leg without a hand-over is saved and loaded all the same
        return _object(PROFILES[self.connector].prefill_params("bench", "P0", ClientBody(Endpoint.COMPLETIONS, {})))

    def decode_params(self, answer: bytes) -> dict[str, Any] | None:
        """What the decode leg is given, from the prefill leg's answer."""
        if self.pooled:
            return None
        profile = PROFILES[self.connector]
        leg = DecodeLeg(handover="bench", worker="D0", prefill="P0", policy=OnLostKv.RECOMPUTE)
        return _object(profile.decode_params(leg, profile.carry(answer)))

    def toml(self, pool: str) -> str:
        """The file with its options; ``pool``: the pool's address over TCP."""
        options = {**self.options, **({"pool": pool} if self.over_tcp else {})}
        lines = [f"{name} = {json.dumps(value)}" for name, value in options.items()]
        return "\n".join(["[connector_options]", *lines, ""])


def _object(raw: bytes | None) -> dict[str, Any] | None:
    return json.loads(raw) if raw else None


CONTESTANTS = {
    contestant.name: contestant
    for contestant in (
        Contestant("kvrelay", "kvrelay"),
        Contestant("kvrelay-async", "kvrelay", options={"sync_load_bytes": 0}),
        Contestant("kvrelay-native", "kvrelay", options={"packing": "native"}),
        Contestant("kvrelay-tcp", "kvrelay", over_tcp=True),
        Contestant("shared-storage", "shared-storage", caches=False, longer_by=1),
        Contestant("nixl", "nixl", restless=True),
    )
}
"""By the name ``--only`` takes."""
