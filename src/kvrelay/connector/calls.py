"""vLLM's calls as those of `SchedulerSide` and `WorkerSide`: what `KvRelayConnector` does with them, without vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvrelay.connector import compat

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvrelay.connector.adapters import Adapter
    from kvrelay.connector.core.rank import Results
    from kvrelay.connector.scheduler_side import SchedulerSide
    from kvrelay.connector.several import SeveralSchedulers, SeveralWorkers
    from kvrelay.connector.worker_side import WorkerSide


class SchedulerCalls:
    """The scheduler's half."""

    _scheduler: SchedulerSide | SeveralSchedulers
    _metadata: Callable[[Any], Any]
    """The type in which a step's orders go to the workers, as ``orders``."""

    def _adapter(self, request: Any) -> Adapter | None:  # noqa: ARG002
        """What the request is computed with beside the model."""
        return None

    def on_new_request(self, request: Any) -> None:
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
            adapter=self._adapter(request),
        )

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens the pool holds beyond the local ones."""
        return self._scheduler.num_matched(request.request_id, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Note the blocks to load into."""
        self._scheduler.allocated(request.request_id, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """One step's orders to the workers."""
        orders = self._scheduler.step(
            compat.scheduled(scheduler_output),
            compat.preempted(scheduler_output),
            lambda request_id: compat.block_tables(scheduler_output, request_id),
        )
        return self._metadata(orders)

    def update_connector_output(self, connector_output: Any) -> None:
        """Take the workers' reports."""
        told = connector_output.kv_connector_worker_meta
        self._scheduler.update(
            None if told is None else told.report,
            connector_output.finished_sending or (),
            connector_output.finished_recving or (),
        )

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Keep the blocks while they are being saved."""
        return self._scheduler.finished(request.request_id, request.num_computed_tokens, block_ids), None

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Keep the blocks while they are being saved."""
        return self.request_finished_all_groups(request, (block_ids,))

    def reset_cache(self) -> bool | None:
        """Part with everything saved so far."""
        return self._scheduler.reset()


class WorkerCalls:
    """A rank's half."""

    _worker: WorkerSide | SeveralWorkers
    _layer_of: dict[str, int]
    """The rank's layers by name, from 0."""
    _results: Results | None = None
    _report: Callable[[Any], Any]
    """The type in which a report goes to the scheduler, as ``report``."""
    _transfers: Callable[[set[str], set[str], set[str]], Any]
    """The type of what a step's reports name: saves and loads that ended, and loads of which nothing counts."""

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Be done with blocks that change hands."""
        self._worker.before_step(kv_connector_metadata.orders)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """Begin the step's saves and loads before its forward pass."""
        self._worker.begin_step(connector_metadata.orders)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing: loads began with the step."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: synchronous loads are over when the step's forward pass begins."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """One layer's tokens are in its blocks."""
        self._worker.layer_computed(self._layer_of[layer_name])

    def wait_for_save(self) -> None:
        """All layers are computed; see that the pool has heard what is coming."""
        self._worker.end_step()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:  # noqa: ARG002
        """Saves and loads that ended."""
        self._results = self._worker.take_results()
        return self._results.finished_sending, self._results.finished_recving

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Saves and loads that ended, and loads of which nothing counts."""
        sent, received = self.get_finished(finished_req_ids)
        failed = self._results.failed_recving if self._results is not None else set()
        return self._transfers(sent or set(), received or set(), failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks of the loads just reported that hold nothing; told once."""
        if self._results is None:
            return set()
        invalid, self._results.invalid_block_ids = self._results.invalid_block_ids, set()
        return invalid

    def build_connector_worker_meta(self) -> Any:
        """Progress for the scheduler's side; ``None`` if there is none."""
        results, self._results = self._results, None
        if results is None or not results.report.tells:
            return None
        return self._report(results.report)
