"""One try at a load: lease what there is of a prefix, take each layer as soon as it is whole, verify, release."""

from __future__ import annotations

import logging
import threading
import time
from array import array
from itertools import groupby, takewhile
from operator import attrgetter
from typing import TYPE_CHECKING

from kvrelay.connector.core.orders import LoadKind, LoadOutcome
from kvrelay.connector.pages import Span
from kvrelay.errors import (
    CorruptionError,
    DeadlineError,
    KvRelayError,
    LeaseExpiredError,
    PoolUnavailableError,
    WriterLostError,
)
from kvrelay.types import Reason
from kvrelay.wire import limits
from kvrelay.wire.messages import Done, Range, Release

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvrelay.client.blocking import PoolClient
    from kvrelay.client.core.operations import Prefix
    from kvrelay.connector.core.orders import LoadOrder
    from kvrelay.connector.rank_kv import RankKv, RankLayer
    from kvrelay.connector.staging import Staged
    from kvrelay.identity.core.chunks import Chunk

log = logging.getLogger(__name__)

SLICE_S = 0.1
"""How soon a load notices that it was cancelled."""
LEASE_S = 10.0
"""A read lease lasts at least as long: what is sealed needs no waiting, but copying."""
BATCH_BYTES = 8 << 20
"""Fetched at once, if that many layers are ready; at least one layer is."""

REASONS: tuple[tuple[type[KvRelayError], Reason], ...] = (
    (WriterLostError, Reason.WRITER_LOST),
    (CorruptionError, Reason.CORRUPT),
    (PoolUnavailableError, Reason.POOL_DOWN),
    (LeaseExpiredError, Reason.LEASE_EXPIRED),
    (DeadlineError, Reason.TIMEOUT),
)


def reason_of(error: KvRelayError) -> Reason:
    """What a failed load is counted as."""
    return next((reason for kind, reason in REASONS if isinstance(error, kind)), Reason.FAILED_LOAD)


class CancelledLoadError(KvRelayError):
    """Nobody waits for the load any more."""


class LoadJob:
    """One load order."""

    def __init__(self, order: LoadOrder, deadline: float) -> None:
        self.order = order
        self.began = time.monotonic()
        self.deadline = deadline
        self.withdrawn = False
        self.writing = threading.Lock()
        """Held while blocks are written; the engine may take them back in between."""
        self._once = threading.Lock()

    def end(self) -> bool:
        """It is over; whether it was not before."""
        return self._once.acquire(blocking=False)


