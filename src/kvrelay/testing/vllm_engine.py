"""vLLM's own scheduler and `KvRelayConnector`, in this process and without a model, as a `ContractEngine`.

What computes is a `FakeWorker`. Whatever vLLM decides is vLLM's own code, so that the small scheduler cannot be wrong
about the contract without being found out.
"""

from __future__ import annotations

import copy
import functools
import itertools
import json
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    SlidingWindowSpec,
)
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvrelay.connector.counters import Counters
from kvrelay.connector.vllm import KvRelayConnector
from kvrelay.testing.contract_guard import SchedulerGuard, WorkerGuard
from kvrelay.testing.contract_world import ContractEngine
from kvrelay.testing.fake_scheduler import Batch, Row, Settings
from kvrelay.testing.fake_worker import layer_name
from kvrelay.testing.true_kv import BLOCK, BLOCKS, GEOMETRY, GROUP, Truth
from kvrelay.testing.true_models import DENSE

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from kvrelay.testing.engine_shapes import ConnectorOutput
    from kvrelay.testing.paged_rank import PagedRank
    from kvrelay.testing.true_models import TrueModel

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": GEOMETRY.layers,
    "num_attention_heads": GROUP.heads,
    "num_key_value_heads": GROUP.heads,
    "head_dim": 32,
    "vocab_size": 2048,
    "max_position_embeddings": 512,
    "torch_dtype": "float32",
}
MAX_TOKENS = 512
LAYERS = [layer_name(layer) for layer in range(GEOMETRY.layers)]


@functools.cache
def _base_config() -> VllmConfig:
    """A configuration of vLLM that needs no weights; it takes seconds to make."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
        model = ModelConfig(
            model=folder, skip_tokenizer_init=True, dtype="float32", max_model_len=MAX_TOKENS, enforce_eager=True
        )
        config = VllmConfig(
            model_config=model,
            cache_config=CacheConfig(block_size=32),
            scheduler_config=SchedulerConfig(
                max_num_seqs=8, max_num_batched_tokens=64, max_model_len=MAX_TOKENS, is_encoder_decoder=False
            ),
            device_config=DeviceConfig("cpu"),
            kv_transfer_config=KVTransferConfig(
                kv_connector="KvRelayConnector",
                kv_connector_module_path="kvrelay.connector.vllm",
                kv_role="kv_both",
                kv_load_failure_policy="recompute",
            ),
        )
    config.cache_config.block_size = BLOCK
    config.cache_config.num_gpu_blocks = BLOCKS
    init_none_hash(sha256)
    return config


def engine_config(settings: Settings, *, role: str, stages: int, model: TrueModel = DENSE) -> VllmConfig:
    """What vLLM would be started with."""
    config = copy.deepcopy(_base_config())
    config.cache_config.num_gpu_blocks = model.blocks
    config.cache_config.enable_prefix_caching = settings.caching
    config.scheduler_config.max_num_batched_tokens = settings.budget
    config.scheduler_config.max_num_scheduled_tokens = settings.budget
    config.scheduler_config.max_num_seqs = settings.max_running
    config.scheduler_config.long_prefill_token_threshold = max(settings.chunks[0], 1 + settings.drafts)
    config.scheduler_config.async_scheduling = settings.placeholders
    config.parallel_config.pipeline_parallel_size = stages
    config.kv_transfer_config.kv_role = role
    if settings.drafts and not settings.placeholders:
        config.speculative_config = SpeculativeConfig(
            method="ngram",
            num_speculative_tokens=settings.drafts,
            prompt_lookup_max=3,
            target_model_config=config.model_config,
            target_parallel_config=config.parallel_config,
        )
    return config


def cache_config(model: TrueModel) -> KVCacheConfig:
    """A group of vLLM's for each of a model's tables."""
    import torch

    same: dict[str, Any] = {
        "block_size": BLOCK, "num_kv_heads": GROUP.heads, "head_size": GROUP.head_size, "dtype": torch.float32,
    }  # fmt: skip
    groups = []
    for number, table in enumerate(model.tables.tables):
        window = model.tables.windows[table.group]
        spec = SlidingWindowSpec(**same, sliding_window=window) if window else FullAttentionSpec(**same)
        groups.append(KVCacheGroupSpec([LAYERS[at] for at in range(len(LAYERS)) if model.table(at) == number], spec))
    page = groups[0].kv_cache_spec.page_size_bytes
    tensor = KVCacheTensor(page * model.blocks * len(LAYERS), LAYERS, page * model.blocks, page)
    return KVCacheConfig(model.blocks, [tensor], groups)


class WiredScheduler(KvRelayConnector):
    """The scheduler's half of the connector, on a side that was made elsewhere."""

    def __init__(self, config: VllmConfig, side: Any, model: TrueModel = DENSE) -> None:
        KVConnectorBase_V1.__init__(self, config, KVConnectorRole.SCHEDULER, cache_config(model))
        self._counters, self._results, self._scheduler = Counters(), None, side


