"""From a configuration and facts about the host to the list of processes to run.

Stages start in ascending order, each when the one before is ready, and stop in descending order: the router first, so
that nothing new reaches the engines, then the engines, then the pool they write to.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Literal

from msgspec import Struct

from kvrelay.errors import ConfigError
from kvrelay.launch.core import kv_events
from kvrelay.launch.core.engine import DEFAULT_CPU_KV_BYTES, SHOWS_REQUESTS, engine_arguments, names_of, ranks_of
from kvrelay.launch.core.placement import bind_cores, give_devices
from kvrelay.profiles.base import EngineSetup, Pool
from kvrelay.router.core.kv.settings import TokenIds
from kvrelay.router.core.observing.settings import traces_url
from kvrelay.types import Dispatch, FirstToken, OnLostKv, Tokenising

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kvrelay.launch.core.settings import RoleSettings, UpSettings

POOL_STAGE, ENGINE_STAGE, ROUTER_STAGE = 0, 1, 2
ENGINE_HOST = "127.0.0.1"
ENGINE_GRACE_S, POOL_GRACE_S = 20.0, 10.0
ROUTER_EXTRA_GRACE_S = 5.0
MAX_SOCKET_PATH = 107
"""Bytes in the path of a UNIX socket."""
LONGEST_SOCKET = len("/ipc/") + 36
"""What a run directory's longest socket adds to its path: vLLM names its sockets by UUIDs."""
Role = Literal["pool", "prefill", "decode", "router"]


class HostFacts(Struct, frozen=True, kw_only=True):
    """What the plan must know about the machine. ``ports`` are free ones, at least `ports_needed`."""

    python: str
    run_dir: str
    environ: Mapping[str, str]
    cores: tuple[int, ...]
    devices: tuple[str, ...]
    """Ids of the accelerators that may be used; empty on a CPU host."""
    ports: tuple[int, ...]


class Readiness(Struct, frozen=True, kw_only=True):
    """How to see that a process serves: a GET of ``path`` answers 200 or, with ``unix``, that socket connects."""

    host: str = ""
    port: int = 0
    path: str = "/health"
    unix: str | None = None
    tls: bool = False
    """Whether it speaks TLS; whose certificate it has does not matter here."""


class ProcessSpec(Struct, frozen=True, kw_only=True):
    """One process to run."""

    name: str
    role: Role
    stage: int
    argv: tuple[str, ...]
    env: Mapping[str, str]
    """Its whole environment."""
    readiness: Readiness
    grace_s: float
    """From SIGTERM to SIGKILL."""
    url: str | None = None
    connectors: tuple[str, ...] = ()
    """Names under which an engine's connectors register with the pool: one a data-parallel replica."""


class Plan(Struct, frozen=True, kw_only=True):
    """Everything to run, in order of stage."""

    processes: tuple[ProcessSpec, ...]
    endpoint: str
    pools: Mapping[str, str]
    """Addresses by the prefill engines that run them, where several do; of the only pool, if there is one, by ""."""
    model_name: str
    folders: tuple[str, ...] = ()
    """To be made before the start, and removed at the end."""

    @property
    def engines(self) -> tuple[str, ...]:
        """Names of the engines: prefill first."""
        return tuple(spec.name for spec in self.processes if spec.stage == ENGINE_STAGE)

    @property
    def connectors(self) -> tuple[str, ...]:
        """Names that must register with the pool: prefill first."""
        return tuple(name for spec in self.processes for name in spec.connectors)

    def registered_at(self, owner: str) -> tuple[str, ...]:
        """Those that must register with the pool of ``owner``: prefill engines know no pool but their own."""
        others = self.pools.keys() - {owner}
        return tuple(name for spec in self.processes for name in spec.connectors if spec.name not in others)


def ports_needed(settings: UpSettings) -> int:
    """How many free ports `make_plan` takes at most."""
    engines = settings.prefill.count + settings.decode.count
    return engines * (1 + (settings.profile.num_ports if settings.profile else 0))


def make_plan(settings: UpSettings, facts: HostFacts) -> Plan:
    """Lay out the processes. Raises `ConfigError` when the host cannot hold them as asked."""
    return _Planner(settings, facts).plan()


