"""KV cache events between the engines and the router of one launcher: over UNIX sockets in the run directory.

vLLM binds ``tcp://`` on every interface only, which would show all prompts to the network; ``ipc://`` it binds as told.
Its data-parallel ranks publish at one place each: vLLM adds the rank to a port, or to a name that contains ``inproc``,
whatever the scheme, and refuses others. So our sockets' names contain it.
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


def publisher_socket(run_dir: str, engine: str, rank: int = 0, *, replay: bool = False) -> str:
    """Path of the socket where a rank of an engine publishes, or replays."""
    return f"{run_dir}/ipc/{engine}-kv{'r' * replay}-inproc" + (f"_dp{rank}" if rank else "")


def engine_arguments(run_dir: str, engine: str) -> list[str]:
    """What vLLM is told."""
    config = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"ipc://{publisher_socket(run_dir, engine)}",
        "replay_endpoint": f"ipc://{publisher_socket(run_dir, engine, replay=True)}",
    }
    return [CONFIG_FLAG, json.dumps(config, separators=(",", ":"))]


def router_arguments(run_dir: str, engine: str, num_ranks: int) -> list[str]:
    """What the router is told. ``num_ranks``: data-parallel ones."""
    places = (
        (publisher_socket(run_dir, engine, rank), publisher_socket(run_dir, engine, rank, replay=True))
        for rank in range(num_ranks)
    )
    return [
        word for published, replayed in places
        for word in ("--kv-events", f"{engine}=ipc://{published},ipc://{replayed}")
    ]  # fmt: skip


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
        for table in ("engine", role.value):
            if any(argument.partition("=")[0] == CONFIG_FLAG for argument in getattr(settings, table).args):
                path = f"{table}.args"
                yield f"{path} (from {names[path]}): {CONFIG_FLAG} is chosen by kvrelay up with policy {POLICY}"
