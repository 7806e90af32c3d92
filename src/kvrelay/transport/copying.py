"""Batches of copies with checksums: natively where that is possible, else in Python. The choice is made here.

Pieces lie at packed little-endian u64 ``offsets`` of one buffer, or, where ``offsets`` is None, in a sequence of
buffers, one a piece. ``sizes`` is a packed column as well, or one number for all, or None where a side is a sequence of
buffers: then they tell. Source and target of a piece do not overlap. Everything is checked before a byte is touched;
what does not fit is a `BadRequestError` that names the values. ``threads``: share a large batch among that many. The
native functions give up the interpreter lock for all but small batches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, cast

from kvrelay.native import native
from kvrelay.transport import pure

if TYPE_CHECKING:
    from collections.abc import Sequence

    from _typeshed import ReadableBuffer, WriteableBuffer


class Copies(Protocol):
    """What `kvrelay._native` and `kvrelay.transport.pure` both are."""

    def copy(
        self,
        target: WriteableBuffer | Sequence[WriteableBuffer],
        target_offsets: ReadableBuffer | None,
        source: ReadableBuffer | Sequence[ReadableBuffer],
        source_offsets: ReadableBuffer | None,
        sizes: ReadableBuffer | int | None,
        threads: int = 1,
    ) -> None:
        """Copy pieces, without hashing them."""

    def copy_sums(
        self,
        target: WriteableBuffer | Sequence[WriteableBuffer],
        target_offsets: ReadableBuffer | None,
        source: ReadableBuffer | Sequence[ReadableBuffer],
        source_offsets: ReadableBuffer | None,
        sizes: ReadableBuffer | int | None,
        threads: int = 1,
    ) -> bytes:
        """Copy pieces; the XXH3-64 of the bytes that were stored, packed u64."""

    def copy_verify(
        self,
        target: WriteableBuffer | Sequence[WriteableBuffer],
        target_offsets: ReadableBuffer | None,
        source: ReadableBuffer | Sequence[ReadableBuffer],
        source_offsets: ReadableBuffer | None,
        sizes: ReadableBuffer | int | None,
        sums: ReadableBuffer,
        threads: int = 1,
    ) -> int | None:
        """Copy pieces; the index of the first whose stored bytes do not have the XXH3-64 of ``sums``, or None.

        Pieces after that one may not have been copied.
        """

    def sums(
        self,
        source: ReadableBuffer | Sequence[ReadableBuffer],
        source_offsets: ReadableBuffer | None,
        sizes: ReadableBuffer | int | None,
        threads: int = 1,
    ) -> bytes:
        """XXH3-64 of pieces, packed u64."""

    def verify(
        self,
        source: ReadableBuffer | Sequence[ReadableBuffer],
        source_offsets: ReadableBuffer | None,
        sizes: ReadableBuffer | int | None,
        sums: ReadableBuffer,
        threads: int = 1,
    ) -> int | None:
        """Index of the first piece whose XXH3-64 is not that of ``sums``, or None."""

    def checksum(self, data: ReadableBuffer, /) -> int:
        """XXH3-64 of a contiguous buffer."""

    def segment_sums(self, view: ReadableBuffer, segment_bytes: int, /) -> list[int]:
        """XXH3-64 of every ``segment_bytes`` of a view of whole segments, in order."""


copies: Copies = pure if native is None else cast("Copies", native)

copy = copies.copy
copy_sums = copies.copy_sums
copy_verify = copies.copy_verify
sums = copies.sums
verify = copies.verify
