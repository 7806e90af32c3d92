"""`KvRelayConnector`: what vLLM loads. What it does with vLLM's calls is in `kvrelay.connector.calls`."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from kvrelay.connector import compat
from kvrelay.connector.assembly import build_scheduler, build_worker, read_engine
from kvrelay.connector.calls import SchedulerCalls, WorkerCalls
from kvrelay.connector.counters import Counters
from kvrelay.connector.stats import KvRelayPromMetrics, KvRelayStats
from kvrelay.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

    from kvrelay.connector.adapters import Adapter
    from kvrelay.connector.core.orders import StepOrders
    from kvrelay.connector.several import SeveralOrders

log = logging.getLogger(__name__)


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """Scheduler to workers."""

    orders: StepOrders | SeveralOrders


@dataclass
class ReportMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Workers to scheduler."""

    report: Any
    """A `RankReport`, or `SeveralReports`."""

    def aggregate(self, other: ReportMetadata) -> ReportMetadata:
        """Both ranks' reports."""
        return ReportMetadata(self.report.join(other.report))


class KvRelayConnector(SchedulerCalls, WorkerCalls, KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Hands KV over, and reuses it, through a kvrelay pool."""

    _metadata, _report, _transfers = StepMetadata, ReportMetadata, KVConnectorTransferResults

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        _log_like_vllm()
        self._counters = Counters()
        try:
            self._engine = read_engine(vllm_config, kv_cache_config)
            if role is KVConnectorRole.SCHEDULER:
                self._scheduler = build_scheduler(vllm_config, self._engine, self._counters)
        except ConfigError as error:
            _refuse(error)

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache: what is not saved is computed again."""
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:  # noqa: ARG003
        """Layers are saved between graph pieces."""
        return True

    # --- scheduler ---

    def _adapter(self, request: Request) -> Adapter | None:
        return compat.adapter(request.lora_request, self._vllm_config)

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """Blocks under a save are held by reference; those a failed load left empty lose their names in the cache."""
        sides = self._scheduler.sides
        for side in sides:
            side.evict = gpu_block_pool.evict_blocks
            compat.bind_holds(side.holds, gpu_block_pool, share=len(sides))

    def has_pending_block_frees(self) -> bool:
        """Whether blocks held for saves will be free in a moment."""
        return any(side.holds.worth_waiting for side in self._scheduler.sides)

    def has_pending_push_work(self) -> bool:
        """Whether saves are under way: an engine that is told to pause goes on until it has heard that they ended."""
        return any(side.saving for side in self._scheduler.sides)

    # --- worker ---

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Prove the codec, start the threads."""
        try:
            self._worker = build_worker(self._vllm_config, self._engine, kv_caches, self._counters)
        except ConfigError as error:
            _refuse(error)
        self._layer_of = {layer.name: at for at, layer in enumerate(self._engine.model.groups.layers)}

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Begin the step's saves and loads before its forward pass."""
        KVConnectorBase_V1.bind_connector_metadata(self, connector_metadata)
        super().bind_connector_metadata(connector_metadata)

    # --- both ---

    def shutdown(self) -> None:
        """Disconnect and stop the threads."""
        for side in (getattr(self, "_scheduler", None), getattr(self, "_worker", None)):
            if side is not None:
                side.close()

    def get_kv_connector_stats(self) -> KvRelayStats | None:
        """What happened since the last call."""
        values = self._counters.take()
        return KvRelayStats(data=values) if values else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvRelayStats:
        """Statistics from their serialised form."""
        return KvRelayStats(data=dict(data or {}))

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KvRelayPromMetrics:
        """Prometheus counters."""
        return KvRelayPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def _log_like_vllm() -> None:
    """VLLM configures its own loggers only: ours go where its go."""
    ours, theirs = logging.getLogger("kvrelay"), logging.getLogger("vllm")
    if not ours.handlers and theirs.handlers:
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.level)
        ours.propagate = False


def _refuse(error: ConfigError) -> None:
    """Say each reason in a line of its own, then let the engine fail to start."""
    for problem in error.problems:
        log.error("kvrelay refuses to start: %s", problem)
    raise error


compat.make_known(KvRelayConnector.__name__, __name__)
