"""Every setting of ``kvrelay up``: its type, its default, what it means, and its three names.

A setting has one dotted path, such as ``prefill.max_num_batched_tokens``. That is its name in the TOML file; `flag_of`
and `variable_of` derive the flag and the environment variable from it.
"""

from __future__ import annotations

import shlex
from pathlib import Path  # noqa: TC003 - pydantic reads the annotations at run time
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from kvrelay.hosts import is_host
from kvrelay.profiles.base import Pool
from kvrelay.profiles.registry import PROFILES
from kvrelay.router.core.kv.settings import TokenIds
from kvrelay.router.core.routing import RoutingSettings
from kvrelay.settings import Settings, leaves_of
from kvrelay.sizes import parse_size
from kvrelay.types import Dispatch, FirstToken, OnLostKv, Tokenising

if TYPE_CHECKING:
    from kvrelay.profiles.base import Profile


NO_CONNECTOR = "none"
"""Plain engines, no router."""


def _read_size(text: object) -> object:
    """A size may be written with its unit."""
    return parse_size(text) if isinstance(text, str) else text


def _split(text: object) -> object:
    """A command line's worth of arguments may be one string."""
    if not isinstance(text, str):
        return text
    return shlex.split(text)


def _plain(pairs: dict[str, Any]) -> dict[str, Any]:
    for name, value in pairs.items():
        if not isinstance(value, str | int | float | bool):
            raise ValueError(f"{name} must be a string, a number or a boolean")  # noqa: TRY004 - pydantic reports ValueError
    return pairs


def _host(name: str) -> str:
    if not is_host(name):
        raise ValueError("is not a host name; give a name or an address, such as 127.0.0.1")
    return name


def _known(connector: str) -> str:
    legal = (*PROFILES, NO_CONNECTOR)
    if connector not in legal:
        raise ValueError(f"unknown connector; choose one of {', '.join(map(repr, legal))}")
    return connector


Size = Annotated[int, BeforeValidator(_read_size), Field(gt=0)]
Port = Annotated[int, Field(ge=1, le=65535)]
Arguments = Annotated[tuple[str, ...], BeforeValidator(_split)]


class EngineSettings(Settings):
    """What vLLM is told. Unset: vLLM's own default. Anything not listed here goes into ``args``."""

    dtype: str | None = Field(default=None, description="type of weights and activations, such as float32")
    kv_cache_dtype: str | None = Field(default=None, description="type of the KV cache")
    kv_cache_memory: Size | None = Field(
        default=None, description="KV cache of one rank, such as 2GiB (on CPUs 1GiB if unset)"
    )
    gpu_memory_utilization: float | None = Field(
        default=None, gt=0, le=1, description="fraction of the device's memory"
    )
    block_size: int | None = Field(default=None, gt=0, description="tokens in a KV block")
    max_model_len: int | None = Field(default=None, gt=0, description="longest prompt and answer, in tokens")
    max_num_batched_tokens: int | None = Field(default=None, gt=0, description="tokens computed in one step at most")
    max_num_seqs: int | None = Field(default=None, gt=0, description="requests computed at once at most")
    tensor_parallel_size: int | None = Field(
        default=None, gt=0, le=1024, description="ranks each layer of one engine is split over"
    )
    pipeline_parallel_size: int | None = Field(
        default=None,
        gt=0,
        le=1024,
        description="stages the layers of one engine are split over (on CPUs not with enforce_eager)",
    )
    data_parallel_size: int | None = Field(
        default=None, gt=0, le=1024, description="replicas behind one engine's address"
    )
    enforce_eager: bool | None = Field(default=None, description="do not compile: quicker start, slower tokens")
    args: Arguments = Field(default=(), description="more arguments for vLLM, as one string or a list")
    env: dict[str, str] = Field(default={}, description="environment variables of the engine")


class RoleSettings(EngineSettings):
    """Engines of one role: what differs from ``[engine]``, how many, and where."""

    count: int = Field(default=1, ge=0, le=64, description="how many engines")
    cpus: Arguments = Field(
        default=(),
        description="cores of each engine as vLLM writes them (VLLM_CPU_OMP_THREADS_BIND): 0-3, or 0|1 for two ranks",
    )


