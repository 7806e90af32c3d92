"""Loads what the scheduler's side has found and leased: straight out of the arena, without a word to the pool.

The order says where the objects are and what their checksums are. Every segment is compared with its checksum while it
is copied, so bytes that are not the objects' any more (the lease ran out, the pool is another) are noticed.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from kvrelay.connector.attempt import CancelledLoadError, write_layer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvrelay.client.blocking import PoolClient
    from kvrelay.connector.attempt import LoadJob
    from kvrelay.connector.core.orders import Placed
    from kvrelay.connector.rank_kv import RankKv, RankLayer


class PlacedLoad:
    """One load of objects whose places are known."""

    def __init__(self, kv: RankKv, job: LoadJob, placed: Placed, arena: memoryview) -> None:
        self._kv = kv
        self._job = job
        self._arena = arena
        self._offsets = array("Q", placed.offsets)
        self._sums = array("Q", placed.sums)
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
        order = self._job.order
        for layer in self._kv.layers:
            views = list(self._views(layer))
            if cancelled():
                raise CancelledLoadError("the request was aborted")
            with self._job.writing:
                if self._job.withdrawn:
                    raise CancelledLoadError("it was not done within the time its step waits for it")
                if write_layer(order, layer, order.chunks, views, self._sums_of(layer), order.end) is not None:
                    return False
            self.bytes += sum(view.nbytes for view in views)
        return True

    def _views(self, layer: RankLayer) -> Iterator[memoryview]:
        group, first, heads = self._kv.group(layer), self._kv.first_segment(layer), self._kv.share(layer).heads
        for chunk, offset in zip(self._job.order.chunks, self._offsets, strict=True):
            size = group.segment_bytes(chunk.tokens)
            yield self._arena[offset + first * size : offset + (first + heads) * size]

    def _sums_of(self, layer: RankLayer) -> array[int]:
        each, first = len(self._sums) // len(self._offsets), self._kv.first_segment(layer)
        sums = array("Q")
        for at in range(first, len(self._sums), each):
            sums += self._sums[at : at + self._kv.share(layer).heads]
        return sums
