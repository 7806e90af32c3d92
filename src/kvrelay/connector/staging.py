"""KV in one rank's host memory: fetched and verified before the engine is asked for blocks, copied once there are some.

Memory is bounded and taken when it is needed. What does not fit is not staged: it is loaded as any other KV is.
"""

from __future__ import annotations

import threading
from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvrelay.connector.core.orders import LoadOrder
    from kvrelay.connector.rank_kv import RankLayer
    from kvrelay.identity.core.chunks import Chunk


@dataclass(frozen=True, slots=True)
class StagedLayer:
    """One layer of consecutive chunks."""

    layer: RankLayer
    chunks: tuple[Chunk, ...]
    views: tuple[memoryview, ...]
    """One a chunk."""
    sums: array[int]
    """Of their segments, one after the other."""

    def of(self, start: int, end: int) -> StagedLayer:
        """Only chunks that hold one of tokens ``[start, end)``."""
        kept = [at for at, chunk in enumerate(self.chunks) if chunk.start < end and chunk.end > start]
        each = len(self.sums) // len(self.chunks)
        return StagedLayer(
            self.layer,
            tuple(self.chunks[at] for at in kept),
            tuple(self.views[at] for at in kept),
            array("Q", [value for at in kept for value in self.sums[at * each : (at + 1) * each]]),
        )


@dataclass(slots=True)
class Staged:
    """One request's KV."""

    memory: np.ndarray[tuple[int], np.dtype[np.uint8]]
    layers: list[StagedLayer] = field(default_factory=list)
    used: int = 0
    transfer_s: float = 0.0
    """What bringing it here took."""

    def put(self, layer: RankLayer, chunks: Sequence[Chunk], views: Sequence[memoryview], sums: array[int]) -> None:
        """Keep a copy of verified bytes."""
        kept = []
        for view in views:
            place = self.memory[self.used : self.used + view.nbytes]
            place[:] = np.frombuffer(view, np.uint8)
            kept.append(place.data)
            self.used += view.nbytes
        self.layers.append(StagedLayer(layer, tuple(chunks), tuple(kept), sums))

    def covers(self, order: LoadOrder, groups: Iterable[int]) -> bool:
        """Whether all that is to be loaded of these groups is here."""
        held = {kept.layer.group: {chunk.key for chunk in kept.chunks} for kept in self.layers}
        return all(chunk.key in held.get(group, ()) for group in groups for chunk in order.of(group))


class Staging:
    """Everything staged on one rank, by the order's number. Safe to use from several threads."""

    def __init__(self, limit_bytes: int) -> None:
        """``limit_bytes``: of all requests together."""
        self._limit = limit_bytes
        self._lock = threading.Lock()
        self._held: dict[int, Staged] = {}
        self._used = 0

    @property
    def used(self) -> int:
        """Bytes held."""
        return self._used

    def begin(self, number: int, size_bytes: int) -> Staged | None:
        """Room for an order's KV; None if there is none now."""
        with self._lock:
            if self._used + size_bytes > self._limit:
                return None
            self._used += size_bytes
            staged = self._held[number] = Staged(np.empty(size_bytes, np.uint8))
        return staged

    def take(self, number: int) -> Staged | None:
        """What is held for an order, which is forgotten here."""
        with self._lock:
            staged = self._held.pop(number, None)
            if staged is not None:
                self._used -= staged.memory.nbytes
        return staged