class Attempt:
    """One try at a load, under one lease."""

    def __init__(
        self,
        kv: RankKv,
        client: PoolClient,
        job: LoadJob,
        cancelled: Callable[[], bool],
        deadline: float,
        *,
        unsealed: bool,
        staged: Staged | None = None,
    ) -> None:
        """``cancelled``: whether nobody waits for it any more; ``unsealed``: whether to wait for what is being written.

        ``staged``: where to put it, if not into the order's blocks.
        """
        self._staged = staged
        self._cancelled = cancelled
        self._kv = kv
        self._client = client
        self._job = job
        self._order = order = job.order
        self._deadline = deadline
        self._unsealed = unsealed
        self.valid_end = order.start
        self.bytes = 0
        self.transfer_s = 0.0

    def outcome(self, reason: Reason) -> LoadOutcome:
        """How it ended, for ``reason``."""
        return LoadOutcome(self.valid_end, self.bytes, self.transfer_s, reason)

    def run(self) -> KvRelayError | None:
        """Load what can be loaded, up to ``valid_end``; the error that stopped it, if any."""
        prefixes: dict[int, Prefix] = {}
        try:
            left = max(SLICE_S, self._deadline - time.monotonic())
            for group in self._kv.held:
                keys = [self._kv.geometry.groups[group].key(chunk.key) for chunk in self._order.of(group)]
                lease_s = min(limits.MAX_LEASE_S, max(LEASE_S, 2 * left))
                if keys:
                    prefixes[group] = self._client.match_prefix(
                        keys, lease_s=lease_s, unsealed=self._unsealed, sums=limits.MAX_SUMS
                    )
            end = self._end(prefixes)
            if prefixes and end > self._order.start:
                self._load(prefixes, end)
            # Only now is it certain that the bytes read were still the objects'.
            for prefix in prefixes.values():
                self._part_with(prefix)
        except KvRelayError as error:
            for prefix in prefixes.values():
                if not self._client.closed:
                    self._release(prefix)
            return error
        self.valid_end = end
        return None

    def _end(self, prefixes: dict[int, Prefix]) -> int:
        """Up to which token there is something to load."""
        order = self._order
        if any(len(prefix) < len(order.of(group)) for group, prefix in prefixes.items()):
            if not self._kv.divisible:
                return order.start
            count = min(map(len, prefixes.values()))
            return min(order.end, order.chunks[count - 1].end) if count else order.start
        return order.end

    def _part_with(self, prefix: Prefix) -> None:
        """End the lease of what was loaded; raises `LeaseExpiredError` if it had run out.

        A step waits for a synchronous load, and not for the pool's answer to this: whatever it copied was compared with
        the checksums while it was copied, so bytes of another object would have been noticed.
        """
        if self._order.kind is not LoadKind.NOW:
            self._client.release(prefix)
        elif prefix.lease:
            self._client.start(Release(0, prefix.lease), Done)
            prefix.lease = 0

    def _release(self, prefix: Prefix) -> None:
        try:
            self._client.release(prefix)
        except KvRelayError as error:
            log.debug("kvrelay: %s", error)

    def _load(self, prefixes: dict[int, Prefix], end: int) -> None:
        chunks = {group: self._order.of(group)[: len(prefix)] for group, prefix in prefixes.items()}
        for group, prefix in prefixes.items():
            self._check(group, chunks[group], prefix)
        layers = [layer for layer in self._kv.layers if layer.group in prefixes]
        most = 1 if self._client.arena is not None else self._batch(layers, chunks)
        while layers:
            batch = self._ready(layers, prefixes, most)
            layers = layers[len(batch) :]
            began = time.monotonic()
            for group, same in groupby(batch, key=attrgetter("group")):
                self._fetch(list(same), chunks[group], prefixes[group], end)
            self.transfer_s += time.monotonic() - began

    def _check(self, group: int, chunks: Sequence[Chunk], prefix: Prefix) -> None:
        for chunk, view in zip(chunks, prefix.views, strict=True):
            spec = self._kv.geometry.groups[group].spec(chunk.key, chunk.tokens)
            if (view.size, view.layers, view.segments) != (spec.size, spec.layers, spec.segments):
                raise CorruptionError(f"object {spec.key.hex()} has another geometry than its key says")

    def _batch(self, layers: Sequence[RankLayer], chunks: dict[int, tuple[Chunk, ...]]) -> int:
        """How many layers to fetch at once."""
        most = max(
            sum(self._kv.share(layer).bytes_per_layer(chunk.tokens, self._kv.group(layer)) for chunk in chunks[at])
            for at, layer in {layer.group: layer for layer in layers}.items()
        )
        return max(1, BATCH_BYTES // most)

    def _ready(self, layers: Sequence[RankLayer], prefixes: dict[int, Prefix], most: int) -> Sequence[RankLayer]:
        """The next layers, as many as are ready: waits for the first."""
        first = layers[0]
        if prefixes[first.group].ready <= first.place:
            self._wait(prefixes[first.group], first.place + 1)
        batch = takewhile(lambda layer: layer.place < prefixes[layer.group].ready, layers[:most])
        return list(batch)

    def _fetch(self, layers: Sequence[RankLayer], chunks: Sequence[Chunk], prefix: Prefix, end: int) -> None:
        """Bring layers of one group into the blocks."""
        ranges = [
            Range(index, self._kv.first_segment(layer), self._kv.share(layer).heads)
            for layer in layers
            for index in range(len(chunks))
        ]
        views = self._client.fetch(prefix, ranges, verify=self._staged is not None)
        for at, layer in enumerate(layers):
            part = slice(at * len(chunks), (at + 1) * len(chunks))
            sums = array("Q")
            for span in ranges[part]:
                sums += prefix.sums(span)
            bad = self._put(layer, chunks, views[part], sums, end)
            if bad is not None:
                self._client.report_damage(prefix, bad)
        self.bytes += sum(view.nbytes for view in views)

    def _wait(self, prefix: Prefix, layers: int) -> int:
        while True:
            if self._job.withdrawn or self._cancelled():
                raise CancelledLoadError("the request was aborted")
            left = self._deadline - time.monotonic()
            try:
                return self._client.wait(prefix, layers, timeout_s=max(0.0, min(SLICE_S, left)))
            except DeadlineError:
                if self._client.closed or left <= SLICE_S:
                    raise

    def _put(
        self, layer: RankLayer, chunks: Sequence[Chunk], views: Sequence[memoryview], sums: array[int], end: int
    ) -> int | None:
        """Bring one layer of all chunks where it is to go. The first chunk that does not match its checksums."""
        if self._staged is None:
            with self._job.writing:
                if self._job.withdrawn:
                    raise CancelledLoadError("it was not done within the time its step waits for it")
                return write_layer(self._order, layer, chunks, views, sums, end)
        self._staged.put(layer, chunks, views, sums)
        return None


def write_layer(
    order: LoadOrder,
    layer: RankLayer,
    chunks: Sequence[Chunk],
    views: Sequence[memoryview],
    sums: array[int],
    end: int,
) -> int | None:
    """Put one layer of chunks into the blocks of an order, clipped to what was ordered.

    Returns the first chunk that does not match its checksums: its bytes may be in the blocks, and mean nothing.
    """
    first = order.starts[layer.group]
    run = layer.run(order.tables, first, end)
    spans = []
    for chunk in chunks:
        start, stop = max(chunk.start, first), min(chunk.end, end)
        spans.append(Span(chunk.tokens, start - chunk.start, stop - start, run.offset + start - first))
    return layer.pages.load(run.blocks, spans, views, sums)
