"""An engine's paged KV as the connector sees it: a strided tensor a layer, and the codec that says what its items mean.

vLLM views every layer as ``[block][head][token][content]`` with strides of its own: all of its `KVCacheLayout`s, padded
pages and blocks that hold several layers differ in strides only. `prove` checks a codec against the engine's own write
kernel; every worker does so at start, and no engine runs with an arrangement that has no proven codec.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from kvrelay.connector.pages import Span, StridedPlane, make_pages, packed_spans
from kvrelay.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from _typeshed import ReadableBuffer, WriteableBuffer

    from kvrelay.connector.codec import Codec, Plane
    from kvrelay.connector.pages import Column, Objects

    WriteKernel = Callable[[np.ndarray[Any, Any], np.ndarray[Any, Any], Sequence[int]], None]
    """Writes canonical tokens into slots of pages, as an engine does: see `prove`."""


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive tokens of one request in its blocks: ``count`` tokens from slot ``offset`` of ``blocks[0]`` on."""

    blocks: Sequence[int]
    offset: int
    count: int


def group_kernel_blocks(pages: np.ndarray[Any, Any], blocks: int) -> np.ndarray[Any, Any]:
    """``[kernel block][head][token][content]`` by the scheduler's blocks: ``[block][head][kernel block][...]``, a view.

    Attention kernels may know smaller blocks than the scheduler; those of one of its blocks are neighbours then.
    """
    kernel_blocks, heads, tokens, content = pages.shape
    ratio, rest = divmod(kernel_blocks, blocks)
    if rest:
        raise ConfigError(f"{kernel_blocks} kernel blocks are not a multiple of {blocks} blocks")
    step = pages.strides[0]
    return np.lib.stride_tricks.as_strided(
        pages,
        shape=(blocks, heads, ratio, tokens, content),
        strides=(ratio * step, pages.strides[1], step, *pages.strides[2:]),
    )


