"""Arithmetic of KV objects: what a chunk's objects look like and which part of each a rank owns.

A model's layers fall into **groups** of one kind: the same attention span, heads and item size. One chunk of one group
is one object, ``[layer][kv_head][plane]``, a plane being ``[token][dim]``: K, then V, or one latent (MLA). A segment
(the pool's unit of writing, reading and checksumming) is all planes of one KV head of one layer. A tensor-parallel rank
owns a head range of every layer, a pipeline rank a layer range: any two engines' ranks meet in whole segments.

The engine's own cut of the layers into block tables is no part of this: see `kvrelay.connector.core.tables`.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING

from kvrelay.errors import ConfigError
from kvrelay.wire.messages import Spec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvrelay.identity.core.chunks import Chunk

KEY = b"kvrelay.group.1\x00"


@dataclass(frozen=True, slots=True)
class KvGroup:
    """One group of the whole model, whatever the parallelism."""

    layers: tuple[int, ...]
    """Numbers of its layers in the model, ascending."""
    heads: int
    head_size: int
    """Items of one token in one plane."""
    item_bytes: int
    planes: int = 2
    window: int = 0
    """Attention reaches back over so many tokens, the one it is computed for included; 0: over all."""
    block_tokens: int = 1
    """Objects hold whole blocks of so many tokens (native packing), or just their tokens (1)."""
    tag: bytes = b""
    """Tells its objects from those of the same chunk in the model's other groups; empty if there are none."""

    def key(self, chunk: bytes) -> bytes:
        """What a chunk's object in this group is called."""
        return sha256(KEY + self.tag + chunk).digest() if self.tag else chunk

    def segment_bytes(self, tokens: int) -> int:
        """Bytes of one KV head of one layer."""
        tokens = -(-tokens // self.block_tokens) * self.block_tokens
        return self.planes * tokens * self.head_size * self.item_bytes

    def object_bytes(self, tokens: int) -> int:
        """Bytes of the object of a chunk of ``tokens`` tokens."""
        return len(self.layers) * self.heads * self.segment_bytes(tokens)

    def spec(self, chunk: bytes, tokens: int) -> Spec:
        """What to announce a chunk's object as."""
        size = self.object_bytes(tokens)
        return Spec(key=self.key(chunk), size=size, layers=len(self.layers), segments=self.heads)

    def specs(self, chunks: Sequence[Chunk]) -> list[tuple[Chunk, Spec]]:
        """Each chunk, and what to announce its object as: chunks of one size are reckoned once."""
        sizes: dict[int, int] = {}
        layers, heads = len(self.layers), self.heads
        found = []
        for chunk in chunks:
            tokens = chunk.end - chunk.start
            if tokens not in sizes:
                sizes[tokens] = self.object_bytes(tokens)
            found.append((chunk, Spec(key=self.key(chunk.key), size=sizes[tokens], layers=layers, segments=heads)))
        return found


@dataclass(frozen=True, slots=True)
class KvGeometry:
    """The whole model's KV: its groups, in an order that all engines of one namespace agree on."""

    groups: tuple[KvGroup, ...]

    @classmethod
    def dense(cls, *, layers: int, kv_heads: int, head_size: int, item_bytes: int) -> KvGeometry:
        """Full attention with K and V of the same heads in every layer."""
        return cls((KvGroup(tuple(range(layers)), kv_heads, head_size, item_bytes),))

    @property
    def layers(self) -> int:
        """How many layers keep KV."""
        return sum(len(group.layers) for group in self.groups)


@dataclass(frozen=True, slots=True)
class RankShare:
    """The layers and KV heads of one group that one rank holds."""

    first_layer: int
    """Place of its first layer among the group's."""
    layers: int
    first_head: int
    heads: int
    writes: bool
    """False on all but one of the ranks that hold copies of the same heads."""

    def first_segment(self, layer: int, group: KvGroup) -> int:
        """Index, in the object, of this rank's first segment of ``layer`` (its place among the group's layers)."""
        return layer * group.heads + self.first_head

    def bytes_per_layer(self, tokens: int, group: KvGroup) -> int:
        """This rank's bytes of one layer of ``tokens`` tokens."""
        return self.heads * group.segment_bytes(tokens)


def rank_share(group: KvGroup, *, tp_rank: int, tp_size: int, first_layer: int, layers: int) -> RankShare:
    """The share of a rank. With fewer KV heads than ranks, neighbouring ranks hold copies of the same head.

    Raises `ConfigError` when heads do not divide evenly.
    """
    heads = group.heads
    if heads % tp_size and tp_size % heads:
        raise ConfigError(
            f"{heads} KV heads cannot be split over tensor_parallel_size {tp_size}: "
            "choose a size that divides the number of KV heads or is a multiple of it"
        )
    if heads >= tp_size:
        own = heads // tp_size
        return RankShare(first_layer, layers, tp_rank * own, own, writes=True)
    copies = tp_size // heads
    return RankShare(first_layer, layers, tp_rank // copies, 1, writes=tp_rank % copies == 0)
