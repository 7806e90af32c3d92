"""Batches of copies and checksums without the native module; `kvrelay._native` has the same functions and errors."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, NamedTuple

import xxhash

from kvrelay.errors import BadRequestError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from _typeshed import ReadableBuffer, WriteableBuffer

PIECE_BYTES = 128 << 10
"""How much of a large object is copied before it is hashed: a part of the second-level cache."""
MAX_THREADS = 64

checksum = xxhash.xxh3_64_intdigest


class _Side(NamedTuple):
    """Where pieces are: at offsets of ``whole``, or in ``each``."""

    name: str
    whole: memoryview
    offsets: memoryview | None
    each: list[memoryview]

    @property
    def pieces(self) -> int:
        return len(self.each if self.offsets is None else self.offsets)

    def piece(self, index: int, size: int) -> memoryview:
        if self.offsets is None:
            view = self.each[index]
            if view.nbytes != size:
                raise BadRequestError(f"{self.name} {index} has {view.nbytes} bytes, not the {size} of the object")
            return view
        offset = self.offsets[index]
        if offset + size > self.whole.nbytes:
            raise BadRequestError(
                f"{self.name} {index}: {size} bytes at offset {offset} are not within a buffer of "
                f"{self.whole.nbytes} bytes"
            )
        return self.whole[offset : offset + size]


def _bytes_of(buffer: ReadableBuffer, *, writable: bool = False) -> memoryview:
    view = memoryview(buffer)
    if not view.c_contiguous:
        raise BufferError("a buffer is not C-contiguous")
    if writable and view.readonly:
        raise BufferError("a buffer to write to is not writable")
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def _column(buffer: ReadableBuffer, name: str) -> memoryview:
    view = _bytes_of(buffer)
    if view.nbytes % 8:
        raise BadRequestError(
            f"{name}: {view.nbytes} bytes are no packed 64-bit integers, whose bytes are a multiple of 8"
        )
    return view.cast("Q")


def _side(
    name: str,
    buffers: ReadableBuffer | Sequence[ReadableBuffer],
    offsets: ReadableBuffer | None,
    *,
    writable: bool = False,
) -> _Side:
    if offsets is None:
        if isinstance(buffers, (bytes, bytearray, memoryview)):
            raise TypeError("without offsets, pieces are a sequence of buffers")
        each = [_bytes_of(buffer, writable=writable) for buffer in buffers]  # type: ignore[union-attr]
        return _Side(name, memoryview(b""), None, each)
    return _Side(name, _bytes_of(buffers, writable=writable), _column(offsets, name), [])  # type: ignore[arg-type]


def _sizes(sides: Sequence[_Side], sizes: ReadableBuffer | int | None, sums: memoryview | None) -> list[int]:
    """Size of each piece, after checking that all columns agree on how many there are."""
    packed = None if sizes is None or isinstance(sizes, int) else _column(sizes, "sizes")
    count = sides[0].pieces
    columns = [(f"{side.name}s", side.pieces) for side in sides]
    columns += [("sizes", len(packed))] if packed is not None else []
    columns += [("sums", len(sums))] if sums is not None else []
    for name, entries in columns:
        if entries != count:
            raise BadRequestError(f"{name}: {entries} entries for {count} objects")
    if packed is not None:
        return packed.tolist()
    if isinstance(sizes, int):
        if not 0 <= sizes < 1 << 64:
            raise BadRequestError(f"sizes: {sizes} is not a number of bytes from 0 to 2**64 - 1")
        return [sizes] * count
    for side in sides:
        if side.offsets is None:
            return [view.nbytes for view in side.each]
    raise BadRequestError("sizes: None is for sources or targets that are buffers of their own")


def _check_threads(threads: int) -> None:
    if not 1 <= threads <= MAX_THREADS:
        raise BadRequestError(f"threads: {threads} is not from 1 to {MAX_THREADS}")


def _pieces(sides: Sequence[_Side], sizes: list[int]) -> list[list[memoryview]]:
    """The pieces of each side, all within their buffers."""
    return [[side.piece(index, size) for index, size in enumerate(sizes)] for side in sides]


def _packed(values: list[int]) -> bytes:
    return array("Q", values).tobytes()


def _copy_sum(target: memoryview, source: memoryview) -> int:
    """Copy one piece; the checksum of what was stored."""
    if source.nbytes <= PIECE_BYTES:
        target[:] = source
        return checksum(target)
    state = xxhash.xxh3_64()
    for at in range(0, source.nbytes, PIECE_BYTES):
        piece = target[at : at + PIECE_BYTES]
        piece[:] = source[at : at + PIECE_BYTES]
        state.update(piece)
    return state.intdigest()


def copy(
    target: WriteableBuffer | Sequence[WriteableBuffer],
    target_offsets: ReadableBuffer | None,
    source: ReadableBuffer | Sequence[ReadableBuffer],
    source_offsets: ReadableBuffer | None,
    sizes: ReadableBuffer | int | None,
    threads: int = 1,
) -> None:
    """Copy pieces, without hashing them."""
    _check_threads(threads)
    sides = (_side("source", source, source_offsets), _side("target", target, target_offsets, writable=True))
    sources, targets = _pieces(sides, _sizes(sides, sizes, None))
    for view, origin in zip(targets, sources, strict=True):
        view[:] = origin


def copy_sums(
    target: WriteableBuffer | Sequence[WriteableBuffer],
    target_offsets: ReadableBuffer | None,
    source: ReadableBuffer | Sequence[ReadableBuffer],
    source_offsets: ReadableBuffer | None,
    sizes: ReadableBuffer | int | None,
    threads: int = 1,
) -> bytes:
    """Copy pieces and hash what was stored; their XXH3-64, packed u64."""
    _check_threads(threads)
    sides = (_side("source", source, source_offsets), _side("target", target, target_offsets, writable=True))
    sources, targets = _pieces(sides, _sizes(sides, sizes, None))
    return _packed([_copy_sum(view, origin) for view, origin in zip(targets, sources, strict=True)])


def copy_verify(
    target: WriteableBuffer | Sequence[WriteableBuffer],
    target_offsets: ReadableBuffer | None,
    source: ReadableBuffer | Sequence[ReadableBuffer],
    source_offsets: ReadableBuffer | None,
    sizes: ReadableBuffer | int | None,
    sums: ReadableBuffer,
    threads: int = 1,
) -> int | None:
    """Copy pieces and compare what was stored with ``sums``; the index of the first that differs, or None."""
    _check_threads(threads)
    expected = _column(sums, "sums")
    sides = (_side("source", source, source_offsets), _side("target", target, target_offsets, writable=True))
    sources, targets = _pieces(sides, _sizes(sides, sizes, expected))
    for index, (view, origin, wanted) in enumerate(zip(targets, sources, expected, strict=True)):
        if _copy_sum(view, origin) != wanted:
            return index
    return None


def sums(
    source: ReadableBuffer | Sequence[ReadableBuffer],
    source_offsets: ReadableBuffer | None,
    sizes: ReadableBuffer | int | None,
    threads: int = 1,
) -> bytes:
    """XXH3-64 of pieces, packed u64."""
    _check_threads(threads)
    sides = (_side("source", source, source_offsets),)
    (pieces,) = _pieces(sides, _sizes(sides, sizes, None))
    return _packed([checksum(view) for view in pieces])


def verify(
    source: ReadableBuffer | Sequence[ReadableBuffer],
    source_offsets: ReadableBuffer | None,
    sizes: ReadableBuffer | int | None,
    sums: ReadableBuffer,
    threads: int = 1,
) -> int | None:
    """Index of the first piece whose XXH3-64 is not that of ``sums``, or None."""
    _check_threads(threads)
    expected = _column(sums, "sums")
    sides = (_side("source", source, source_offsets),)
    (pieces,) = _pieces(sides, _sizes(sides, sizes, expected))
    for index, (view, wanted) in enumerate(zip(pieces, expected, strict=True)):
        if checksum(view) != wanted:
            return index
    return None


def segment_sums(view: ReadableBuffer, segment_bytes: int) -> list[int]:
    """XXH3-64 of every ``segment_bytes`` of a view of whole segments, in order."""
    view = _bytes_of(view)
    if segment_bytes <= 0 or view.nbytes % segment_bytes:
        raise BadRequestError(f"{view.nbytes} bytes are no whole segments of {segment_bytes} bytes")
    if view.nbytes == segment_bytes:
        return [checksum(view)]
    return [checksum(view[start : start + segment_bytes]) for start in range(0, view.nbytes, segment_bytes)]