class PoolSettings(Settings):
    """The KV memory pool."""

    size: Size = Field(default=4 << 30, description="memory for KV, such as 4GiB")
    port: Port | None = Field(default=None, description="TCP port on 127.0.0.1 (none if unset: a UNIX socket alone)")
    token_file: Path | None = Field(default=None, description="file with the token that clients must show")
    args: Arguments = Field(default=(), description="more arguments for `kvrelay pool serve`")


class RouterSettings(Settings):
    """The router, in front of the engines."""

    policy: str = Field(default="round-robin", description="which engine is asked (docs/router-routing.md)")
    prefill_policy: str | None = Field(default=None, description="for prefill engines (as router.policy if unset)")
    decode_policy: str | None = Field(default=None, description="for decode engines (as router.policy if unset)")
    session_header: str = Field(default="x-session-id", description="header that names a request's session")
    disaggregate_above: str = Field(
        default="0", description="shorter prompts go to a decode engine alone: tokens, or auto to learn the number"
    )
    colocated_fallback: bool = Field(default=False, description="let a prefill engine answer when no decode engine can")
    token_ids: TokenIds = Field(
        default=TokenIds.ENGINE, description="who turns text into token ids for the policy kv-aware"
    )
    workers: int = Field(default=1, ge=1, le=256, description="processes of the router, for more than one core")
    keys_file: Path | None = Field(
        default=None, description="API keys that clients must show one of (docs/router-limits.md)"
    )
    max_concurrent: int = Field(default=0, ge=0, description="requests served at once, 0 for as many as come")
    max_per_decode: int = Field(
        default=0, ge=0, description="requests served at once for each decode engine, 0 for as many as come"
    )
    tls_cert: Path | None = Field(default=None, description="PEM file of a certificate chain: clients speak TLS")
    tls_key: Path | None = Field(default=None, description="PEM file of its private key (in tls_cert if unset)")
    pool_index: bool = Field(
        default=False, description="ask the pool what it holds before a prompt goes to a prefill engine"
    )
    request_timeout_s: float = Field(
        default=0.0, ge=0, le=86400, description="seconds for a request as a whole, 0 for any time"
    )
    drain_notice_s: float = Field(
        default=0.0, ge=0, le=3600, description="seconds the router serves on at the end, and says so in /health"
    )
    admin_listen: str | None = Field(
        default=None, description="HOST:PORT of the router's admin API (docs/router-operations.md)"
    )
    access_log: str | None = Field(
        default=None, description="file for one line of JSON for each request, or - for standard output"
    )
    args: Arguments = Field(default=(), description="more arguments for `kvrelay router serve`")

    @property
    def entrance(self) -> tuple[str, ...]:
        """Arguments of ``kvrelay router serve`` about who may come in."""
        given = (
            ("--keys-file", self.keys_file),
            ("--max-concurrent", self.max_concurrent),
            ("--max-per-decode", self.max_per_decode),
            ("--tls-cert", self.tls_cert),
            ("--tls-key", self.tls_key),
        )
        return tuple(word for flag, value in given if value for word in (flag, str(value)))

    @property
    def surviving(self) -> tuple[str, ...]:
        """Arguments of ``kvrelay router serve`` about its deadlines, its end and its administration."""
        given = (
            ("--request-timeout", self.request_timeout_s),
            ("--drain-notice", self.drain_notice_s),
            ("--admin-listen", self.admin_listen),
        )
        return tuple(word for flag, value in given if value for word in (flag, str(value)))

    @property
    def routing(self) -> RoutingSettings:
        """As the router has them."""
        return RoutingSettings(
            policy=self.policy,
            prefill_policy=self.prefill_policy,
            decode_policy=self.decode_policy,
            session_header=self.session_header,
            disaggregate_above=self.disaggregate_above,
            colocated_fallback=self.colocated_fallback,
        )


