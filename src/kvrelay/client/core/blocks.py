"""A caller's memory as columns: where each of many blocks is, how big it is, and how it is cut into batches."""

from __future__ import annotations

import operator
import re
from array import array
from typing import TYPE_CHECKING, Protocol

from kvrelay.errors import BadRequestError
from kvrelay.wire import limits

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from kvrelay.client.core.steps import Operation

BATCH_KEYS = 1_024
_FIELD_NAME = re.compile(":[^:]*:")
BATCH_BYTES = 16 << 20
"""One request asks for about so much, so that the pool works on the next while this one is copied."""


def bytes_of(view: memoryview, *, writable: bool = False) -> memoryview:
    """A caller's buffer as bytes, whatever it holds.

    Raises:
        BadRequestError: it is not contiguous, or read-only and to be read into, or holds Python objects, or was
            released.
    """
    try:
        contiguous = view.c_contiguous
    except ValueError:
        raise BadRequestError("a memoryview that was released cannot be used") from None
    if not contiguous:
        raise BadRequestError(f"a buffer of {view.nbytes} bytes is not contiguous")
    if writable and view.readonly:
        raise BadRequestError(f"a buffer of {view.nbytes} bytes to read into is read-only")
    if view.format == "B" and view.ndim == 1:
        return view
    if not view.nbytes:
        return memoryview(bytearray())  # what has no bytes has no form that could be taken for one
    if "O" in _FIELD_NAME.sub("", view.format):
        raise BadRequestError(f"a buffer of {view.nbytes} bytes holds Python objects, which others cannot have")
    return view.cast("B")


class Blocks:
    """Blocks of memory, in order: ``sizes[i]`` bytes at ``offsets[i]`` of the one ``source``, or all of ``sources[i]``.

    ``sizes`` and ``offsets`` are u64 columns.
    """

    __slots__ = ("offsets", "sizes", "source", "sources")

    def __init__(
        self,
        sizes: array[int],
        *,
        source: memoryview | None = None,
        offsets: array[int] | None = None,
        sources: Sequence[memoryview] = (),
    ) -> None:
        self.sizes = sizes
        self.source = source
        self.offsets = offsets
        self.sources = sources

    @classmethod
    def of_buffers(cls, views: Iterable[memoryview], *, writable: bool = False) -> Blocks:
        """Blocks of their own, one a buffer. BadRequestError: one is scattered, read-only or empty."""
        sources = [bytes_of(view, writable=writable) for view in views]
        sizes = array("Q", [view.nbytes for view in sources])
        if sources and not min(sizes):
            raise BadRequestError(f"buffer {sizes.index(0)} is empty: an object has at least one byte")
        return cls(sizes, sources=sources)

    @classmethod
    def of_pages(cls, source: memoryview, offsets: Iterable[int], size: int) -> Blocks:
        """Pages of ``size`` bytes at ``offsets`` of one buffer of bytes.

        Raises:
            BadRequestError: a page is empty or beyond the buffer.
        """
        try:
            size = operator.index(size)
        except TypeError:
            raise BadRequestError(f"a page of {size!r} bytes: it has a whole number of them") from None
        if size <= 0:
            raise BadRequestError(f"a page of {size} bytes: it has at least one")
        try:
            column = array("Q", offsets)
        except (OverflowError, TypeError) as error:
            raise BadRequestError(f"offsets are not non-negative integers: {error}") from None
        if column and max(column) + size > source.nbytes:
            raise BadRequestError(
                f"a page of {size} bytes at {max(column)} ends beyond the buffer's {source.nbytes} bytes"
            )
        return cls(array("Q", [size]) * len(column), source=source, offsets=column)

    def __len__(self) -> int:
        return len(self.sizes)

    def view(self, index: int) -> memoryview:
        """One block."""
        if self.source is None or self.offsets is None:
            return self.sources[index]
        start = self.offsets[index]
        return self.source[start : start + self.sizes[index]]

    def views(self) -> list[memoryview]:
        """Every block."""
        source, offsets = self.source, self.offsets
        if source is None or offsets is None:
            return list(self.sources)
        return [source[start : start + size] for start, size in zip(offsets, self.sizes, strict=True)]

    def cut(self, start: int, stop: int) -> Blocks:
        """Blocks ``start`` to ``stop``."""
        if start == 0 and stop >= len(self.sizes):
            return self
        return Blocks(
            self.sizes[start:stop],
            source=self.source,
            offsets=None if self.offsets is None else self.offsets[start:stop],
            sources=self.sources[start:stop],
        )

    def pick(self, indices: Sequence[int]) -> Blocks:
        """Some of the blocks, in the order of ``indices``."""
        return Blocks(
            array("Q", [self.sizes[index] for index in indices]),
            source=self.source,
            offsets=None if self.offsets is None else array("Q", [self.offsets[index] for index in indices]),
            sources=[self.sources[index] for index in indices] if self.sources else (),
        )

    def batches(self) -> Iterator[tuple[int, int]]:
        """Cut into runs of at most `BATCH_KEYS` blocks and about `BATCH_BYTES`: first and last + 1 of each."""
        sizes, count = self.sizes, len(self.sizes)
        if count == 0:
            return
        smallest, largest = min(sizes), max(sizes)
        if largest > limits.MAX_OBJECT_BYTES:
            raise BadRequestError(f"an object of {largest} bytes is over the limit of {limits.MAX_OBJECT_BYTES}")
        if smallest == largest:
            step = min(BATCH_KEYS, max(1, BATCH_BYTES // largest))
            for start in range(0, count, step):
                yield start, min(start + step, count)
            return
        start = held = 0
        for index, size in enumerate(sizes):
            if index - start == BATCH_KEYS or (held and held + size > BATCH_BYTES):
                yield start, index
                start, held = index, 0
            held += size
        yield start, count


class Mover(Protocol):
    """Copies and checksums many blocks. Columns are packed u64; a checksum is XXH3-64 of a block."""

    def copy_in(self, blocks: Blocks, arena: memoryview, offsets: bytes) -> bytes:
        """Copy every block to its offset of the arena; the checksums of what was copied."""

    def copy_out(self, arena: memoryview, offsets: bytes, blocks: Blocks, sums: bytes) -> int:
        """Copy every block from its offset of the arena; the first whose copy does not match its checksum, else -1."""

    def sums(self, blocks: Blocks) -> bytes:
        """Checksums of the blocks."""

    def check(self, blocks: Blocks, sums: bytes) -> int:
        """The first block that does not match its checksum, else -1."""


class Direct(Protocol):
    """How a client reaches the arena itself, without the pool's help."""

    def write(self, blocks: Blocks, offsets: bytes) -> Operation[bytes]:
        """Bring blocks to their offsets of the arena; the checksums of what was brought there."""

    def read(self, offsets: bytes, blocks: Blocks, sums: bytes) -> Operation[int]:
        """Bring blocks from their offsets; the first that does not match its checksum, else -1."""