class WiredWorker(KvRelayConnector):
    """A worker's half of the connector, on a side that was made elsewhere."""

    def __init__(self, config: VllmConfig, rank: PagedRank) -> None:
        KVConnectorBase_V1.__init__(self, config, KVConnectorRole.WORKER, cache_config(rank.model))
        self._counters, self._results, self._worker = Counters(), None, rank.side
        self._layer_of = {layer_name(layer): at for at, layer in enumerate(rank.own_layers)}


class GuardedVllmScheduler(SchedulerGuard, WiredScheduler):
    """Watched."""


class GuardedVllmWorker(WorkerGuard, WiredWorker):
    """Watched."""


class VllmScheduler:
    """vLLM's scheduler under the names of `FakeScheduler`."""

    def __init__(self, config: VllmConfig, connector: Any, rng: random.Random, model: TrueModel) -> None:
        self._rng = rng
        self._holds = connector._scheduler.holds
        kind = AsyncScheduler if config.scheduler_config.async_scheduling else Scheduler
        with patch.object(KVConnectorFactory, "create_connector", lambda **_: connector):
            self._vllm = kind(config, cache_config(model), StructuredOutputManager(config), block_size=BLOCK)
        self._manager = self._vllm.kv_cache_manager
        self._pool = self._manager.block_pool
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        self._truths: dict[str, Truth] = {}
        self._changed: set[int] = set()
        take, give = self._pool.get_new_blocks, self._pool.free_blocks

        def taken(count: int) -> Any:
            blocks = take(count)
            self._changed.update(block.block_id for block in blocks)
            return blocks

        def given(blocks: Any) -> None:
            blocks = list(blocks)
            give(blocks)
            self._changed.update(block.block_id for block in blocks if self._is_meaningless(block))

        self._pool.get_new_blocks, self._pool.free_blocks = taken, given

    def _is_meaningless(self, block: Any) -> bool:
        return not (block.ref_cnt or block.is_null or block.block_hash is not None)

    @property
    def requests(self) -> dict[str, Any]:
        """Everybody the engine knows."""
        found: dict[str, Any] = self._vllm.requests
        return found

    def add(self, request: Any) -> None:
        """A request arrives."""
        options: dict[str, Any] = {"max_tokens": request.max_tokens, "ignore_eos": True}
        if request.skip_reading_prefix_cache:
            options["prompt_logprobs"] = 1
        if request.kv_transfer_params:
            options["extra_args"] = {"kv_transfer_params": request.kv_transfer_params}
        self._truths[request.request_id] = request.truth
        self._vllm.add_request(
            Request(
                request.request_id,
                request.prompt_token_ids,
                SamplingParams(**options),
                None,
                cache_salt=request.cache_salt,
                block_hasher=self._hasher,
            )
        )

    def abort(self, name: str) -> None:
        """A client went away."""
        self._vllm.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def reset_prefix_cache(self, *, running: bool = False, connector: bool = False) -> bool:
        """Forget what is cached; False if somebody holds blocks."""
        try:
            return bool(self._vllm.reset_prefix_cache(running, connector))
        except RuntimeError:  # somebody who was preempted for it still holds blocks
            return False

    def lose_memory(self) -> None:
        """The engine slept."""
        self._changed.update(block.block_id for block in self._pool.blocks if not block.is_null)

    @property
    def idle(self) -> bool:
        """Whether the engine would stop stepping."""
        return not self._vllm.has_requests()

    def schedule(self) -> Batch:
        """One step."""
        output = self._vllm.schedule()
        cached = output.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        computed |= {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        drafts = output.scheduled_spec_decode_tokens
        rows = [
            self._row(name, computed[name], count, drafts.get(name, []))
            for name, count in output.num_scheduled_tokens.items()
        ]
        changed, self._changed = self._changed, set()
        return Batch(output, rows, changed, self.meaningless)

    def _row(self, name: str, computed: int, count: int, drafts: list[int]) -> Row:
        request, truth = self.requests[name], self._truths[name]
        tables = tuple(map(list, self._manager.get_block_ids(name)))
        first = computed + count - len(drafts)
        right = 0
        while right < len(drafts) and drafts[right : right + 1] == truth.tokens[first + right : first + right + 1]:
            right += 1
        sampled = [] if request.is_prefill_chunk else (truth.tokens[first : first + right + 1] or [0])
        known: Any = SimpleNamespace(request_id=name, truth=truth)
        return Row(known, computed, count, count - len(drafts) + right, tables[0], sampled, tables)

    def _draft(self, name: str) -> list[int]:
        """What n-gram speculation guesses; wrong from some token on, perhaps."""
        request, truth = self.requests[name], self._truths[name]
        right = truth.tokens[request.num_tokens :][: self._rng.randint(0, self._vllm.num_spec_tokens)]
        return [token + (self._rng.random() < 0.3) for token in right]

    def update(self, batch: Batch, reports: ModelRunnerOutput) -> None:
        """Take in what a step brought."""
        names = [row.request.request_id for row in batch.rows]
        self._vllm.update_from_output(
            batch.output,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: at for at, name in enumerate(names)},
                sampled_token_ids=[row.sampled for row in batch.rows],
                kv_connector_output=reports.kv_connector_output,
            ),
        )
        if self._vllm.num_spec_tokens:
            alive = [name for name in names if name in self.requests]
            self._vllm.update_draft_token_ids(DraftTokenIds(alive, [self._draft(name) for name in alive]))
        for row in batch.rows:
            request = self.requests.get(row.request.request_id)
            if request is None or request.status != RequestStatus.RUNNING:
                continue
            true = row.request.truth.tokens[: request.num_tokens]
            assert list(request.all_token_ids) == true, (row.computed, row.count, row.sampled, request.num_tokens)
            spoiled = row.request.request_id in batch.spoiled
            assert not spoiled or request.num_computed_tokens < row.computed + row.count, "it went on with wrong KV"

    # --- for tests ---

    @property
    def meaningless(self) -> set[int]:
        """Blocks that were given away, and spoiled since, and hold nothing that will be read."""
        return {block.block_id for block in self._pool.blocks if self._is_meaningless(block)} - self._changed

    @property
    def held(self) -> int:
        """How many blocks are not free."""
        return sum(block.ref_cnt > 0 for block in self._pool.blocks if not block.is_null)

    def check_integrity(self) -> None:
        """Raise `AssertionError` if blocks are lost."""
        null = self._pool.null_block.block_id
        users = [0] * len(self._pool.blocks)
        for name in self.requests:
            for block in itertools.chain(*self._manager.get_block_ids(name)):
                users[block] += block != null
        for hold in self._holds._holds.values():
            for block in hold.blocks:
                users[block] += 1
        for _, blocks in self._vllm.deferred_frees:
            for block in blocks:
                users[block.block_id] += not block.is_null
        real = [0 if block.is_null else block.ref_cnt for block in self._pool.blocks]
        assert users == real

    def statuses(self) -> dict[str, str]:
        """Where requests stand."""
        return {name: str(request.status) for name, request in self.requests.items()}


