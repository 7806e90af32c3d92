"""The connector's configuration: vLLM's ``kv_connector_extra_config``, checked whole."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from kvrelay.connector.packing import CANONICAL, PACKINGS
from kvrelay.errors import ConfigError
from kvrelay.sizes import parse_size
from kvrelay.transport.address import parse_address
from kvrelay.types import OnLostKv

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

BOUNDS: dict[str, tuple[float, float]] = {
    "chunk_tokens": (1, 4096),
    "load_threads": (1, 64),
    "lookup_timeout_s": (0.001, 600.0),
    "load_timeout_s": (0.001, 600.0),
    "save_timeout_s": (0.001, 600.0),
    "announce_wait_s": (0.0, 10.0),
    "lost_kv_wait_s": (0.0, 600.0),
    "staging_mib": (0, 100_000),
    "reconnect_s": (0.1, 60.0),
    "sync_load_bytes": (0, 1e12),
    "sync_load_idle_bytes": (0, 1e12),
    "sync_load_timeout_s": (0.001, 10.0),
    "max_early_loads": (0, 64),
    "early_load_timeout_s": (0.001, 3600.0),
}
"""Legal values of numbers, both ends included."""
CHOICES: dict[str, tuple[str, ...]] = {"packing": PACKINGS}
"""Legal values of strings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorConfig:
    """Effective values. Times in seconds."""

    pool: str
    """Address of the pool: ``unix:PATH``, ``tcp:HOST:PORT`` or ``tls:HOST:PORT?ca=FILE``. The first of ``pools``."""
    engine: str
    """This engine's name: unique among those that use the pool."""
    pools: dict[str, str] | None = None
    """Instead of ``pool``: addresses of the pools of several prefill engines, by the router's names for these."""
    chunk_tokens: int = 64
    """Tokens in one pool object. Engines exchange KV only if they agree on it."""
    packing: str = CANONICAL
    """``canonical``: for engines of any block size and backend. ``native``: the engine's own blocks, for its equals."""
    token_file: str | None = None
    """File with the pool's token; without it, the environment variable KVRELAY_POOL_TOKEN counts."""
    embedded_pool: str | None = None
    """Run the pool here, at ``pool``, with so much memory, such as ``4GiB``: it comes and goes with this engine."""
    embedded_listen: str | None = None
    """Where that pool also listens for engines of other hosts, ``HOST:PORT``, if ``pool`` is a UNIX socket."""
    weights_id: str | None = None
    """Overrides the weights' identity: must change whenever the weights do."""
    lookup_timeout_s: float = 0.5
    """A lookup unanswered this long is given up; until the pool answers it, no other is begun."""
    load_timeout_s: float = 30.0
    """A load not done by then is given up, and the rest computed here."""
    save_timeout_s: float = 30.0
    """How long a finished request's blocks may wait for its saves."""
    announce_wait_s: float = 0.1
    """How long a step may wait for the pool to hear what it will write."""
    reconnect_s: float = 3.0
    """The longest pause between two attempts to reach a pool that is away."""
    sync_load_bytes: int = 8 << 20
    """Up to so many bytes are loaded in the step that needs them, before its forward pass; 0: none."""
    sync_load_idle_bytes: int = 64 << 20
    """As many, if that is more, while the engine runs no other request."""
    sync_load_timeout_s: float = 0.25
    """A synchronous load not done by then is given up, and the rest computed here."""
    max_early_loads: int = 4
    """Prompts at a time that hold blocks while a prefill engine still computes them (overlapped dispatch); 0: none."""
    early_load_timeout_s: float = 300.0
    """Such a load not done by then is given up, and the rest computed here."""
    load_threads: int = 2
    """Loads at a time on each rank."""
    save_decode: bool = True
    """Save what is generated too, in full chunks, for the next turn; a consumer that does saves what it computes."""
    on_lost_kv: str = "recompute"
    """What a decode leg does that cannot have its KV, where the router says nothing of it."""
    lost_kv_wait_s: float = 5.0
    """How long a request whose KV is lost waits for the router to break it off, before it is computed."""
    staging_mib: int = 1024
    """Host memory of each rank for KV that is staged; 0: none is."""
    allow_load_failures: bool = False
    """Accept kv_load_failure_policy ``fail``: a failed load then fails the request."""
    allow_untested_vllm: bool = False
    """Accept a vLLM version this connector was not tested with."""
    allow_untested_device: bool = False
    """Accept an engine on CUDA, where this connector was not tested."""


