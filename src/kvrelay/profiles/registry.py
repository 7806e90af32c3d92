"""All connectors that launcher and router know, by the name ``--connector`` takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvrelay.profiles.direct import Direct
from kvrelay.profiles.lmcache import LmCache
from kvrelay.profiles.mooncake import Mooncake
from kvrelay.profiles.multi import Multi
from kvrelay.profiles.nixl import Nixl, NixlPush
from kvrelay.profiles.offloading import Offloading
from kvrelay.profiles.pooled import KvRelay
from kvrelay.profiles.shared_storage import SharedStorage

if TYPE_CHECKING:
    from kvrelay.profiles.base import Profile

PROFILES: dict[str, Profile] = {
    profile.name: profile
    for profile in (
        KvRelay(),
        Direct(),
        Nixl(),
        NixlPush(),
        SharedStorage(),
        Multi(),
        Offloading(),
        LmCache(),
        Mooncake(),
    )
}
