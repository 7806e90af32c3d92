"""Puts the connector's parts together for one engine, and refuses engines it cannot serve."""

from __future__ import annotations

import logging
import multiprocessing
import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from kvrelay.client.token import read_token
from kvrelay.connector import compat, speculation
from kvrelay.connector.adapters import Adapters
from kvrelay.connector.codec import FP8, PLAIN, Codec, find_codec
from kvrelay.connector.config import ConnectorConfig, parse_extra_config
from kvrelay.connector.device import DeviceLayer, Mirrors
from kvrelay.connector.embedded import EmbeddedPool, serve_arguments
from kvrelay.connector.engine_calls import EngineCalls
from kvrelay.connector.facts import ModelFacts, read_model, refusals
from kvrelay.connector.groups import read_shares
from kvrelay.connector.layout import BlockKind, prove
from kvrelay.connector.link import CONNECT_S, PoolLink
from kvrelay.connector.loader import Loader
from kvrelay.connector.packing import NATIVE, NATIVE_FORMAT, in_native_packing
from kvrelay.connector.rank_kv import RankKv, RankLayer
from kvrelay.connector.saver import Saver
from kvrelay.connector.scheduler_side import SchedulerSide
from kvrelay.connector.several import SeveralSchedulers, SeveralWorkers
from kvrelay.connector.staging import Staging
from kvrelay.connector.worker_side import WorkerSide
from kvrelay.errors import ConfigError
from kvrelay.identity.digests import DigestCache, default_cache_file
from kvrelay.identity.weights import weights_identity
from kvrelay.launch import kernel

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from kvrelay.client.blocking import PoolClient
    from kvrelay.connector.core.geometry import KvGeometry, KvGroup
    from kvrelay.connector.core.tables import Table
    from kvrelay.connector.counters import Counters
    from kvrelay.connector.cuda import CudaCopies
    from kvrelay.connector.layout import WriteKernel
    from kvrelay.connector.rank_kv import Layer

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine's configuration, read and checked."""

    config: ConnectorConfig
    token: str | None
    model: ModelFacts
    role: str
    saves: bool
    loads: bool
    ranks: int
    group: str
    """Under which this engine's ranks write together: another engine, or this one restarted, is another group."""

    def by_pool(self) -> dict[str, Engine]:
        """This engine with each of its pools, by the prefill engines' names; "" if it has one pool of nobody's.

        What is bounded for an engine as a whole is shared out.
        """
        pools = self.config.pools
        if not pools:
            return {"": self}
        config = replace(
            self.config,
            pools=None,
            staging_mib=self.config.staging_mib // len(pools),
            max_early_loads=-(-self.config.max_early_loads // len(pools)),
            sync_load_bytes=self.config.sync_load_bytes // len(pools),
            sync_load_idle_bytes=self.config.sync_load_idle_bytes // len(pools),
        )
        return {name: replace(self, config=replace(config, pool=address)) for name, address in pools.items()}

    def link(self, name: str, *, map_arena: bool, greet: Callable[[PoolClient], None] = lambda _: None) -> PoolLink:
        """A connection for one thread."""
        title = f"connector {self.config.engine} {name}"
        config = self.config
        return PoolLink(
            config.pool,
            name=title,
            token=self.token,
            map_arena=map_arena,
            reconnect_s=config.reconnect_s,
            greet=greet,
        )


def read_engine(vllm_config: VllmConfig, cache: KVCacheConfig) -> Engine:
    """Read an engine's configuration; raises `ConfigError` for one the connector does not serve, naming all reasons."""
    transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
    config = parse_extra_config(transfer.kv_connector_extra_config, str(transfer.engine_id))
    problems: list[str] = []
    if transfer.kv_load_failure_policy != "recompute" and not config.allow_load_failures:
        problems.append(
            f"kv_load_failure_policy is {transfer.kv_load_failure_policy!r}: a pool that goes away would fail "
            "requests; set it to 'recompute' (or allow_load_failures to true)"
        )
    try:
        compat.check_version(compat.version(), allow_untested=config.allow_untested_vllm)
    except ConfigError as error:
        problems += error.problems
    problems += refusals(vllm_config, cache, allow_untested_device=config.allow_untested_device)
    if problems:
        raise ConfigError(*problems)
    model = read_model(vllm_config, cache)
    _refuse_windows_below(config.chunk_tokens, model.groups.geometry)
    device = vllm_config.device_config.device_type
    codecs: dict[int, str] = {}
    for table in model.groups.tables.tables:
        # What its layers really use is looked at when there are some; this much is known of the machine.
        group = model.groups.geometry.groups[table.group]
        backend, isa = compat.expected_attention(device, model.types, table.block_tokens, group)
        codecs[table.group] = _codec(backend, isa, table.block_tokens, group).name
    if config.packing == NATIVE:
        model = in_native_packing(model, [codecs[at] for at in sorted(codecs)], config.chunk_tokens)
    replica = compat.replica(vllm_config)
    if replica is not None and config.embedded_pool is not None:
        raise ConfigError(
            "embedded_pool is not supported with data-parallel replicas: each would run a pool at the same address; "
            "run more engines instead, or a pool of its own"
        )
    if replica is not None:
        config = replace(config, engine=f"{config.engine}-dp{replica}")
    return Engine(
        config=config,
        token=read_token(config.token_file),
        model=model,
        role=str(transfer.kv_role),
        saves=transfer.is_kv_producer or config.save_decode,
        loads=transfer.is_kv_consumer,
        ranks=parallel.world_size,
        group=f"{config.engine}/{transfer.engine_id}",
    )


def _refuse_windows_below(chunk_tokens: int, geometry: KvGeometry) -> None:
    """A chunk is complete in a step of which the engine has kept only the window before: all of it must be there."""
    windows = [group.window for group in geometry.groups if group.window]
    if windows and min(windows) < chunk_tokens:
        raise ConfigError(
            f"chunk_tokens is {chunk_tokens} and the model's sliding window {min(windows)}: "
            f"set chunk_tokens to at most {min(windows)} on all engines"
        )


def _codec(backend: str, isa: str, block_tokens: int, group: KvGroup) -> Codec:
    return find_codec(
        backend,
        isa,
        block_tokens=block_tokens,
        head_size=group.head_size,
        item_bytes=group.item_bytes,
        quantisation=FP8 if group.item_bytes == 1 else PLAIN,
    )


def build_scheduler(vllm_config: VllmConfig, engine: Engine, counters: Counters) -> SchedulerSide | SeveralSchedulers:
    """The scheduler's side, connected; raises `ConfigError` if the weights have no identity or the pool refuses us."""
    config = engine.config
    facts = {
        **engine.model.facts,
        "chunk_tokens": str(config.chunk_tokens),
        **({"weights": config.weights_id} if config.weights_id else _weights(vllm_config)),
    }
    embedded = EmbeddedPool(serve_arguments(config)) if config.embedded_pool is not None else None
    if embedded is not None:
        embedded.start()
    adapters = None
    if vllm_config.lora_config is not None:
        adapters = Adapters(DigestCache(default_cache_file(os.environ)), compat.adapter_folder)

    def close() -> None:
        calls.end()
        if embedded is not None:
            embedded.close()

    def make(engine: Engine) -> SchedulerSide:
        return SchedulerSide(
            engine.config,
            facts=facts,
            geometry=engine.model.groups.geometry,
            tables=engine.model.groups.tables,
            ranks=engine.ranks,
            saves=engine.saves,
            loads=engine.loads,
            role=engine.role,
            counters=counters,
            make_link=lambda greet: engine.link("scheduler", map_arena=False, greet=greet),
            on_close=close,
            adapters=adapters,
            sync_loads=takes_sync_loads(vllm_config),
            in_flight=vllm_config.max_concurrent_batches,
        )

    parts = engine.by_pool()
    sides = {name: make(part) for name, part in parts.items()}
    side = SeveralSchedulers(sides) if config.pools else sides[""]
    calls = EngineCalls(side.sides, adapters)
    side.start()
    compat.watch_engine(vllm_config, calls)
    log.info("kvrelay: engine %s, %s, namespace %s", config.engine, engine.role, side.sides[0].namespace[:16])
    return side


def takes_sync_loads(vllm_config: VllmConfig) -> bool:
    """Whether the engine knows how a step's loads ended before it schedules the next step, and then recomputes.

    Otherwise it could schedule, meanwhile, a request that takes what failed to be loaded for computed.
    """
    return (
        vllm_config.kv_transfer_config.kv_load_failure_policy == "recompute"
        and vllm_config.parallel_config.pipeline_parallel_size == 1
        and not vllm_config.scheduler_config.async_scheduling
    )


def _weights(vllm_config: VllmConfig) -> dict[str, str]:
    """Of the model, and of a drafter's own."""
    cache = DigestCache(default_cache_file(os.environ))
    # The engine has read its weights by now. Where it has a process of its own, it has since that began.
    begun = kernel.began_at() if multiprocessing.parent_process() is not None else None
    model, draft = vllm_config.model_config, speculation.drafter(vllm_config)
    code = compat.trusts_code(model)
    told = {"weights": weights_identity(compat.model_folder(vllm_config), cache, begun=begun, code=code)}
    folder = compat.drafter_folder(vllm_config, draft) if draft is not None else None
    if folder is not None:
        told["drafter_weights"] = weights_identity(folder, cache, begun=begun, code=compat.trusts_code(draft))
    return told


def build_worker(
    vllm_config: VllmConfig, engine: Engine, kv_caches: dict[str, torch.Tensor], counters: Counters
) -> WorkerSide | SeveralWorkers:
    """One rank's side, its threads running; raises `ConfigError` when its KV cache has no proven codec."""
    copies = _copies(kv_caches)
    kv = _rank_kv(vllm_config, engine.model, kv_caches, copies)
    sides = [_worker_side(vllm_config, part, kv, copies, counters) for part in engine.by_pool().values()]
    return SeveralWorkers(sides) if engine.config.pools else sides[0]


def _worker_side(
    vllm_config: VllmConfig, engine: Engine, kv: RankKv, copies: CudaCopies | None, counters: Counters
) -> WorkerSide:
    config, model = engine.config, engine.model
    side = WorkerSide(
        layers=len(kv.layers),
        tables=model.groups.tables,
        hold_s=config.save_timeout_s,
        announce_wait_s=config.announce_wait_s,
        sync_load_wait_s=config.sync_load_timeout_s,
        step_begins=copies.step_begins if copies is not None else lambda: None,
    )
    rank = vllm_config.parallel_config.rank
    links = [engine.link(f"rank {rank} loads {at}", map_arena=True) for at in range(config.load_threads)]
    saving = engine.link(f"rank {rank} saves", map_arena=True)
    prompt = engine.link(f"rank {rank} loads synchronously", map_arena=True)
    syncs = (
        engine.loads and model.groups.tables.divisible and config.sync_load_bytes > 0 and takes_sync_loads(vllm_config)
    )
    started = [*(links if engine.loads else ()), *((saving,) if engine.saves else ()), *((prompt,) if syncs else ())]
    for link in started:
        link.start()
    saver = Saver(
        kv=kv,
        group=engine.group,
        link=saving,
        counters=counters,
        name="kvrelay saves",
    )

    staging = Staging(config.staging_mib << 20)

    def make_loader(links: Sequence[PoolLink], timeout_s: float, name: str, *, lazy: bool = False) -> Loader:
        return Loader(
            kv=kv,
            links=links,
            timeout_s=timeout_s,
            cancelled=side.is_cancelled,
            ended=side.load_ended,
            staging=staging,
            stage_ended=side.stage_ended,
            unstaged=side.is_unstaged,
            counters=counters,
            name=name,
            lazy=lazy,
        )

    early = [engine.link(f"rank {rank} loads early {at}", map_arena=True) for at in range(config.max_early_loads)]
    side.start(
        saver,
        make_loader(links, config.load_timeout_s, "kvrelay loads"),
        make_loader([prompt], config.sync_load_timeout_s, "kvrelay synchronous loads") if syncs else None,
        make_loader(early, config.early_load_timeout_s, "kvrelay early loads", lazy=True) if early else None,
    )
    # An engine that says it is ready has its connections, or knows that there is no pool: its first request must not
    # come before them.
    for link in started:
        link.settle(CONNECT_S + 1.0)
    return side


def _copies(kv_caches: dict[str, torch.Tensor]) -> CudaCopies | None:
    """How KV comes and goes; None: it lies in host memory."""
    devices = {tensor.device for tensor in kv_caches.values()}
    if {device.type for device in devices} == {"cpu"}:
        return None
    if len(devices) > 1:
        raise ConfigError(f"KV cache on several devices, {', '.join(sorted(map(str, devices)))}, is not supported")
    from kvrelay.connector.cuda import CudaCopies

    return CudaCopies(devices.pop())


def _rank_kv(
    vllm_config: VllmConfig, model: ModelFacts, kv_caches: dict[str, torch.Tensor], copies: CudaCopies | None
) -> RankKv:
    """This rank's layers in order, their codecs proven against the kernels that write them."""
    groups = model.groups
    shares = read_shares(vllm_config, groups)
    told = model.facts["codec"].split(",") if model.facts["packing"] == NATIVE_FORMAT else None
    make: dict[tuple[int, str, str], Callable[[torch.Tensor], Layer]] = {}
    layers = []
    places = [share.first_layer for share in shares]
    for layer in groups.layers:
        table, share = groups.tables.tables[layer.table], shares[layer.group]
        group = groups.geometry.groups[layer.group]
        cache = kv_caches[layer.name]
        compat.check_kv(cache, group.item_bytes)
        if cache.shape[1] != share.heads:
            raise ConfigError(f"layer {layer.name} keeps {cache.shape[1]} KV heads on this rank, not {share.heads}")
        kind = (layer.table, *compat.attention_kind(vllm_config, layer.name))
        if kind not in make:
            blocks = _block_kind(kind[1], kind[2], cache, table, group, native=told is not None)
            if told is not None and told[layer.group] != blocks.codec.name:
                raise ConfigError(
                    f"layers have codec {blocks.codec.name}, the namespace says {told[layer.group]}: a bug, report it"
                )
            _prove(blocks, compat.write_kernel(kind[1], kind[2], model.types, blocks.kernel_tokens), group)
            log.info(
                "kvrelay: codec %s proven for %s/%s, blocks of %d", blocks.codec.name, *kind[1:], table.block_tokens
            )
            make[kind] = _maker(blocks, copies)
        layers.append(RankLayer(make[kind](cache), layer.group, places[layer.group], layer.table))
        places[layer.group] += 1
    return RankKv.of(groups.geometry, shares, layers, groups.tables)


def _block_kind(
    backend: str, isa: str, cache: torch.Tensor, table: Table, group: KvGroup, *, native: bool
) -> BlockKind:
    heads, tokens, content = cache.shape[1:]
    if table.block_tokens % tokens:
        raise ConfigError(f"blocks of {table.block_tokens} tokens are not made of kernel blocks of {tokens}")
    return BlockKind(
        codec=_codec(backend, isa, tokens, group),
        heads=heads,
        kernel_tokens=tokens,
        content=content,
        item_bytes=group.item_bytes,
        block_tokens=table.block_tokens,
        head_size=group.head_size,
        native=native,
    )


def _maker(blocks: BlockKind, copies: CudaCopies | None) -> Callable[[torch.Tensor], Layer]:
    """Makes layers out of KV tensors of one kind."""
    if copies is None:
        return lambda cache: blocks.layer(compat.kv_pages(cache))
    mirrors = Mirrors(blocks, copies)
    return lambda cache: DeviceLayer(mirrors, cache)


def _prove(blocks: BlockKind, write_kernel: WriteKernel, group: KvGroup) -> None:
    prove(
        blocks.codec,
        write_kernel,
        heads=blocks.heads,
        block_tokens=blocks.kernel_tokens,
        head_size=blocks.head_size,
        dtype=np.dtype(f"u{blocks.item_bytes}"),
        native=group.block_tokens > 1,
    )
