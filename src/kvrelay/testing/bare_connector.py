"""The connector's two sides under vLLM's method names, without vLLM: what `kvrelay.connector.vllm` does, for tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvrelay.connector import compat

if TYPE_CHECKING:
    from kvrelay.connector.core.orders import RankReport, StepOrders
    from kvrelay.connector.core.rank import Results
    from kvrelay.connector.scheduler_side import SchedulerSide
    from kvrelay.connector.worker_side import WorkerSide


@dataclass
class BareStep:
    """Scheduler to workers."""

    orders: StepOrders


@dataclass
class BareReport:
    """Workers to scheduler."""

    report: RankReport

    def aggregate(self, other: BareReport) -> BareReport:
        """Both ranks' reports."""
        return BareReport(self.report.join(other.report))


@dataclass
class BareTransfers:
    """What a step's reports name."""

    finished_sending: set[str]
    finished_recving: set[str]
    failed_recving: set[str]


class BareScheduler:
    """The scheduler's side."""

    def __init__(self, side: SchedulerSide) -> None:
        self.side = side

    def on_new_request(self, request: Any) -> None:
        """Send the lookup at once."""
        self.side.on_new_request(
            request.request_id,
            compat.nameable_tokens(request),
            request.num_prompt_tokens,
            salt=request.cache_salt,
            params=request.kv_transfer_params,
            skip=compat.skip_reason(request),
            extras=compat.media(request),
            digests=compat.embeddings(request),
        )

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens the pool holds beyond the local ones."""
        return self.side.num_matched(request.request_id, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Note the blocks to load into."""
        self.side.allocated(request.request_id, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> BareStep:
        """One step's orders."""
        return BareStep(
            self.side.step(
                compat.scheduled(scheduler_output),
                compat.preempted(scheduler_output),
                lambda request_id: compat.block_tables(scheduler_output, request_id),
            )
        )

    def update_connector_output(self, connector_output: Any) -> None:
        """Take the workers' reports."""
        meta = connector_output.kv_connector_worker_meta
        self.side.update(
            meta.report if meta is not None else None,
            connector_output.finished_sending or (),
            connector_output.finished_recving or (),
        )

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Keep the blocks while they are being saved."""
        return self.side.finished(request.request_id, request.num_computed_tokens, block_ids), None

    def reset_cache(self) -> bool | None:
        """Part with everything saved so far."""
        return self.side.reset()

    def shutdown(self) -> None:
        """Disconnect."""
        self.side.close()


class BareWorker:
    """One rank's side."""

    def __init__(self, side: WorkerSide, layer_of: dict[str, int]) -> None:
        """``layer_of``: the rank's layers by name, from 0."""
        self.side = side
        self._layer_of = layer_of
        self._results: Results | None = None
        self._invalid: set[int] = set()

    def handle_preemptions(self, kv_connector_metadata: BareStep) -> None:
        """Be done with blocks that change hands."""
        self.side.before_step(kv_connector_metadata.orders)

    def bind_connector_metadata(self, connector_metadata: BareStep) -> None:
        """Begin the step."""
        self.side.begin_step(connector_metadata.orders)

    def clear_connector_metadata(self) -> None:
        """Nothing."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing: loads began with the step."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: synchronous loads are over when the step's forward pass begins."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """One layer's tokens are in its blocks."""
        self.side.layer_computed(self._layer_of[layer_name])

    def wait_for_save(self) -> None:
        """All layers are computed."""
        self.side.end_step()

    def get_transfer_results(self, finished_req_ids: set[str]) -> BareTransfers:  # noqa: ARG002
        """Saves and loads that ended."""
        self._results = self.side.take_results()
        self._invalid = self._results.invalid_block_ids
        return BareTransfers(
            self._results.finished_sending, self._results.finished_recving, self._results.failed_recving
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks of the loads just reported that hold nothing."""
        invalid, self._invalid = self._invalid, set()
        return invalid

    def build_connector_worker_meta(self) -> BareReport | None:
        """Progress for the scheduler's side."""
        results, self._results = self._results, None
        if results is None or not results.report.tells:
            return None
        return BareReport(results.report)

    def shutdown(self) -> None:
        """Stop the threads."""
        self.side.close()
