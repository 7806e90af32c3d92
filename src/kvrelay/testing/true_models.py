"""Models that exist in tests only: which layers of the truth attend to what, and under which block tables they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvrelay.connector.core.geometry import KvGeometry, KvGroup, RankShare
from kvrelay.connector.core.tables import Table, Tables
from kvrelay.connector.rank_kv import RankKv, RankLayer
from kvrelay.testing.true_kv import BLOCK, BLOCKS, GEOMETRY, GROUP

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvrelay.connector.layout import PagedLayer
    from kvrelay.identity.core.chunks import Chunk
    from kvrelay.testing.true_kv import Truth


@dataclass(frozen=True)
class TrueModel:
    """A model of the layers and heads of `GEOMETRY`."""

    geometry: KvGeometry
    tables: Tables
    layers: tuple[tuple[int, int], ...]
    """Group and table of each layer."""
    blocks: int = BLOCKS

    def rank_kv(self, share: RankShare, pages: Sequence[PagedLayer]) -> RankKv:
        """One rank's: ``share`` of all layers, whatever their groups, and the pages of its layers."""
        own = range(share.first_layer, share.first_layer + share.layers)
        shares, layers = [], []
        for group in self.geometry.groups:
            held = [place for place, number in enumerate(group.layers) if number in own]
            first = held[0] if held else 0
            shares.append(RankShare(first, len(held), share.first_head, share.heads, share.writes))
        for number, one in zip(own, pages, strict=True):
            at, table = self.layers[number]
            layers.append(RankLayer(one, at, self.geometry.groups[at].layers.index(number), table))
        return RankKv.of(self.geometry, shares, layers, self.tables)

    def table(self, layer: int) -> int:
        """Which block table says where a layer's tokens are."""
        return self.layers[layer][1]

    def reach(self, layer: int, computed: int) -> int:
        """The first token that attention of a layer reads for the token behind ``computed`` others."""
        window = self.tables.windows[self.layers[layer][0]]
        return max(0, computed - window + 1) if window else 0

    def objects(self, truth: Truth, chunk: Chunk) -> dict[bytes, bytes]:
        """What a pool may hold of a chunk: ``[layer][head][K, V][token][dim]`` of each group, by key."""
        return {
            group.key(chunk.key): np.ascontiguousarray(
                truth.kv[list(group.layers)][:, :, :, chunk.start : chunk.end]
            ).tobytes()
            for group in self.geometry.groups
        }


def _model(*groups: tuple[int, tuple[tuple[int, ...], ...]], blocks: int) -> TrueModel:
    """``groups``: window, and the layers of each of its tables."""
    several = len(groups) > 1
    made: list[KvGroup] = []
    tables: list[Table] = []
    layers: dict[int, tuple[int, int]] = {}
    for at, (window, parts) in enumerate(groups):
        own = tuple(sorted(layer for part in parts for layer in part))
        tag = b"%d" % at if several else b""
        made.append(KvGroup(own, GROUP.heads, GROUP.head_size, GROUP.item_bytes, window=window, tag=tag))
        for part in parts:
            layers.update(dict.fromkeys(part, (at, len(tables))))
            tables.append(Table(BLOCK, at))
    windows = tuple(window for window, _ in groups)
    places = tuple(layers[layer] for layer in sorted(layers))
    return TrueModel(KvGeometry(tuple(made)), Tables(tuple(tables), windows, null_block=0), places, blocks)


DENSE = TrueModel(GEOMETRY, Tables.one(BLOCK), ((0, 0),) * GEOMETRY.layers)
MIXED = _model((0, ((1,),)), (13, ((0,), (2,))), blocks=64)
"""Full attention in the middle, a window below and above, each in a table of its own, as vLLM does."""
SLIDING = _model((17, ((0, 1, 2),)), blocks=30)
"""A window in every layer."""