class VllmAggregator:
    """vLLM's aggregation of several ranks' reports."""

    def __init__(self, ranks: int) -> None:
        self._vllm = KVOutputAggregator(ranks)

    @property
    def waiting(self) -> set[str]:
        """Requests that some ranks have reported, and others not yet."""
        return {*self._vllm._send_remaining_count, *self._vllm._recv_remaining_count}

    def aggregate(self, outputs: Sequence[ConnectorOutput]) -> ModelRunnerOutput:
        """One step's reports, one a rank."""
        made = []
        for one in outputs:
            report = KVConnectorOutput(
                finished_sending=one.finished_sending,
                finished_recving=one.finished_recving,
                invalid_block_ids=one.invalid_block_ids,
                failed_recving=one.failed_recving,
                kv_connector_worker_meta=one.kv_connector_worker_meta,
            )
            made.append(ModelRunnerOutput(req_ids=[], req_id_to_index={}, kv_connector_output=report))
        return self._vllm.aggregate(made)


class VllmEngine(ContractEngine):
    """One engine with vLLM's scheduler."""

    def _config(self) -> VllmConfig:
        role = {(True, True): "kv_both", (True, False): "kv_producer"}.get(
            (self.shape.saves, self.shape.loads), "kv_consumer"
        )
        return engine_config(self.shape.settings, role=role, stages=self.shape.pp, model=self.shape.model)

    def _connector(self) -> Any:
        return GuardedVllmScheduler(self._config(), self.side, self.shape.model)

    def _worker(self, rank: PagedRank) -> Any:
        return GuardedVllmWorker(self._config(), rank)

    def _scheduler(self) -> Any:
        return VllmScheduler(self._config(), self.connector, self._rng, self.shape.model)

    def _aggregator(self) -> Any:
        return VllmAggregator(len(self.ranks))
