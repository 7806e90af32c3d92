"""Moves tokens between an engine's blocks and objects, with checksums: natively, or by this twin in NumPy.

Both work on bit patterns, in one thread, and give up the interpreter lock while they copy. ``blocks`` are packed u64,
the request's blocks in order. ``spans`` are packed u64 quadruples, one an object, see `Span`. Buffers hold one segment
a head. A segment is ``[plane][token][dim]`` in canonical packing; in native packing it holds whole blocks, as the
engine does, and zeros where no token of the object is.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, TypeVar, cast

import numpy as np
from msgspec import Struct

from kvrelay.errors import BadRequestError
from kvrelay.native import native
from kvrelay.transport.checksum import segment_sums

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable, Sequence

    from _typeshed import ReadableBuffer, WriteableBuffer

    from kvrelay.connector.codec import Plane

Items: TypeAlias = "np.ndarray[Any, Any]"
Column: TypeAlias = "bytes | array[int]"
"""Packed u64."""

L = TypeVar("L")


class Span(Struct, frozen=True, gc=False):
    """``count`` tokens of an object of ``tokens``, from its token ``skip`` on, and where they lie: from slot ``first``.

    Slots are counted through the request's blocks. In native packing the object begins at a block's bound.
    """

    tokens: int
    skip: int
    count: int
    first: int

    @classmethod
    def whole(cls, tokens: int, first: int) -> Span:
        """All tokens of an object."""
        return cls(tokens, 0, tokens, first)


def packed_spans(spans: Sequence[Span]) -> bytes:
    """Spans as `Pages` takes them."""
    values = [value for span in spans for value in (span.tokens, span.skip, span.count, span.first)]
    return struct.pack(f"<{len(values)}Q", *values)


class Objects(NamedTuple):
    """Objects that lie in one buffer. They have more segments than one layer of one rank."""

    source: ReadableBuffer
    offsets: Column
    """Where each begins."""
    sums: Column
    """Checksums of all segments, object by object."""
    segments: int
    """Of each object."""

    def of(self, first: int, heads: int, sizes: Sequence[int]) -> tuple[list[memoryview], bytes]:
        """Segments ``[first, first + heads)`` of each, ``sizes`` bytes long, and their checksums, as for `Pages.load`.

        Views of objects that reach beyond the buffer are shorter.
        """
        starts = np.frombuffer(self.offsets, np.uint64).tolist()
        sums = np.frombuffer(self.sums, np.uint64)
        if len(starts) != len(sizes) or len(sums) != len(starts) * self.segments:
            raise BadRequestError(f"{len(starts)} offsets and {len(sums)} checksums for {len(sizes)} spans")
        if not 0 <= first <= self.segments - heads:
            raise BadRequestError(f"segments {first} to {first + heads} of {self.segments}")
        whole = memoryview(self.source).cast("B")
        begins = [start + first * size for start, size in zip(starts, sizes, strict=True)]
        views = [whole[at : at + heads * size] for at, size in zip(begins, sizes, strict=True)]
        return views, sums.reshape(-1, self.segments)[:, first : first + heads].tobytes()


def unpacked_spans(spans: Column) -> list[Span]:
    """What `packed_spans` packed."""
    return [Span(*quad) for quad in np.frombuffer(spans, np.uint64).reshape(-1, 4).tolist()]


class Pages(Protocol):
    """One layer of one rank."""

    def save(
        self, blocks: Column, spans: Column, targets: Sequence[WriteableBuffer], others: list[Any] = ..., /
    ) -> bytes:
        """Whole objects out of blocks; the XXH3-64 of every segment, packed u64, object by object.

        ``others``: layers of the same blocks, heads and items, whose segments follow this one's in each buffer.
        """

    def load(self, blocks: Column, spans: Column, sources: Sequence[ReadableBuffer], sums: Column, /) -> int | None:
        """Objects' tokens into their slots, and into no other.

        Returns the index of the first object that does not match its checksums, or None. What slots hold after a
        mismatch is undefined; only the ordered ones were written.
        """

    def load_at(self, blocks: Column, spans: Column, objects: Objects, first: int, /) -> int | None:
        """`load` of the segments from ``first`` on, one a head, of objects that lie in one buffer."""


def save_each(
    layers: Sequence[L], targets: Sequence[WriteableBuffer], save: Callable[[L, list[memoryview]], bytes]
) -> bytes:
    """Save layers one by one into buffers that hold the segments of all: the checksums, object by object."""
    views = [memoryview(target).cast("B") for target in targets]
    sums = []
    for place, layer in enumerate(layers):
        parts = [view[place * view.nbytes // len(layers) : (place + 1) * view.nbytes // len(layers)] for view in views]
        sums.append(save(layer, parts))
    each = len(sums[0]) // max(1, len(views))
    return b"".join(of_layer[at : at + each] for at in range(0, each * len(views), each) for of_layer in sums)


def strided(memory: Items, plane: Plane) -> Items:
    """A plane of all blocks: ``[block][head][token factors][dim factors]``, a view."""
    item = memory.itemsize
    shape = (*memory.shape[:2], *(size for size, _ in (*plane.tokens, *plane.dims)))
    strides = (*memory.strides[:2], *(stride * item for _, stride in (*plane.tokens, *plane.dims)))
    # A plane need not begin where an index of the tensor points to.
    view = np.lib.stride_tricks.as_strided(memory, shape=(plane.at + 1,), strides=(item,))[plane.at :]
    return np.lib.stride_tricks.as_strided(view, shape=shape, strides=strides)


def index_of(blocks: Sequence[int]) -> slice | Items:
    """An index for blocks: a slice, which copies nothing, when they are neighbours."""
    first, count = blocks[0], len(blocks)
    if blocks[-1] - first == count - 1 and all(block == first + i for i, block in enumerate(blocks)):
        return slice(first, first + count)
    return np.asarray(blocks, dtype=np.intp)


class StridedPlane:
    """One plane of all blocks and heads, token by token."""

    def __init__(self, memory: Items, plane: Plane) -> None:
        self._view = strided(memory, plane)
        self._token_shape = plane.token_shape
        self.block_tokens = plane.num_tokens
        self.dims = plane.num_dims
        self.heads = memory.shape[1]

    def _ordered(self, count: int) -> tuple[int, ...]:
        return (self.heads, count, *self._view.shape[2:])

    def read(self, blocks: Sequence[int], offset: int, count: int) -> Items:
        """Tokens from slot ``offset`` of the first block on: ``[head][token][dim]``, new."""
        blocks = blocks[: -(-(offset + count) // self.block_tokens)]
        out = np.empty((self.heads, len(blocks) * self.block_tokens, self.dims), self._view.dtype)
        if blocks:
            stored = self._view[index_of(blocks)]
            np.copyto(out.reshape(self._ordered(len(blocks))), np.moveaxis(stored, 0, 1))
        return out[:, offset : offset + count]

    def write(self, blocks: Sequence[int], offset: int, tokens: Items) -> None:
        """Put ``[head][token][dim]`` into slots from ``offset`` of the first block on, and into no other."""
        size, total = self.block_tokens, tokens.shape[1]
        at = 0
        while at < total:
            block, slot = divmod(offset + at, size)
            if slot or total - at < size:
                count = min(size - slot, total - at)
                self._write_slots(blocks[block], slot, tokens[:, at : at + count])
            else:
                count = (total - at) // size * size
                self._write_blocks(blocks[block : block + count // size], tokens[:, at : at + count])
            at += count

    def _write_blocks(self, blocks: Sequence[int], tokens: Items) -> None:
        given = np.moveaxis(tokens.reshape(self._ordered(len(blocks))), 0, 1)
        self._view[index_of(blocks)] = given

    def _write_slots(self, block: int, slot: int, tokens: Items) -> None:
        count = tokens.shape[1]
        slots = np.unravel_index(np.arange(slot, slot + count), self._token_shape)
        dims = self._view.shape[2 + len(self._token_shape) :]
        self._view[block][(slice(None), *slots)] = tokens.reshape(self.heads, count, *dims)


class PurePages:
    """`Pages` in NumPy."""

    def __init__(self, memory: Items, planes: Sequence[Plane], packed: Sequence[Plane] | None = None) -> None:
        self._planes = [StridedPlane(memory, plane) for plane in planes]
        self._packed = packed
        self._blocks, self._heads = memory.shape[:2]
        self._dtype = memory.dtype
        self._block_tokens = planes[0].num_tokens
        self._token_items = sum(plane.num_dims for plane in planes)
        self._whole = memory if packed is not None and tuple(planes) == tuple(packed) else None

    @property
    def _shape(self) -> tuple[object, ...]:
        """What layers that are saved together have in common."""
        native = self._packed is not None
        return self._blocks, self._heads, self._block_tokens, self._token_items, self._dtype.itemsize, native

    def _segment_items(self, tokens: int) -> int:
        size = self._block_tokens
        return self._token_items * (tokens if self._packed is None else -(-tokens // size) * size)

    def _spans(
        self, blocks: Column, spans: Column, buffers: Sequence[ReadableBuffer], *, saves: bool
    ) -> tuple[list[int], list[Span], list[memoryview]]:
        """What was given, checked."""
        taken = np.frombuffer(blocks, np.uint64).tolist()
        quads = unpacked_spans(spans)
        size, slots = self._block_tokens, self._block_tokens * len(taken)
        for block in taken:
            if block >= self._blocks:
                raise BadRequestError(f"block {block} is not among the {self._blocks} of this layer")
        if len(quads) != len(buffers):
            raise BadRequestError(f"{len(quads)} spans for {len(buffers)} buffers")
        views = [memoryview(buffer).cast("B") for buffer in buffers]
        for at, (span, view) in enumerate(zip(quads, views, strict=True)):
            if (
                span.skip + span.count > span.tokens
                or span.first + span.count > slots
                or (saves and span.count != span.tokens)
                or (self._packed is not None and span.count and (span.first - span.skip) % size)
            ):
                raise BadRequestError(f"span {at}: {span} of {slots} slots")
            wanted = self._heads * self._segment_items(span.tokens) * self._dtype.itemsize
            if view.nbytes != wanted:
                raise BadRequestError(f"segments {at}: {view.nbytes} bytes are not the {wanted} of {self._heads} heads")
        return taken, quads, views

    def _of_block(self, blocks: Sequence[int], first: int) -> tuple[Sequence[int], int]:
        block, offset = divmod(first, self._block_tokens)
        return blocks[block:], offset

    def _canonical(self, view: memoryview, tokens: int) -> list[Items]:
        """Planes of an object: ``[head][token][dim]``."""
        items = np.frombuffer(view, self._dtype).reshape(self._heads, -1)
        found, at = [], 0
        for plane in self._planes:
            end = at + tokens * plane.dims
            found.append(items[:, at:end].reshape(self._heads, tokens, plane.dims))
            at = end
        return found

    def _native(self, view: memoryview) -> tuple[Items, list[StridedPlane]]:
        """An object as blocks ``[block][head][items]``, and its planes."""
        assert self._packed is not None
        items = np.frombuffer(view, self._dtype).reshape(self._heads, -1, self._token_items * self._block_tokens)
        stored = items.transpose(1, 0, 2)
        return stored, [StridedPlane(stored, plane) for plane in self._packed]

    def save(
        self, blocks: Column, spans: Column, targets: Sequence[WriteableBuffer], others: Sequence[PurePages] = (), /
    ) -> bytes:
        """See `Pages`."""
        for at, other in enumerate(others):
            if other._shape != self._shape:
                raise BadRequestError(f"other layer {at} is not one of the same blocks, heads, tokens and items")
        return save_each([self, *others], targets, lambda layer, parts: layer._save(blocks, spans, parts))

    def _save(self, blocks: Column, spans: Column, targets: Sequence[WriteableBuffer]) -> bytes:
        sums = b""
        taken, quads, views = self._spans(blocks, spans, targets, saves=True)
        for span, view in zip(quads, views, strict=True):
            of, offset = self._of_block(taken, span.first)
            if self._packed is None:
                for plane, target in zip(self._planes, self._canonical(view, span.tokens), strict=True):
                    np.copyto(target, plane.read(of, offset, span.tokens))
            elif span.tokens:
                self._save_native(of, span.tokens, view)
            sums += struct.pack(f"<{self._heads}Q", *self._sums(view))
        return sums

    def _save_native(self, blocks: Sequence[int], tokens: int, view: memoryview) -> None:
        stored, parts = self._native(view)
        whole = tokens // self._block_tokens if self._whole is not None else 0
        if self._whole is not None and whole:
            pages = self._whole[index_of(blocks[:whole])]
            np.copyto(stored[:whole].reshape(pages.shape), pages)
        stored[whole:] = 0
        rest = tokens - whole * self._block_tokens
        for plane, part in zip(self._planes, parts, strict=True):
            if rest:
                part.write(range(whole, len(stored)), 0, plane.read(blocks[whole:], 0, rest))

    def _sums(self, view: memoryview) -> list[int]:
        return segment_sums(view, view.nbytes // self._heads) if view.nbytes else segment_sums(b"", 1) * self._heads

    def load(self, blocks: Column, spans: Column, sources: Sequence[ReadableBuffer], sums: Column, /) -> int | None:
        """See `Pages`."""
        expected = np.frombuffer(sums, np.uint64).reshape(-1, self._heads).tolist()
        taken, quads, views = self._spans(blocks, spans, sources, saves=False)
        if len(expected) != len(quads):
            raise BadRequestError(f"checksums of {len(expected)} objects for {len(quads)}")
        for index, (span, view, wanted) in enumerate(zip(quads, views, expected, strict=True)):
            held = memoryview(bytes(view))  # what is compared is what is written, whoever writes there meanwhile
            if self._sums(held) != wanted:
                return index
            if span.count:
                self._load(taken, span, held)
        return None

    def load_at(self, blocks: Column, spans: Column, objects: Objects, first: int, /) -> int | None:
        """See `Pages`."""
        sizes = [self._segment_items(span.tokens) * self._dtype.itemsize for span in unpacked_spans(spans)]
        return self.load(blocks, spans, *objects.of(first, self._heads, sizes))

    def _load(self, blocks: Sequence[int], span: Span, view: memoryview) -> None:
        of, offset = self._of_block(blocks, span.first)
        skip, count, size = span.skip, span.count, self._block_tokens
        if self._packed is None:
            for plane, source in zip(self._planes, self._canonical(view, span.tokens), strict=True):
                plane.write(of, offset, source[:, skip : skip + count])
            return
        stored, parts = self._native(view)
        if self._whole is not None and not offset and not count % size:
            pages = stored[skip // size : (skip + count) // size]
            self._whole[index_of(of[: count // size])] = pages.reshape(len(pages), *self._whole.shape[1:])
            return
        for plane, part in zip(self._planes, parts, strict=True):
            plane.write(of, offset, part.read(range(len(stored)), skip, count))


def make_pages(memory: Items, planes: Sequence[Plane], packed: Sequence[Plane] | None = None) -> Pages:
    """A layer: ``memory`` is ``[block][head][...]``; ``packed``: the planes of objects in native packing."""
    if native is None:
        return PurePages(memory, planes, packed)
    tables = None if packed is None else [plane.tables() for plane in packed]
    pages = native.Pages(memory, planes[0].num_tokens, [plane.tables() for plane in planes], tables)
    return cast("Pages", pages)
