"""One rank that carries out steps as vLLM's model runner does: which of its connector's methods it calls, and when.

It computes by writing the truth into its pages, spoils blocks the moment they change hands, and looks before each layer
whether what its attention would read is true.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from kvrelay.connector.layout import Run
from kvrelay.testing.engine_shapes import ConnectorOutput
from kvrelay.testing.true_kv import BLOCK

if TYPE_CHECKING:
    from kvrelay.testing.fake_scheduler import Batch, Row
    from kvrelay.testing.paged_rank import PagedRank

SPOILED = 0xBAD
GUESSES = 3
"""How often a drafter computes in a step."""


class FakeWorker:
    """One rank. ``connector`` has the methods of vLLM's, its workers' half."""

    def __init__(self, connector: Any, rank: PagedRank, *, drafter: bool = False) -> None:
        """``drafter``: the last layer is a drafter's, computed after the step's report, and again for each guess."""
        self._drafter = drafter
        self.connector = connector
        self.rank = rank
        self.todo: deque[Batch] = deque()
        self.done: deque[ConnectorOutput] = deque()
        self.spoiled: set[int] = set()
        """Free blocks that hold what `spoil` left there."""

    def execute(self, *, stop_at: int | None = None) -> None:
        """The next step. ``stop_at``: the pass is broken off before that layer; no report is made."""
        batch = self.todo.popleft()
        connector, output = self.connector, batch.output
        connector.handle_preemptions(output.kv_connector_metadata)
        self.spoil(batch.changed)
        self.spoiled = (self.spoiled | batch.changed) & batch.free
        connector.bind_connector_metadata(output.kv_connector_metadata)
        if output.has_sync_kv_loads:
            connector.start_load_kv(None)
        layers = list(self.rank.own_layers) if batch.rows else []
        drafter = layers.pop() if layers and self._drafter else None
        for layer in layers:
            if stop_at is not None and layer >= stop_at:
                connector.wait_for_save()
                return
            self._layer(batch, layer)
        if not output.has_sync_kv_loads:
            connector.start_load_kv(None)
        if drafter is None:
            connector.wait_for_save()
        report = self._report(output.finished_req_ids)
        if drafter is not None:
            self._layer(batch, drafter)
            for _ in range(GUESSES - 1):
                connector.wait_for_layer_load(layer_name(drafter))
                self._computed(drafter)
            connector.wait_for_save()
        connector.clear_connector_metadata()
        self.done.append(report)

    def _layer(self, batch: Batch, layer: int) -> None:
        name = layer_name(layer)
        self.connector.wait_for_layer_load(name)
        for row in batch.rows:
            self._compute(batch, row, layer)
        for row in batch.rows:
            blocks = row.of(self.rank.model.table(layer))
            if self.rank.wrong(row.request.truth, blocks, layer, row.computed):
                assert batch.output.has_sync_kv_loads, f"{row.request.request_id} would read wrong KV"
                batch.spoiled.add(row.request.request_id)
        self._computed(layer)

    def _computed(self, layer: int) -> None:
        pages = self.rank.pages[layer - self.rank.own_layers.start]
        self.connector.save_kv_layer(layer_name(layer), pages, None)

    def _compute(self, batch: Batch, row: Row, layer: int) -> None:
        truth = self.rank.part(row.request.truth.kv, layer)[:, :, row.computed : row.computed + row.count]
        tokens = np.full((*truth.shape[:2], row.count, truth.shape[3]), SPOILED, "u4")
        if row.request.request_id not in batch.spoiled:
            tokens[:, :, : row.valid] = truth[:, :, : row.valid]
        first = row.computed // BLOCK
        blocks = row.of(self.rank.model.table(layer))
        self.rank.blocks(layer).write(Run(blocks[first:], row.computed % BLOCK, row.count), tokens)

    def _report(self, finished: set[str]) -> ConnectorOutput:
        connector = self.connector
        results = connector.get_transfer_results(finished)
        report = ConnectorOutput(
            finished_sending=set(results.finished_sending) or None,
            finished_recving=set(results.finished_recving) or None,
            failed_recving=set(results.failed_recving),
            invalid_block_ids=set(connector.get_block_ids_with_load_errors()),
        )
        report.kv_connector_worker_meta = connector.build_connector_worker_meta()
        return report

    def spoil(self, blocks: set[int]) -> None:
        """Another's bytes, from now on."""
        for pages in self.rank.pages:
            pages[sorted(blocks)] = SPOILED

    def touched(self, blocks: list[int]) -> list[int]:
        """Which of these blocks hold anything else than `spoil` left there."""
        return [block for block in blocks if any((pages[block] != SPOILED).any() for pages in self.rank.pages)]


def layer_name(layer: int) -> str:
    """What vLLM calls a layer."""
    return f"model.layers.{layer}.self_attn.attn"