class _Planner:
    def __init__(self, settings: UpSettings, facts: HostFacts) -> None:
        self._settings = settings
        self._facts = facts
        self._ports: Iterator[int] = iter(facts.ports)
        self._pool_socket = f"{facts.run_dir}/ipc/pool.sock"
        self._pools = self._pool_addresses()
        self._model = str(settings.model)
        self._model_name = settings.served_model_name or self._model.rstrip("/").rpartition("/")[2] or self._model
        self._roles: list[tuple[Literal["prefill", "decode"], RoleSettings]] = [
            ("prefill", settings.role("prefill")),
            ("decode", settings.role("decode")),
        ]

    def plan(self) -> Plan:
        profile = self._settings.profile
        publish = any(kv_events.publishes(self._settings, name) for name, _ in self._roles)
        longest = max(map(len, [self._pool_socket, *(address[len("unix:") :] for address in self._pools.values())]))
        if profile and (profile.uses_pool or publish) and longest > MAX_SOCKET_PATH:
            raise ConfigError(
                f"run_dir = {self._facts.run_dir}: too long: a UNIX socket's path has at most {MAX_SOCKET_PATH} bytes; "
                "give a shorter --run-dir"
            )
        processes = [self._pool()] if self._settings.pooled else []
        engines = self._engines()
        processes += engines
        endpoint = engines[0].url or ""
        if profile:
            router = self._router(engines)
            processes.append(router)
            endpoint = router.url or ""
        return Plan(
            processes=tuple(processes),
            endpoint=endpoint,
            pools=self._pools,
            model_name=self._model_name,
            folders=profile.folders(self._settings, self._facts.run_dir) if profile else (),
        )

    def _pool_addresses(self) -> dict[str, str]:
        """Of each pool, by the name of the prefill engine that runs it; one that serves all engines has no name."""
        profile, count = self._settings.profile, self._settings.prefill.count
        if profile is None or not profile.uses_pool:
            return {}
        if profile.pool is not Pool.EMBEDDED or count < 2:
            return {"": f"unix:{self._pool_socket}"}
        return {f"P{number}": f"unix:{self._facts.run_dir}/ipc/pool-P{number}.sock" for number in range(count)}

    def _pool(self) -> ProcessSpec:
        pool = self._settings.pool
        listen = f"{ENGINE_HOST}:{pool.port}" if pool.port else "none"
        argv = [self._facts.python, "-P", "-m", "kvrelay", "pool", "serve", "--listen", listen]
        argv += ["--unix", self._pool_socket, "--size", str(pool.size)]
        if pool.token_file:
            argv += ["--token-file", str(pool.token_file)]
        return ProcessSpec(
            name="pool",
            role="pool",
            stage=POOL_STAGE,
            argv=(*argv, *pool.args),
            env=self._facts.environ,
            readiness=Readiness(unix=self._pool_socket),
            grace_s=POOL_GRACE_S,
        )

    def _engines(self) -> list[ProcessSpec]:
        ranks = [ranks_of(role) for _, role in self._roles for _ in range(role.count)]
        asked = [cpus for _, role in self._roles for cpus in role.cpus or [None] * role.count]
        if self._facts.devices:
            places = [{"CUDA_VISIBLE_DEVICES": ids} for ids in give_devices(self._facts.devices, ranks)]
        elif "VLLM_CPU_OMP_THREADS_BIND" in self._facts.environ:
            places = [{} for _ in ranks]
        else:
            places = [{"VLLM_CPU_OMP_THREADS_BIND": cores} for cores in bind_cores(self._facts.cores, ranks)]
        for place, cpus in zip(places, asked, strict=True):
            if cpus:
                place["VLLM_CPU_OMP_THREADS_BIND"] = cpus
        numbered = [(name, role, number) for name, role in self._roles for number in range(role.count)]
        return [
            self._engine(name, role, number, place)
            for (name, role, number), place in zip(numbered, places, strict=True)
        ]

    def _engine(
        self, role_name: Literal["prefill", "decode"], role: RoleSettings, number: int, place: Mapping[str, str]
    ) -> ProcessSpec:
        name = f"{'P' if role_name == 'prefill' else 'D'}{number}"
        host, port = ENGINE_HOST, 0
        profile = self._settings.profile
        if profile is None and number == 0:
            host, port = self._settings.host, self._settings.port
        port = port or next(self._ports)
        env = {
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "PYTHONUNBUFFERED": "1",
            **({"VLLM_RPC_BASE_PATH": f"{self._facts.run_dir}/ipc"} if self._short_enough() else {}),
            **self._facts.environ,
            **place,
        }
        argv = [self._facts.python, "-P", "-m", "vllm.entrypoints.openai.api_server", "--model", self._model]
        argv += ["--host", host, "--port", str(port), "--served-model-name", self._model_name]
        if profile:
            setup = EngineSetup(
                engine=name,
                role=role_name,
                host=ENGINE_HOST,
                cpu=not self._facts.devices,
                ports=tuple(next(self._ports) for _ in range(profile.num_ports)),
                pool=self._pools.get(name, self._pools.get("", "")),
                pools={} if "" in self._pools or name in self._pools else self._pools,
                run_dir=self._facts.run_dir,
                settings=self._settings,
            )
            argv += ["--kv-transfer-config", json.dumps(profile.transfer_config(setup), separators=(",", ":"))]
            argv += profile.arguments(setup)
            env |= profile.environment(setup)
        if role.kv_cache_memory is not None:
            env.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would win over the argument
        if kv_events.publishes(self._settings, role_name):
            argv += kv_events.engine_arguments(self._facts.run_dir, name)
        if (endpoint := self._settings.otlp_endpoint) is not None:
            argv += ["--otlp-traces-endpoint", traces_url(endpoint)]
            env = {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf", "OTEL_SERVICE_NAME": f"vllm-{name}", **env}
        cpu_kv_unsized = not self._facts.devices and "VLLM_CPU_KVCACHE_SPACE" not in env | role.env
        if self._settings.asks_engines:
            argv.append(SHOWS_REQUESTS)
        argv += engine_arguments(role, default_kv_bytes=DEFAULT_CPU_KV_BYTES if cpu_kv_unsized else None)
        return ProcessSpec(
            name=name,
            role=role_name,
            stage=ENGINE_STAGE,
            argv=(*argv, *role.args),
            env=env | role.env,
            readiness=Readiness(host=_dialable(host), port=port),
            grace_s=ENGINE_GRACE_S,
            url=_url(host, port),
            connectors=names_of(name, role),
        )

    def _router(self, engines: list[ProcessSpec]) -> ProcessSpec:
        settings = self._settings
        tls = settings.router.tls_cert is not None
        argv = [self._facts.python, "-P", "-m", "kvrelay", "router", "serve"]
        for engine in engines:
            argv += [f"--{engine.role}", engine.url or ""]
        argv += ["--host", settings.host, "--port", str(settings.port), "--connector", settings.connector]
        argv += ["--drain-timeout", str(settings.drain_timeout_s)]
        for flag, value, usual in (
            ("--on-lost-kv", settings.on_lost_kv, OnLostKv.RECOMPUTE),
            ("--dispatch", settings.dispatch, Dispatch.SEQUENTIAL),
            ("--first-token", settings.first_token, FirstToken.DECODE),
            ("--tokenise", settings.tokenise, Tokenising.TWICE),
        ):
            argv += [flag, value] if value != usual else []
        if settings.otlp_endpoint is not None:
            argv += ["--otlp-endpoint", settings.otlp_endpoint]
        if settings.router.workers > 1:
            argv += ["--workers", str(settings.router.workers)]
        if settings.router.access_log is not None:
            argv += ["--access-log", settings.router.access_log]
        argv += settings.router.routing.arguments
        argv += settings.router.entrance
        argv += settings.router.surviving
        for engine in engines:
            if kv_events.publishes(settings, engine.role):
                argv += kv_events.router_arguments(self._facts.run_dir, engine.name, len(engine.connectors))
        if settings.router.token_ids != TokenIds.ENGINE:
            argv += ["--token-ids", settings.router.token_ids]
        if settings.router.pool_index:
            argv.append("--pool-index")
        if settings.profile and settings.profile.uses_pool:
            argv += ["--pool", ",".join(self._pools.values())]
            if settings.pool.token_file:
                argv += ["--pool-token-file", str(settings.pool.token_file)]
        return ProcessSpec(
            name="router",
            role="router",
            stage=ROUTER_STAGE,
            argv=(*argv, *settings.router.args),
            env=self._facts.environ,
            readiness=Readiness(host=_dialable(settings.host), port=settings.port, tls=tls),
            grace_s=settings.router.drain_notice_s + settings.drain_timeout_s + ROUTER_EXTRA_GRACE_S,
            url=_url(settings.host, settings.port, "https" if tls else "http"),
        )

    def _short_enough(self) -> bool:
        return len(self._facts.run_dir) + LONGEST_SOCKET <= MAX_SOCKET_PATH


def _dialable(host: str) -> str:
    """Where a listener on ``host`` can be reached from this machine."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - recognised, not bound


def _url(host: str, port: int, scheme: str = "http") -> str:
    reachable = _dialable(host)
    return f"{scheme}://[{reachable}]:{port}" if ":" in reachable else f"{scheme}://{reachable}:{port}"