_TYPES: dict[str, type | tuple[type, ...]] = {
    "int": int, "float": (int, float), "bool": bool, "dict[str, str] | None": dict,
}  # fmt: skip


def parse_extra_config(extra: Mapping[str, Any], default_engine: str) -> ConnectorConfig:
    """Check ``kv_connector_extra_config``; raises `ConfigError` with every problem found."""
    known = {field.name: str(field.type) for field in fields(ConnectorConfig)}
    problems = [_unknown(name, known) for name in sorted(extra.keys() - known.keys())]
    pools = extra.get("pools")
    if "pool" not in extra and not pools:
        problems.append("pool is missing: set it to the pool's address, unix:PATH, tcp:HOST:PORT or tls:HOST:PORT")
    values: dict[str, Any] = {"engine": default_engine}
    if isinstance(pools, dict) and pools:
        values["pool"] = next(iter(pools.values()))
        if also := sorted({"pool", "embedded_pool"} & extra.keys()):
            problems.append(f"pools is set and so is {' and '.join(also)}: an engine has one pool or several")
    for name, value in extra.items():
        if name not in known or (value is None and "None" in known[name]):
            continue
        expected = _TYPES.get(known[name], str)
        if not isinstance(value, expected) or (isinstance(value, bool) and expected is not bool):
            problems.append(f"{name} must be of type {known[name]}, not {value!r}")
        else:
            values[name] = value
            problems += _out_of_range(name, value)
    if not problems:
        problems += _contradictions(ConnectorConfig(**values))
    if problems:
        raise ConfigError(*problems)
    return ConnectorConfig(**values)


def _unknown(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, known, 1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    return f"kv_connector_extra_config has no {name!r}{hint}; legal: {', '.join(sorted(known))}"


def _contradictions(config: ConnectorConfig) -> list[str]:
    address = parse_address(config.pool)
    if config.embedded_pool is None:
        if config.embedded_listen is None:
            return []
        return [
            "embedded_listen is set without embedded_pool: set that to the memory of the pool to run here, or drop it"
        ]
    if address.tls is not None:
        return [f"embedded_pool cannot be served at {config.pool}: set pool to unix:PATH or tcp:HOST:PORT"]
    if config.embedded_listen is not None and not address.is_unix:
        return ["embedded_listen is set although pool is a TCP address, where it listens already: drop it"]
    return []


def _bad_address(address: str) -> list[str]:
    try:
        parse_address(address)
    except ConfigError as error:
        return list(error.problems)
    return []


def _out_of_range(name: str, value: Any) -> list[str]:
    if name == "pool":
        return _bad_address(value)
    if name == "pools":
        wrong = [f"pools: the address of {engine} is {at!r}" for engine, at in value.items() if not isinstance(at, str)]
        return wrong or [f"pools: {engine}: {bad}" for engine, at in value.items() for bad in _bad_address(at)]
    if name == "embedded_pool":
        try:
            parse_size(value)
        except ValueError as error:
            return [f"embedded_pool = {value!r}: {error}"]
    policies = [policy.value for policy in OnLostKv]
    if name == "on_lost_kv" and value not in policies:
        return [f"on_lost_kv must be one of {', '.join(policies)}, not {value!r}"]
    if name == "engine" and not value:
        return ["engine must not be empty"]
    if name in CHOICES and value not in CHOICES[name]:
        return [f"{name} must be one of {', '.join(map(repr, CHOICES[name]))}, not {value!r}"]
    if name in BOUNDS and not BOUNDS[name][0] <= value <= BOUNDS[name][1]:
        return [f"{name} must be between {BOUNDS[name][0]} and {BOUNDS[name][1]}, not {value}"]
    return []
