"""A new configuration for a router that runs: all of it, or nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from kvrelay.errors import ConfigError
from kvrelay.router.core.router_state import LiveSettings
from kvrelay.router.setting_names import differences

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvrelay.router.config import RouterConfig
    from kvrelay.router.fleet_manager import Changes

LIVE = frozenset(LiveSettings.__struct_fields__)
"""What can change while the router runs."""


class Applied(Struct, frozen=True):
    """What a new configuration changed. ``settings``: names of those that have another value now."""

    fleet: Changes
    settings: list[str]

    def told(self) -> str:
        """For the log."""
        fleet = self.fleet
        parts = (
            ("new engines", fleet.added),
            ("engines that stay", fleet.kept),
            ("engines that change their role", fleet.moved),
            ("engines that leave", fleet.leaving),
            ("settings with another value", self.settings),
        )
        return "; ".join(f"{what}: {', '.join(names)}" for what, names in parts if names) or "it changes nothing"


def changed(old: RouterConfig, new: RouterConfig) -> list[str]:
    """The settings that differ. What the file of keys holds is none: it has a reload of its own."""
    return [name for _, name in differences(old, new)]


def fixed_problems(old: RouterConfig, new: RouterConfig) -> Iterator[str]:
    """What differs and cannot change while the router runs. Values stay untold: some are secrets."""
    for field, name in differences(old, new):
        if field not in LIVE:
            yield f"{name} cannot change while the router runs: leave it as it was, or restart the router"


def live_of(config: RouterConfig) -> LiveSettings:
    """The settings that can change, to be told to other workers."""
    values = {name: getattr(config, name) for name in LIVE}
    return LiveSettings(**{**values, "kv_events": tuple(config.kv_events.items())})


def with_live(config: RouterConfig, live: LiveSettings) -> RouterConfig:
    """A configuration with another worker's settings."""
    values = {name: getattr(live, name) for name in LIVE}
    return replace(config, **{**values, "kv_events": dict(live.kv_events)})


def as_it_is_now(config: RouterConfig, read: Callable[[], RouterConfig] | None) -> RouterConfig:
    """For a worker that starts: what the others have gone over to, if ``config`` has been reloaded since."""
    if read is None:
        return config
    try:
        now = read()
    except ConfigError:
        return config  # the others have refused it, and said so
    return config if list(fixed_problems(config, now)) else now