class UpSettings(Settings):
    """All of ``kvrelay up``."""

    model: Path | None = Field(default=None, description="directory of the model")
    served_model_name: str | None = Field(default=None, description="name clients use (the directory's name if unset)")
    host: Annotated[str, AfterValidator(_host)] = Field(
        default="127.0.0.1", description="address the endpoint listens on"
    )
    port: Port = Field(default=8000, description="port the endpoint listens on")
    connector: Annotated[str, AfterValidator(_known)] = Field(
        default="kvrelay", description="how KV travels (docs/connectors.md), or none (plain engines, no router)"
    )
    chunk_tokens: int = Field(default=64, gt=0, le=4096, description="tokens in one pool object")
    connector_options: Annotated[dict[str, Any], AfterValidator(_plain)] = Field(
        default={}, description="more entries for the connector's kv_connector_extra_config"
    )
    on_lost_kv: OnLostKv = Field(
        default=OnLostKv.RECOMPUTE, description="when a decode engine cannot have the KV it was promised"
    )
    dispatch: Dispatch = Field(default=Dispatch.SEQUENTIAL, description="when a decode engine is sent a request")
    otlp_endpoint: str | None = Field(
        default=None,
        description="an OpenTelemetry collector for traces of router and engines, such as http://127.0.0.1:4318",
    )
    first_token: FirstToken = Field(
        default=FirstToken.DECODE, description="whose first token a stream begins with, where it can"
    )
    tokenise: Tokenising = Field(
        default=Tokenising.TWICE, description="how often a prompt becomes token ids: once, where it can"
    )
    ready_timeout_s: float = Field(default=900.0, gt=0, le=86400, description="seconds until everything must be ready")
    drain_timeout_s: float = Field(default=10.0, ge=0, le=3600, description="seconds running requests get at the end")
    on_exit: Literal["keep", "stop", "wait"] = Field(
        default="keep",
        description="when a process ends on its own: keep on while the rest can serve, stop all, or wait for SIGUSR1",
    )
    run_dir: Path | None = Field(default=None, description="where logs and sockets go (a fresh one if unset)")
    engine: EngineSettings = EngineSettings()
    prefill: RoleSettings = RoleSettings()
    decode: RoleSettings = RoleSettings()
    pool: PoolSettings = PoolSettings()
    router: RouterSettings = RouterSettings()

    @property
    def profile(self) -> Profile | None:
        """The connector's; None without one."""
        return PROFILES.get(self.connector)

    @property
    def asks_engines(self) -> bool:
        """Whether the router must know what engines add to requests."""
        return self.first_token is FirstToken.PREFILL or self.tokenise is Tokenising.ONCE

    @property
    def pooled(self) -> bool:
        """Whether there is a process for the pool."""
        return self.profile is not None and self.profile.pool is Pool.PROCESS

    def role(self, name: Literal["prefill", "decode"]) -> RoleSettings:
        """The settings of one role with ``[engine]`` filled in: the role's own win, arguments are joined."""
        role: RoleSettings = getattr(self, name)
        inherited = {
            field: value
            for field in EngineSettings.model_fields
            if getattr(role, field) is None and (value := getattr(self.engine, field)) is not None
        }
        args, env = self.engine.args + role.args, self.engine.env | role.env
        return role.model_copy(update={**inherited, "args": args, "env": env})


def leaves() -> dict[str, Any]:
    """Every setting: dotted path to its pydantic field, in order."""
    return leaves_of(UpSettings)


def flag_of(path: str) -> str | None:
    """The flag that sets ``path``; None for the model, which is positional, and for tables, which need the file."""
    if path in {"model", "connector_options"} or path.endswith(".env"):
        return None
    if path in {"prefill.count", "decode.count"}:
        return "--" + path.removesuffix(".count")
    plain = path if path == "engine.args" else path.removeprefix("engine.")
    return "--" + plain.removesuffix("_s").replace(".", "-").replace("_", "-")


def variable_of(path: str) -> str:
    """The environment variable that sets ``path``."""
    return "KVRELAY_" + path.replace(".", "_").upper()