@dataclass(frozen=True, slots=True)
class BlockKind:
    """What blocks of some layers are like."""

    codec: Codec
    heads: int
    kernel_tokens: int
    """Of a block as the attention kernels know it."""
    content: int
    """Items of a token of a head."""
    item_bytes: int
    block_tokens: int
    """Of a block as the scheduler knows it: one or more of the kernels'."""
    head_size: int
    native: bool = False
    """Objects hold whole blocks, as the engine does."""

    @property
    def kernel_blocks(self) -> int:
        """Of one of the scheduler's blocks."""
        return self.block_tokens // self.kernel_tokens

    @property
    def block_bytes(self) -> int:
        """Of one of the scheduler's blocks."""
        return self.block_tokens * self.heads * self.content * self.item_bytes

    def layer(self, pages: np.ndarray[Any, Any]) -> PagedLayer:
        """A layer in host memory: ``[kernel block][head][token][content]``."""
        if self.kernel_blocks > 1:
            pages = group_kernel_blocks(pages, len(pages) // self.kernel_blocks)
        return PagedLayer(
            pages, self.codec, block_tokens=self.block_tokens, head_size=self.head_size, native=self.native
        )


class PagedLayer:
    """One layer's KV cache of one rank.

    ``pages``: unsigned integers ``[block][head][token][content]``, the engine's own memory, with any strides that leave
    a token's content together; ``[block][head][kernel block][token][content]`` where kernels know smaller blocks; or
    ``[block][head][items]``. ``native``: objects hold whole blocks, as the engine does.
    """

    in_host_memory = True

    def __init__(
        self,
        pages: np.ndarray[Any, Any],
        codec: Codec,
        *,
        block_tokens: int,
        head_size: int,
        native: bool = False,
    ) -> None:
        self.planes = len(codec.planes)
        """How many: 2, K and V, or 1."""
        self.num_blocks, self.heads = pages.shape[:2]
        self.block_tokens = block_tokens
        self.head_size = head_size
        self.dtype = pages.dtype
        self._item_bytes: int = pages.itemsize
        self.native = native
        items = int(np.prod(pages.shape[2:]))
        if items != self.planes * block_tokens * head_size:
            raise ConfigError(
                f"a KV page has {items} items a head, not {self.planes} x {block_tokens} tokens x {head_size} dims"
            )
        if pages.ndim == 3:
            pages = pages.reshape(*pages.shape[:2], codec.planes[0].num_tokens, -1)
        paged = _paged_planes(pages, codec)
        packed = tuple(replace(plane, tokens=_packed_tokens(plane, codec, pages)) for plane in codec.planes)
        self._strided = [StridedPlane(pages, plane) for plane in paged]
        self._pages = make_pages(pages, paged, packed if native else None)

    def segment_bytes(self, tokens: int) -> int:
        """Bytes of one head of an object of ``tokens`` tokens."""
        if self.native:
            tokens = -(-tokens // self.block_tokens) * self.block_tokens
        return self.planes * tokens * self.head_size * self._item_bytes

    def computed(self) -> None:
        """This step's tokens are there: so they are, in host memory, when the engine says so."""

    def save(
        self,
        blocks: Sequence[int],
        spans: Sequence[Span],
        targets: Sequence[WriteableBuffer],
        others: Sequence[PagedLayer] = (),
    ) -> bytes:
        """Objects out of ``blocks``, one a span; see `kvrelay.connector.pages.Pages.save`."""
        return self._pages.save(array("Q", blocks), packed_spans(spans), targets, [other._pages for other in others])

    def load(
        self, blocks: Sequence[int], spans: Sequence[Span], sources: Sequence[ReadableBuffer], sums: Column
    ) -> int | None:
        """Objects into ``blocks``, one a span; see `kvrelay.connector.pages.Pages.load`."""
        return self._pages.load(array("Q", blocks), packed_spans(spans), sources, sums)

    def load_at(self, blocks: Column, spans: Column, objects: Objects, first: int) -> int | None:
        """Objects of one buffer into ``blocks``; see `kvrelay.connector.pages.Pages.load_at`."""
        return self._pages.load_at(blocks, spans, objects, first)

    def read(self, run: Run) -> np.ndarray[Any, Any]:
        """Tokens of a run in canonical packing: a new array ``[head][plane][token][dim]``."""
        return np.stack([plane.read(run.blocks, run.offset, run.count) for plane in self._strided], axis=1)

    def write(self, run: Run, tokens: np.ndarray[Any, Any]) -> None:
        """Put canonical ``tokens`` (``[head][plane][token][dim]``) into a run's slots, and into no other slot."""
        for at, plane in enumerate(self._strided):
            plane.write(run.blocks, run.offset, tokens[:, at, : run.count])


def _paged_planes(pages: np.ndarray[Any, Any], codec: Codec) -> tuple[Plane, ...]:
    """The codec's planes with this tensor's strides; raises `ConfigError` where a codec does not allow them."""
    item = pages.itemsize
    tokens, content = pages.shape[-2:]
    token_stride, content_stride = pages.strides[-2:]
    dense = token_stride == content * item or tokens == 1
    if content_stride != item or any(stride % item for stride in pages.strides) or not (dense or codec.rows):
        raise ConfigError(
            f"KV cache of shape {pages.shape} and strides {pages.strides} bytes: codec {codec.name} needs "
            + ("a token's items" if codec.rows else "a head's items of a block, VLLM_KV_CACHE_LAYOUT unset,")
            + " to lie together"
        )
    planes = codec.planes
    if codec.rows:
        planes = tuple(replace(plane, tokens=((tokens, token_stride // item),)) for plane in planes)
    if pages.ndim == 5:
        outer = (pages.shape[2], pages.strides[2] // item)
        planes = tuple(replace(plane, tokens=(outer, *plane.tokens)) for plane in planes)
    return planes


def _packed_tokens(plane: Plane, codec: Codec, pages: np.ndarray[Any, Any]) -> tuple[tuple[int, int], ...]:
    """Tokens' factors in an object of native packing: kernel blocks one after the other."""
    return ((pages.shape[2], codec.block_items), *plane.tokens) if pages.ndim == 5 else plane.tokens


def prove(
    codec: Codec,
    write_kernel: WriteKernel,
    *,
    heads: int,
    block_tokens: int,
    head_size: int,
    dtype: np.dtype[Any],
    native: bool = False,
) -> None:
    """Check a codec against the engine's own write kernel; raises `ConfigError` when they disagree.

    ``write_kernel(pages, tokens, slots)`` writes canonical ``tokens`` into the given slots of ``pages``, as the engine
    would. It must leave all other slots alone, and so must the codec. It is proven through what saves and loads call.
    """
    blocks = (2, 0, 3)
    planes = len(codec.planes)
    offset, count = (0, 3 * block_tokens - 5) if native else (3, 2 * block_tokens - 5)
    pages = np.zeros((4, heads, planes * block_tokens * head_size), dtype)
    # Small positive numbers: patterns that are ordinary in every floating-point format of their size.
    bits = np.arange(heads * planes * count * head_size, dtype=np.uint64) * 2_654_435_761 >> 16
    exponent, low = {1: (0x30, 0x0F), 2: (0x3C00, 0x3FF), 4: (0x3F000000, 0x7FFFFF)}[dtype.itemsize]
    tokens = (exponent | (bits & low)).astype(dtype).reshape(heads, planes, count, head_size)
    slots = [blocks[at // block_tokens] * block_tokens + at % block_tokens for at in range(offset, offset + count)]
    write_kernel(pages, tokens, slots)
    ours = np.zeros_like(pages)
    theirs, mine = (
        PagedLayer(memory, codec, block_tokens=block_tokens, head_size=head_size, native=native)
        for memory in (pages, ours)
    )
    run = Run(blocks, offset, count)
    span = Span(count, 0, count, offset)
    stored = bytearray(heads * theirs.segment_bytes(count))
    sums = theirs.save(blocks, [span], [stored])
    if (
        not np.array_equal(theirs.read(run), tokens)
        or (not native and stored != tokens.tobytes())
        or mine.load(blocks, [span], [stored], sums) is not None
        or not np.array_equal(ours, pages)
    ):
        raise ConfigError(
            f"codec {codec.name} does not match what this engine's attention kernel writes "
            f"({heads} heads x {block_tokens} tokens x {head_size} dims, {dtype.itemsize}-byte items): "
            "run this engine without the kvrelay connector and report its vLLM version and CPU"
        )
