"""Loads what the scheduler's side has found and leased: straight out of the arena, without a word to the pool.

The order says where the objects are and what their checksums are. Every segment is compared with its checksum while it
is copied, so bytes that are not the objects' any more (the lease ran out, the pool is another) are noticed.
"""

from __future__ import annotations

from array import array
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from kvrelay.connector.attempt import CancelledLoadError
from kvrelay.connector.pages import Objects

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvrelay.client.blocking import PoolClient
    from kvrelay.connector.attempt import LoadJob
    from kvrelay.connector.core.orders import Placed
    from kvrelay.connector.rank_kv import RankKv, RankLayer


class _Slots(NamedTuple):
    """Where layers that share a block table go, packed as `kvrelay.connector.pages.Pages.load_at` takes it."""

    blocks: array[int]
    spans: array[int]
    bytes: int
    """Of one layer of all chunks."""


class PlacedLoad:
    """One load of objects whose places are known."""

    def __init__(self, kv: RankKv, job: LoadJob, placed: Placed, arena: memoryview) -> None:
        self._kv = kv
        self._job = job
        self._objects = Objects(arena, placed.offsets, placed.sums, len(placed.sums) // len(placed.offsets))
        self._slots: dict[tuple[int, int, int], _Slots] = {}
        """By group, block table and block size."""
        self.bytes = 0

    @classmethod
    def of(cls, kv: RankKv, job: LoadJob, client: PoolClient) -> PlacedLoad | None:
        """The load of an order; None: its places are not known, or not in what this connection maps."""
        placed, arena = job.order.placed, client.arena
        if placed is None or arena is None or placed.pool != client.welcome.pool:
            return None
        return cls(kv, job, placed, arena)

    def run(self, cancelled: Callable[[], bool]) -> bool:
        """Load all of it; False: something was not what the order says, so what is in the blocks means nothing.

        Raises:
            CancelledLoadError: nobody waits for it any more.
        """
        for layer in self._kv.layers:
            slots = self._slots_of(layer)
            if cancelled():
                raise CancelledLoadError("the request was aborted")
            with self._job.writing:
                if self._job.withdrawn:
                    raise CancelledLoadError("it was not done within the time its step waits for it")
                first = self._kv.first_segment(layer)
                if layer.pages.load_at(slots.blocks, slots.spans, self._objects, first) is not None:
                    return False
            self.bytes += slots.bytes
        return True

    def _slots_of(self, layer: RankLayer) -> _Slots:
        kind = layer.group, layer.table, layer.pages.block_tokens
        known = self._slots.get(kind)
        if known is None:
            order, first = self._job.order, self._job.order.starts[layer.group]
            run = layer.run(order.tables, first, order.end)
            spans = array("Q")
            for chunk in order.chunks:
                start, stop = max(chunk.start, first), min(chunk.end, order.end)
                spans.extend((chunk.tokens, start - chunk.start, stop - start, run.offset + start - first))
            share, group = self._kv.share(layer), self._kv.group(layer)
            counts = Counter(chunk.tokens for chunk in order.chunks)
            size = sum(number * share.bytes_per_layer(tokens, group) for tokens, number in counts.items())
            known = self._slots[kind] = _Slots(array("Q", run.blocks), spans, size)
        return known
