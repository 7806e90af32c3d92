"""`KvRelayConnector`: what vLLM loads. It translates vLLM's calls to `SchedulerSide` and `WorkerSide`, and no more."""

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
from kvrelay.connector.counters import Counters
from kvrelay.connector.groups import layer_index
from kvrelay.connector.stats import KvRelayPromMetrics, KvRelayStats
from kvrelay.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from kvrelay.connector.core.orders import RankReport, StepOrders
    from kvrelay.connector.core.rank import Results
    from kvrelay.connector.scheduler_side import SchedulerSide
    from kvrelay.connector.worker_side import WorkerSide

log = logging.getLogger(__name__)


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """Scheduler to workers."""

    orders: StepOrders


@dataclass
class ReportMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Workers to scheduler."""

    report: RankReport

    def aggregate(self, other: ReportMetadata) -> ReportMetadata:
        """Both ranks' reports."""
        return ReportMetadata(self.report.join(other.report))


class KvRelayConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Hands KV over, and reuses it, through a kvrelay pool."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        _log_like_vllm()
        self._counters = Counters()
        self._results: Results | None = None
        self._scheduler: SchedulerSide
        self._worker: WorkerSide
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

    def on_new_request(self, request: Request) -> None:
        """Send the lookup at once."""
        self._scheduler.on_new_request(
            request.request_id,
            compat.nameable_tokens(request),
            request.num_prompt_tokens,
            salt=request.cache_salt,
            params=request.kv_transfer_params,
            skip=compat.skip_reason(request),
            extras=compat.media(request),
            digests=compat.embeddings(request),
            adapter=compat.adapter(request.lora_request, self._vllm_config),
        )

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens the pool holds beyond the local ones."""
        return self._scheduler.num_matched(request.request_id, num_computed_tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Note the blocks to load into."""
        self._scheduler.allocated(request.request_id, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepMetadata:
        """One step's orders to the workers."""
        return StepMetadata(
            self._scheduler.step(
                compat.scheduled(scheduler_output),
                compat.preempted(scheduler_output),
                lambda request_id: compat.block_tables(scheduler_output, request_id),
            )
        )

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Take the workers' reports."""
        meta = connector_output.kv_connector_worker_meta
        self._scheduler.update(
            meta.report if isinstance(meta, ReportMetadata) else None,
            connector_output.finished_sending or (),
            connector_output.finished_recving or (),
        )

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Keep the blocks while they are being saved."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Keep the blocks while they are being saved."""
        return self._scheduler.finished(request.request_id, request.num_computed_tokens, block_ids), None

    def reset_cache(self) -> bool | None:
        """Part with everything saved so far."""
        return self._scheduler.reset()

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """Blocks under a save are held by reference; those a failed load left empty lose their names in the cache."""
        self._scheduler.evict = gpu_block_pool.evict_blocks
        compat.bind_holds(self._scheduler.holds, gpu_block_pool)

    def has_pending_block_frees(self) -> bool:
        """Whether blocks held for saves will be free in a moment."""
        return self._scheduler.holds.worth_waiting

    # --- worker ---

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Prove the codec, start the threads."""
        try:
            self._worker = build_worker(self._vllm_config, self._engine, kv_caches, self._counters)
        except ConfigError as error:
            _refuse(error)
        first = min(map(layer_index, kv_caches))
        self._layer_of = {name: layer_index(name) - first for name in kv_caches}

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Be done with blocks that change hands."""
        assert isinstance(kv_connector_metadata, StepMetadata)
        self._worker.before_step(kv_connector_metadata.orders)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Begin the step's saves and loads before its forward pass."""
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, StepMetadata)
        self._worker.begin_step(connector_metadata.orders)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Nothing: loads began with the step."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: synchronous loads are over when the step's forward pass begins."""

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,  # noqa: ARG002
        attn_metadata: AttentionMetadata,  # noqa: ARG002
        **kwargs: Any,  # noqa: ARG002
    ) -> None:
        """One layer's tokens are in its blocks."""
        self._worker.layer_computed(self._layer_of[layer_name])

    def wait_for_save(self) -> None:
        """All layers are computed; see that the pool has heard what is coming."""
        self._worker.end_step()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:  # noqa: ARG002
        """Saves and loads that ended."""
        self._results = self._worker.take_results()
        return self._results.finished_sending, self._results.finished_recving

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Saves and loads that ended, and loads of which nothing counts."""
        sent, received = self.get_finished(finished_req_ids)
        failed = self._results.failed_recving if self._results is not None else set()
        return KVConnectorTransferResults(sent or set(), received or set(), failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks of the loads just reported that hold nothing; told once."""
        if self._results is None:
            return set()
        invalid, self._results.invalid_block_ids = self._results.invalid_block_ids, set()
        return invalid

    def build_connector_worker_meta(self) -> ReportMetadata | None:
        """Progress for the scheduler's side."""
        results, self._results = self._results, None
        if results is None or not results.report.tells:
            return None
        return ReportMetadata(results.report)

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
