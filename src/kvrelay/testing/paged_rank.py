"""One rank of a small engine: real pages, the connector's real worker side, and a check that what it holds is true."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvrelay.connector.codec import find_codec
from kvrelay.connector.layout import PagedLayer, Run
from kvrelay.connector.link import PoolLink
from kvrelay.connector.loader import Loader
from kvrelay.connector.saver import Saver
from kvrelay.connector.staging import Staging
from kvrelay.connector.worker_side import WorkerSide
from kvrelay.testing.true_kv import BLOCK, GROUP
from kvrelay.testing.true_models import DENSE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvrelay.connector.core.geometry import RankShare
    from kvrelay.connector.counters import Counters
    from kvrelay.testing.true_kv import Request, Truth
    from kvrelay.testing.true_models import TrueModel

STAGING_BYTES = 1 << 20
SETTLE_S = 30.0


class PagedRank:
    """One rank's pages and worker side."""

    def __init__(
        self,
        address: str,
        name: str,
        *,
        group: str,
        share: RankShare,
        shm: bool,
        hold_s: float,
        load_s: float,
        counters: Counters,
        sync_s: float = 1.0,
        model: TrueModel = DENSE,
        pages: list[np.ndarray[Any, Any]] | None = None,
    ) -> None:
        """``share``: of all layers. ``pages``: of another that is this rank too, with another pool.

        ``hold_s``, ``load_s``, ``sync_s``: how long saves, loads and synchronous loads may take.
        """
        self.model = model
        self.share = share
        self.own_layers = range(share.first_layer, share.first_layer + share.layers)
        codec = find_codec("CPU_ATTN", "vec", block_tokens=BLOCK, head_size=GROUP.head_size, item_bytes=4)
        shape = (model.blocks, self.share.heads, 2 * BLOCK * GROUP.head_size)
        self.pages = pages or [np.full(shape, 0xDEAD, "u4") for _ in self.own_layers]
        self.layers = [PagedLayer(p, codec, block_tokens=BLOCK, head_size=GROUP.head_size) for p in self.pages]
        for layer in self.layers:
            layer.in_host_memory = sync_s > 0  # else its loads take some time, which they are not given
        self.links = [
            PoolLink(address, name=f"{name} {what}", token=None, map_arena=shm)
            for what in ("saves", "loads 0", "loads 1", "loads now")
        ]
        for link in self.links:
            link.start()
        kv = model.rank_kv(share, self.layers)
        self.side = WorkerSide(
            layers=share.layers,
            tables=model.tables,
            hold_s=hold_s,
            announce_wait_s=0.01,
            sync_load_wait_s=sync_s,
        )
        saver = Saver(
            kv=kv, group=group, link=self.links[0],
            counters=counters, name=f"{name} saves",
        )  # fmt: skip
        self.staging = Staging(STAGING_BYTES)
        loader, sync_loader = (
            Loader(
                kv=kv,
                links=links,
                timeout_s=load_s,
                cancelled=self.side.is_cancelled,
                ended=self.side.load_ended,
                counters=counters,
                name=f"{name} loads",
                staging=self.staging,
                stage_ended=self.side.stage_ended,
                unstaged=self.side.is_unstaged,
            )
            for links in (self.links[1:3], self.links[3:])
        )
        self.side.start(saver, loader, sync_loader)

    def settle(self) -> None:
        """Wait until it has its connections, or knows that there is no pool."""
        for link in self.links:
            link.settle(SETTLE_S)

    def blocks(self, layer: int) -> PagedLayer:
        """The pages of one of its layers, by its number in the whole model."""
        return self.layers[layer - self.share.first_layer]

    def part(self, kv: np.ndarray[Any, Any], layer: int) -> np.ndarray[Any, Any]:
        """This rank's heads of a layer."""
        part: np.ndarray[Any, Any] = kv[layer, self.share.first_head : self.share.first_head + self.share.heads]
        return part

    def poison(self, blocks: Sequence[int]) -> None:
        """Another's bytes, from now on."""
        for pages in self.pages:
            pages[list(blocks)] = 0xBAD

    def wrong(self, truth: Truth, blocks: Sequence[int], layer: int, computed: int) -> list[int]:
        """Tokens of which attention would read something else than the truth."""
        if not computed:
            return []
        first = self.model.reach(layer, computed)
        if first == computed:
            return []
        held = self.blocks(layer).read(Run(blocks[first // BLOCK :], first % BLOCK, computed - first))
        differs = (held != self.part(truth.kv, layer)[:, :, first:computed]).any(axis=(0, 1, 3))
        return [int(at) + first for at in np.flatnonzero(differs)]

    def check(self, request: Request, layer: int, computed: int) -> None:
        """What attention would read of a request is true."""
        wrong = self.wrong(request.truth, request.blocks, layer, computed)
        assert not wrong, f"{request.name} layer {layer}: wrong KV of tokens {wrong}"
