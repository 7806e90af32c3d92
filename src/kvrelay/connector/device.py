"""KV that lies on a device: its blocks come and go through a mirror in host memory, on streams of their own.

An engine's kernels are queued long before they run. A layer's blocks may be read once what was queued up to its
attention has run, and be written once what was queued before the step has: a *mark* is such a place in the queue.
What a block's bytes mean is the codec's affair, and looked at in host memory only.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import torch

from kvrelay.connector.pages import Span, save_each, unpacked_spans

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from _typeshed import ReadableBuffer, WriteableBuffer

    from kvrelay.connector.layout import BlockKind
    from kvrelay.connector.pages import Column, Objects

ITEMS = {1: (torch.int8, np.uint8), 2: (torch.int16, np.uint16), 4: (torch.int32, np.uint32)}
"""Types of items by their bytes, as a tensor and as an array: CUDA kernels of torch know signed integers only."""
MIRROR_BYTES = 16 << 20
"""What is copied at once between a layer and a mirror, if an object is not larger."""

Mark = TypeVar("Mark")


class Copies(Protocol[Mark]):
    """Copies of one device's blocks. `mark` and `step_begins` are for the engine's thread, the rest for any."""

    def mark(self) -> Mark:
        """Everything that the engine has queued so far."""

    def step_begins(self) -> None:
        """Blocks that change hands with this step are not touched any more by what has been queued so far."""

    def host(self, shape: Sequence[int], item_bytes: int) -> tuple[torch.Tensor, np.ndarray[Any, Any]]:
        """Memory that the device copies from and to: signed integers as a tensor, unsigned ones as an array."""

    def gather(self, blocks: torch.Tensor, ids: Sequence[int], out: torch.Tensor, after: Mark | None) -> None:
        """Copy ``blocks[ids]`` to the host, once the step's beginning and ``after`` have been reached.

        Returns when they are there, as `scatter` does.
        """

    def scatter(self, given: torch.Tensor, blocks: torch.Tensor, ids: Sequence[int]) -> None:
        """Copy from the host to ``blocks[ids]``, once the step's beginning has been reached."""


class Mirror:
    """Some blocks of one kind in host memory."""

    def __init__(self, kind: BlockKind, copies: Copies[Any], blocks: int) -> None:
        self.blocks = blocks
        shape = (blocks * kind.kernel_blocks, kind.heads, kind.kernel_tokens, kind.content)
        self.tensor, pages = copies.host(shape, kind.item_bytes)
        self.layer = kind.layer(pages)


