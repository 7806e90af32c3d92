"""KV cache events between the engines and the router of one launcher: over UNIX sockets in the run directory.

vLLM binds ``tcp://`` on every interface only, which would show all prompts to the network; ``ipc://`` it binds as told.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from kvrelay.router.core.fleet import Role
from kvrelay.router.core.kv.settings import POLICY

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kvrelay.launch.core.settings import UpSettings

CONFIG_FLAG = "--kv-events-config"


def publishes(settings: UpSettings, role: str) -> bool:
    """Whether engines of a role publish their events."""
    return settings.profile is not None and settings.router.routing.policy_of(Role(role)) == POLICY


def publisher_socket(run_dir: str, engine: str) -> str:
    """Path of the socket where an engine publishes."""
    return f"{run_dir}/ipc/{engine}-kv"


def engine_arguments(run_dir: str, engine: str) -> list[str]:
    """What vLLM is told."""
    published = publisher_socket(run_dir, engine)
    config = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"ipc://{published}",
        "replay_endpoint": f"ipc://{published}r",
    }
    return [CONFIG_FLAG, json.dumps(config, separators=(",", ":"))]


def router_arguments(run_dir: str, engine: str) -> list[str]:
    """What the router is told."""
    published = publisher_socket(run_dir, engine)
    return ["--kv-events", f"{engine}=ipc://{published},ipc://{published}r"]


def kv_events_problems(settings: UpSettings, names: Mapping[str, str]) -> Iterator[str]:
    """What cannot work, each with what would. ``names``: where each setting comes from."""
    routing = settings.router.routing
    pooled = settings.profile is not None and settings.profile.uses_pool
    if settings.router.pool_index and not (pooled and routing.disaggregate_above != "0" and POLICY in routing.policies):
        yield (
            f"router.pool_index (from {names['router.pool_index']}): it needs a connector with a pool, "
            f"--router-disaggregate-above and, for token ids, policy {POLICY}"
        )
    for role in Role:
        if not publishes(settings, role):
            continue
        if (ranks := settings.role(role.value).data_parallel_size or 1) > 1:
            yield (
                f"router: policy {POLICY} with {ranks} data-parallel ranks in a {role} engine: kvrelay up sets events "
                "up for one; start the engines yourself, or choose another policy for them"
            )
        for table in ("engine", role.value):
            if any(argument.partition("=")[0] == CONFIG_FLAG for argument in getattr(settings, table).args):
                path = f"{table}.args"
                yield f"{path} (from {names[path]}): {CONFIG_FLAG} is chosen by kvrelay up with policy {POLICY}"
