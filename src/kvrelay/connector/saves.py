"""What one engine step saves: its jobs, and which of its layers have been computed."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from msgspec import Struct

from kvrelay.connector.pages import Span

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvrelay.client.blocking import PoolClient
    from kvrelay.connector.core.orders import SaveOrder
    from kvrelay.connector.layout import Run
    from kvrelay.connector.rank_kv import RankLayer
    from kvrelay.identity.core.chunks import Chunk
    from kvrelay.wire.messages import Grant, Spec


class Granted(Struct, frozen=True, gc=False):
    """A chunk's object that is being written."""

    chunk: Chunk
    grant: Grant
    spec: Spec


class Stretch(Struct, frozen=True):
    """Layers of one group, in the same blocks, whose segments are neighbours in its objects."""

    first: int
    """Their first segment."""
    layers: list[RankLayer]


class Job:
    """One save order. ``ended`` is called once, when its blocks will not be read for it any more, from any thread."""

    def __init__(self, order: SaveOrder, ended: Callable[[Job], None]) -> None:
        self.order = order
        self.cancelled = False
        self.granted: dict[int, list[Granted]] = {}
        """Chunks of each group being written for it; the saving thread's own."""
        self.unsaved_tokens = order.tokens
        """Tokens that will be missing if it ends now; the saving thread's own, but for reading."""
        self._ended = ended
        self._once = threading.Lock()

    def end(self) -> bool:
        """It is over; whether it was not before."""
        first = self._once.acquire(blocking=False)
        if first:
            self._ended(self)
        return first

    def runs(self, layer: RankLayer) -> list[tuple[Run, list[Span]]]:
        """Where the granted chunks of a layer's group lie in its blocks: runs of neighbours, and each chunk's place."""
        runs: list[list[Chunk]] = []
        end = -1
        for item in self.granted[layer.group]:
            chunk = item.chunk
            if chunk.start == end:
                runs[-1].append(chunk)
            else:
                runs.append([chunk])
            end = chunk.end
        placed = []
        for chunks in runs:
            run = layer.run(self.order.tables, chunks[0].start, chunks[-1].end)
            shift = run.offset - chunks[0].start
            placed.append((run, [Span.whole(chunk.end - chunk.start, chunk.start + shift) for chunk in chunks]))
        return placed


class Step:
    """The saves of one engine step."""

    def __init__(self, jobs: list[Job]) -> None:
        self.jobs = jobs
        self.announced = threading.Event()
        """The pool has answered, or will not be asked."""
        self.client: PoolClient | None = None
        self.done_layers: set[int] = set()
        """Copied, or being copied; the saving thread's own."""
        self.computed: set[int] = set()
        """Told by the engine; its thread's own, as what follows."""
        self.waiting: list[int] = []
        """Of these, those that are to be published with the next."""
        self.waiting_bytes = 0
        self.waiting_segments = 0
        self.tokens = sum([job.order.tokens for job in jobs])
        self.chunks = sum([len(job.order.chunks) for job in jobs])
        self.sizes: dict[int, tuple[int, int]] = {}
        """By group: bytes and segments of a layer, of all chunks."""

    def told(self, number: int, layer_bytes: int, layer_segments: int) -> None:
        """The engine has computed a layer, of so much: it waits to be published, if it was not told before."""
        if number not in self.computed:
            self.computed.add(number)
            self.waiting.append(number)
            self.waiting_bytes += layer_bytes
            self.waiting_segments += layer_segments

    def take(self) -> list[int]:
        """What has waited."""
        taken, self.waiting, self.waiting_bytes, self.waiting_segments = self.waiting, [], 0, 0
        return taken
