"""All ranks' reports of a step as one, as vLLM's ``KVOutputAggregator`` makes it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvrelay.testing.engine_shapes import ConnectorOutput

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class OutputAggregator:
    """A request's transfer has ended when as many ranks as there are have said so, in whichever steps."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._sending: dict[str, int] = {}
        self._receiving: dict[str, int] = {}
        self._failed: set[str] = set()

    @property
    def waiting(self) -> set[str]:
        """Requests that some ranks have reported, and others not yet."""
        return self._sending.keys() | self._receiving.keys()

    def aggregate(self, outputs: Sequence[ConnectorOutput]) -> ConnectorOutput:
        """One step's reports, one a rank."""
        joined = ConnectorOutput()
        sending: set[str] = set()
        receiving: set[str] = set()
        for output in outputs:
            sending |= self._count(output.finished_sending or (), self._sending)
            receiving |= self._count(output.finished_recving or (), self._receiving)
            joined.invalid_block_ids |= output.invalid_block_ids
            self._failed |= output.failed_recving
            meta = output.kv_connector_worker_meta
            if joined.kv_connector_worker_meta is None:
                joined.kv_connector_worker_meta = meta
            elif meta is not None:
                joined.kv_connector_worker_meta = joined.kv_connector_worker_meta.aggregate(meta)
        joined.finished_sending, joined.finished_recving = sending or None, receiving or None
        joined.failed_recving = self._failed & receiving
        self._failed -= joined.failed_recving
        return joined

    def _count(self, names: Iterable[str], left: dict[str, int]) -> set[str]:
        done = set()
        for name in names:
            left[name] = left.get(name, self._ranks) - 1
            if not left[name]:
                del left[name]
                done.add(name)
        return done