class Mirrors:
    """Of each thread one, for all layers of one kind."""

    def __init__(self, kind: BlockKind, copies: Copies[Any]) -> None:
        self.kind = kind
        self.copies = copies
        self.most = max(1, MIRROR_BYTES // kind.block_bytes)
        """Blocks that are copied at once, if an object has not more."""
        self._own = threading.local()

    def get(self, blocks: int) -> Mirror:
        """This thread's, with room for so many blocks."""
        found: Mirror | None = getattr(self._own, "mirror", None)
        if found is None or found.blocks < blocks:
            found = self._own.mirror = Mirror(self.kind, self.copies, max(blocks, self.most))
        return found


class DeviceLayer:
    """One layer's KV cache of one rank, on a device: `PagedLayer` for who saves and loads.

    ``blocks``: ``[kernel block][head][token][content]``, the engine's own memory, with any strides.
    """

    in_host_memory = False

    def __init__(self, mirrors: Mirrors, blocks: torch.Tensor) -> None:
        self._mirrors = mirrors
        self._copies = mirrors.copies
        self._ratio = mirrors.kind.kernel_blocks
        self._blocks = blocks.view(ITEMS[mirrors.kind.item_bytes][0])
        self._computed: Any = None
        self.block_tokens = mirrors.kind.block_tokens

    def computed(self) -> None:
        """The engine has queued what writes this step's tokens. For its own thread."""
        self._computed = self._copies.mark()

    def save(
        self,
        blocks: Sequence[int],
        spans: Sequence[Span],
        targets: Sequence[WriteableBuffer],
        others: Sequence[DeviceLayer] = (),
    ) -> bytes:
        """As `PagedLayer.save`; waits until the device has computed the layers."""
        return save_each([self, *others], targets, lambda layer, parts: layer._save(blocks, spans, parts))

    def _save(self, blocks: Sequence[int], spans: Sequence[Span], targets: Sequence[memoryview]) -> bytes:
        sums = b""
        for at, part in self._parts(spans):
            ids, shifted = self._of(blocks, part)
            mirror = self._mirrors.get(len(ids))
            self._gather(ids, mirror, 0)
            sums += mirror.layer.save(range(len(ids)), shifted, targets[at : at + len(part)])
        return sums

    def load(
        self, blocks: Sequence[int], spans: Sequence[Span], sources: Sequence[ReadableBuffer], sums: Column
    ) -> int | None:
        """As `PagedLayer.load`; blocks are written once all their objects have been found true."""
        each = len(memoryview(sums).cast("B")) // max(1, len(spans))
        told = memoryview(sums).cast("B")
        for at, part in self._parts(spans):
            ids, shifted = self._of(blocks, part)
            mirror = self._mirrors.get(len(ids))
            for edge in self._edges(shifted):
                self._gather(ids[edge : edge + 1], mirror, edge)
            given = sources[at : at + len(part)]
            bad = mirror.layer.load(range(len(ids)), shifted, given, bytes(told[at * each : (at + len(part)) * each]))
            if bad is not None:
                return at + bad
            self._copies.scatter(self._part(mirror, 0, len(ids)), self._blocks, self._kernel_ids(ids))
        return None

    def load_at(self, blocks: Column, spans: Column, objects: Objects, first: int) -> int | None:
        """As `PagedLayer.load_at`."""
        layer, given = self._mirrors.get(1).layer, unpacked_spans(spans)
        sources, sums = objects.of(first, layer.heads, [layer.segment_bytes(span.tokens) for span in given])
        return self.load(np.frombuffer(blocks, np.uint64).tolist(), given, sources, sums)

    def _parts(self, spans: Sequence[Span]) -> Iterator[tuple[int, Sequence[Span]]]:
        """Neighbouring spans that fit in a mirror together, and where they begin; a large one alone."""
        first = 0
        for at in range(1, len(spans) + 1):
            if at < len(spans) and self._count(spans[first : at + 1]) <= self._mirrors.most:
                continue
            yield first, spans[first:at]
            first = at

    def _bounds(self, spans: Sequence[Span]) -> tuple[int, int]:
        """The blocks that spans touch, counted through the request's."""
        size = self.block_tokens
        return min(span.first // size for span in spans), max(-(-(span.first + span.count) // size) for span in spans)

    def _count(self, spans: Sequence[Span]) -> int:
        first, end = self._bounds(spans)
        return end - first

    def _of(self, blocks: Sequence[int], spans: Sequence[Span]) -> tuple[Sequence[int], list[Span]]:
        """The blocks that spans touch, and the spans counted through these."""
        first, end = self._bounds(spans)
        shift = first * self.block_tokens
        return blocks[first:end], [Span(one.tokens, one.skip, one.count, one.first - shift) for one in spans]

    def _edges(self, spans: Sequence[Span]) -> set[int]:
        """Blocks that are not written whole: what else is in them stays."""
        size = self.block_tokens
        covered: dict[int, int] = {}
        for span in spans:
            at = span.first
            while at < span.first + span.count:
                count = min(size - at % size, span.first + span.count - at)
                covered[at // size] = covered.get(at // size, 0) + count
                at += count
        return {block for block in range(self._count(spans)) if covered.get(block, 0) < size}

    def _gather(self, ids: Sequence[int], mirror: Mirror, at: int) -> None:
        out = self._part(mirror, at, at + len(ids))
        self._copies.gather(self._blocks, self._kernel_ids(ids), out, self._computed)

    def _part(self, mirror: Mirror, first: int, end: int) -> torch.Tensor:
        return mirror.tensor[first * self._ratio : end * self._ratio]

    def _kernel_ids(self, ids: Sequence[int]) -> Sequence[int]:
        ratio = self._ratio
        return ids if ratio == 1 else [block * ratio + part for block in ids for part in range(ratio)]
