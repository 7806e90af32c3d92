"""One rank's KV: its layers in the engine's memory, and which part of which objects they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from kvrelay.connector.layout import Run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from _typeshed import ReadableBuffer, WriteableBuffer

    from kvrelay.connector.core.geometry import KvGeometry, KvGroup, RankShare
    from kvrelay.connector.core.orders import LoadOrder
    from kvrelay.connector.core.tables import Blocks, Tables
    from kvrelay.connector.pages import Column, Objects, Span


class Layer(Protocol):
    """One layer's KV cache of one rank, wherever it lies."""

    block_tokens: int
    in_host_memory: bool
    """A load is no more than a copy of bytes."""

    def computed(self) -> None:
        """The engine says that this step's tokens are in their blocks, or will be. For its own thread."""

    def save(
        self,
        blocks: Sequence[int],
        spans: Sequence[Span],
        targets: Sequence[WriteableBuffer],
        others: Sequence[Any] = (),
    ) -> bytes:
        """Objects out of ``blocks``, one a span; see `kvrelay.connector.pages.Pages.save`.

        ``others``: layers of the same kind, whose segments follow this one's in each buffer.
        """

    def load(
        self, blocks: Sequence[int], spans: Sequence[Span], sources: Sequence[ReadableBuffer], sums: Column
    ) -> int | None:
        """Objects into ``blocks``, one a span; see `kvrelay.connector.pages.Pages.load`."""

    def load_at(self, blocks: Column, spans: Column, objects: Objects, first: int) -> int | None:
        """Objects of one buffer into ``blocks``; see `kvrelay.connector.pages.Pages.load_at`."""


@dataclass(frozen=True, slots=True)
class RankLayer:
    """One layer of one rank."""

    pages: Layer
    group: int
    """Of the geometry's."""
    place: int
    """Among the group's layers of the whole model."""
    table: int
    """The engine's block table that says where its tokens are."""

    def run(self, tables: Sequence[Blocks], start: int, end: int) -> Run:
        """Where tokens ``[start, end)`` lie, by a request's block tables."""
        size = self.pages.block_tokens
        return Run(tables[self.table].between(start, end, size), start % size, end - start)


@dataclass(frozen=True, slots=True)
class RankKv:
    """All layers of one rank, in the order they are computed."""

    geometry: KvGeometry
    shares: tuple[RankShare, ...]
    """Of each group."""
    layers: tuple[RankLayer, ...]
    divisible: bool
    """Whether the engine can take part of a load: see `kvrelay.connector.core.tables.Tables.divisible`."""

    @classmethod
    def dense(cls, geometry: KvGeometry, share: RankShare, pages: Sequence[Layer]) -> RankKv:
        """A rank of a model of one group with one block table."""
        layers = tuple(RankLayer(one, 0, share.first_layer + at, 0) for at, one in enumerate(pages))
        return cls(geometry, (share,), layers, divisible=True)

    @classmethod
    def of(
        cls, geometry: KvGeometry, shares: Sequence[RankShare], layers: Sequence[RankLayer], tables: Tables
    ) -> RankKv:
        """A rank of any model."""
        return cls(geometry, tuple(shares), tuple(layers), divisible=tables.divisible)

    def group(self, layer: RankLayer) -> KvGroup:
        """A layer's group."""
        return self.geometry.groups[layer.group]

    def share(self, layer: RankLayer) -> RankShare:
        """This rank's share of a layer's group."""
        return self.shares[layer.group]

    def first_segment(self, layer: RankLayer) -> int:
        """Index, in its objects, of this rank's first segment of a layer."""
        return self.share(layer).first_segment(layer.place, self.group(layer))

    def size_bytes(self, order: LoadOrder) -> int:
        """Bytes of this rank's share of all an order's chunks."""
        return sum(
            self.share(layer).bytes_per_layer(chunk.tokens, self.group(layer))
            for layer in self.layers
            for chunk in order.of(layer.group)
        )

    @property
    def in_host_memory(self) -> bool:
        """Whether a load is no more than a copy of bytes."""
        return all(layer.pages.in_host_memory for layer in self.layers)

    @property
    def whole(self) -> bool:
        """Whether this rank holds all of every group: no other rank writes any of its objects."""
        return all(
            (share.heads, share.layers) == (group.heads, len(group.layers))
            for share, group in zip(self.shares, self.geometry.groups, strict=True)
        )

    @property
    def held(self) -> tuple[int, ...]:
        """Groups of which this rank holds a layer."""
        return tuple(at for at, share in enumerate(self.shares) if share.layers)

    @property
    def written(self) -> tuple[int, ...]:
        """Groups of which this rank writes its share: others write those it holds copies of."""
        return tuple(at for at in self.held if self.shares[at].writes)
