"""What the bytes of an engine's paged KV cache mean: one codec per attention backend, instruction set and quantisation.

Shape and strides of a KV tensor do not say how a block's items are arranged: vLLM's CPU backend stores K transposed, or
in tiles for AMX, chosen by instruction set, where most GPU backends store each token's K and V side by side. A codec
says it: for every plane (K, V, or MLA's one latent) of one (block, head), where the item of a token and a dim lies.
That place is always a sum, of one part that depends on the token and one that depends on the dim.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import TYPE_CHECKING, TypeAlias

from kvrelay.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

AMX_TILE = 16
"""Tokens of K, or dims of V, in one AMX tile."""
AMX_ROW_BYTES = 4
"""Items are interleaved so that this many bytes lie together along the dot product's axis."""

Factors: TypeAlias = "tuple[tuple[int, int], ...]"
"""Sizes and strides in items, the slowest first; their product counts tokens, or dims, in order."""


def places(factors: Factors) -> array[int]:
    """Where each lies, in items from the first."""
    return array("Q", map(sum, product(*(range(0, size * stride, stride) for size, stride in factors))))


@dataclass(frozen=True, slots=True)
class Plane:
    """How one plane of a (block, head) is stored, from item ``at`` on."""

    at: int
    tokens: Factors
    dims: Factors

    @property
    def token_shape(self) -> tuple[int, ...]:
        """Sizes of the tokens' factors."""
        return tuple(size for size, _ in self.tokens)

    @property
    def num_tokens(self) -> int:
        """Of a block."""
        return prod(self.token_shape)

    @property
    def num_dims(self) -> int:
        """Of a token."""
        return prod(size for size, _ in self.dims)

    def tables(self) -> tuple[bytes, bytes]:
        """Places of tokens and of dims, packed u64: an item's is the sum of its two."""
        dims = array("Q", (self.at + place for place in places(self.dims)))
        return places(self.tokens).tobytes(), dims.tobytes()


@dataclass(frozen=True, slots=True)
class Codec:
    """The arrangement of one (block, head) whose items lie together."""

    name: str
    planes: tuple[Plane, ...]
    rows: bool
    """A token's items, of all planes, lie together: then tokens may also lie apart, as the tensor's stride says."""

    @property
    def block_items(self) -> int:
        """Items of one (block, head)."""
        return sum(plane.num_tokens * plane.num_dims for plane in self.planes)


def _cpu_plain(tokens: int, dims: int, item_bytes: int) -> Codec:  # noqa: ARG001  one signature for all
    """K ``[dim][token]``, V ``[token][dim]``: vLLM's CPU backend without AMX."""
    k = Plane(0, ((tokens, 1),), ((dims, tokens),))
    v = Plane(tokens * dims, ((tokens, dims),), ((dims, 1),))
    return Codec("cpu-plain", (k, v), rows=False)


def _cpu_amx(tokens: int, dims: int, item_bytes: int) -> Codec:
    """K in tiles of 16 tokens, V in tiles of 16 dims, items along the dot product's axis interleaved to 4 bytes.

    Items of 8 bits lie where those of 16 would: the kernel widens them.
    """
    pair = AMX_ROW_BYTES // max(item_bytes, 2)
    tile = AMX_TILE * pair
    return Codec(
        "cpu-amx",
        (
            Plane(0, ((tokens // AMX_TILE, AMX_TILE * dims), (AMX_TILE, pair)), ((dims // pair, tile), (pair, 1))),
            Plane(
                tokens * dims,
                ((tokens // pair, tile), (pair, 1)),
                ((dims // AMX_TILE, AMX_TILE * tokens), (AMX_TILE, pair)),
            ),
        ),
        rows=False,
    )


def _token_packed(tokens: int, dims: int, item_bytes: int) -> Codec:  # noqa: ARG001  one signature for all
    """``[token][K dims, V dims]``: ``reshape_and_cache_flash`` of FlashAttention, FlashInfer and Triton.

    These backends split the last axis of ``(blocks, heads, tokens, 2 dims)`` into K and V.
    """
    k, v = (Plane(at, ((tokens, 2 * dims),), ((dims, 1),)) for at in (0, dims))
    return Codec("token-packed", (k, v), rows=True)


def _latent(tokens: int, dims: int, item_bytes: int) -> Codec:  # noqa: ARG001  one signature for all
    """``[token][latent, rotary part]``: MLA's ``concat_and_cache_mla``, one plane for all heads."""
    return Codec("latent", (Plane(0, ((tokens, dims),), ((dims, 1),)),), rows=True)


PLAIN, FP8 = "none", "fp8_per_tensor"
"""Quantisations, named as vLLM's ``KVQuantMode``: items of the model's type; 1-byte items with one scale a layer."""

CODECS: dict[tuple[str, str, str], Callable[[int, int, int], Codec]] = {
    ("CPU_ATTN", "vec", PLAIN): _cpu_plain,
    ("CPU_ATTN", "vec16", PLAIN): _cpu_plain,
    ("CPU_ATTN", "amx", PLAIN): _cpu_amx,
    ("CPU_ATTN", "vec", FP8): _cpu_plain,
    ("CPU_ATTN", "amx", FP8): _cpu_amx,
    ("CPU_MLA", "", PLAIN): _latent,
    ("AMX_MLA", "", PLAIN): _latent,
    **{
        (backend, "", quantisation): _token_packed
        for backend in ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN")
        for quantisation in (PLAIN, FP8)
    },
    **{
        (backend, "", quantisation): _latent
        for backend in ("FLASH_ATTN_MLA", "FLASHMLA", "TRITON_MLA")
        for quantisation in (PLAIN, FP8)
    },
}
"""By (attention backend, instruction set, quantisation). What is missing here is refused."""


def find_codec(
    backend: str, isa: str, *, block_tokens: int, head_size: int, item_bytes: int, quantisation: str = PLAIN
) -> Codec:
    """The codec for what an engine uses; raises `ConfigError` when none is known.

    ``head_size``: dims of K and of V, or of the latent with its rotary part. ``isa``: empty where the backend knows one
    arrangement only.
    """
    make = CODECS.get((backend, isa, quantisation))
    if make is None:
        known = ", ".join(sorted({f"{name}/{variant}".rstrip("/") for name, variant, _ in CODECS}))
        with_isa = f" with instruction set {isa!r}" if isa or backend == "CPU_ATTN" else ""
        quantised = f" and quantisation {quantisation}" if quantisation != PLAIN else ""
        raise ConfigError(
            f"attention backend {backend}{with_isa}{quantised} has no codec for its KV cache "
            f"(there are codecs for {known}): run this engine without the kvrelay connector"
        )
    return make(block_tokens, head_size, item_bytes)
