"""The payload of `kvrelay.transport.payload` without the native module."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import xxhash

from kvrelay.errors import BadRequestError
from kvrelay.transport.pure import checksum
from kvrelay.wire.scatter import Scatter

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from _typeshed import ReadableBuffer, WriteableBuffer

_SINK = memoryview(bytearray(64 << 10))


class PurePayload:
    """A payload in Python."""

    def __init__(
        self,
        buffers: Sequence[ReadableBuffer],
        *,
        incoming: bool = False,
        sums: bool = False,
        trailer: bool = False,
    ) -> None:
        if trailer and (incoming or not sums):
            raise ValueError("a trailer is made of the sums of a payload that is sent")
        views = [_bytes_of(buffer, writable=incoming) for buffer in buffers]
        self._set_up(views, [(view, sums) for view in views], incoming=incoming, trailer_bytes=8 * len(views) * trailer)

    def _set_up(
        self,
        runs: list[memoryview],
        pieces: list[tuple[memoryview, bool]],
        *,
        incoming: bool,
        trailer_bytes: int,
    ) -> None:
        """Move ``runs``, and hash those of ``pieces``, the same bytes, that are marked."""
        self._trailer = bytearray(trailer_bytes)
        if trailer_bytes:
            pieces.append((memoryview(self._trailer), False))
        self.incoming = incoming
        self._scatter = Scatter([*runs, memoryview(self._trailer)])
        self._sums = array("Q")
        self._is_trailed = trailer_bytes > 0 and not incoming
        self._sum_count = sum(summed for _, summed in pieces)
        self._ahead = 0
        """Bytes hashed and not moved yet."""
        self._unhashed: Iterator[tuple[memoryview, bool]] = iter(pieces)
        self._hashing: tuple[memoryview, bool] | None = next(self._unhashed, None)
        self._state = xxhash.xxh3_64()
        self._within = 0
        if self._sum_count:
            self._hash(0)

    @classmethod
    def landing(
        cls,
        buffer: WriteableBuffer,
        targets: Sequence[tuple[int | None, int]],
        offsets: ReadableBuffer,
        sizes: ReadableBuffer,
        trailer_bytes: int = 0,
    ) -> PurePayload:
        """See `Payloads.landing`."""
        view = _bytes_of(buffer, writable=True)
        columns = memoryview(offsets).cast("B"), memoryview(sizes).cast("B")
        if trailer_bytes < 0 or columns[0].nbytes % 8 or columns[0].nbytes != columns[1].nbytes:
            raise BadRequestError(
                f"{columns[0].nbytes} bytes of offsets and {columns[1].nbytes} of sizes are no columns of 64-bit "
                "integers, one a piece"
            )
        places = list(zip(columns[0].cast("Q"), columns[1].cast("Q"), strict=True))
        pieces: list[tuple[memoryview, bool]] = []
        runs: list[memoryview] = []
        used = 0
        for offset, size in targets:
            if offset is None:
                sinks = [_SINK[: min(size - at, _SINK.nbytes)] for at in range(0, size, _SINK.nbytes)]
                runs += sinks
                pieces += [(sink, False) for sink in sinks]
                continue
            if offset + size > view.nbytes:
                raise BadRequestError(f"{size} bytes at offset {offset} are not within a buffer of {view.nbytes} bytes")
            at, end = offset, offset + size
            runs.append(view[at:end])
            while at < end:
                start, length = places[used] if used < len(places) else (0, 0)
                if start != at or not 0 < length <= end - at:
                    raise BadRequestError(f"piece {used} is not at offset {at} and within {end - at} bytes")
                pieces.append((view[at : at + length], True))
                at += length
                used += 1
        if used != len(places):
            raise BadRequestError(f"targets hold {used} pieces, not {len(places)}")
        made = cls(())
        made._set_up(runs, pieces, incoming=True, trailer_bytes=trailer_bytes)
        return made

    @property
    def left(self) -> int:
        """Bytes not moved yet."""
        return self._scatter.left

    @property
    def is_summed(self) -> bool:
        """Whether any of it is hashed."""
        return self._sum_count > 0

    @property
    def sums(self) -> bytes:
        """XXH3-64 of every summed buffer, packed u64. RuntimeError: not all have been moved."""
        if len(self._sums) < self._sum_count:
            raise RuntimeError(f"{self.left} bytes have not been moved: there are no sums yet")
        return self._sums.tobytes()

    @property
    def trailer(self) -> bytes:
        """What came behind the pieces. RuntimeError: it is not there yet."""
        if self.left:
            raise RuntimeError(f"{self.left} bytes have not been moved: there is no trailer yet")
        return bytes(self._trailer)

    def window(self, max_bytes: int, /) -> list[memoryview]:
        """Where the next bytes are."""
        if self._sum_count and not self.incoming:
            if not self._ahead:
                self._hash(min(max_bytes, self.left))
            max_bytes = min(max_bytes, self._ahead)
        return self._scatter.window(max_bytes)

    def advance(self, count: int, /) -> None:
        """Note that ``count`` bytes have been moved."""
        if not 0 <= count <= self.left:
            raise ValueError(f"advance({count}) with {self.left} bytes left")
        if self._sum_count:
            if self._ahead < count:
                self._hash(count - self._ahead)
            self._ahead -= count
        self._scatter.advance(count)

    def fill(self, data: ReadableBuffer, /) -> int:
        """Copy bytes that arrived already to where they belong; how many."""
        if not self.incoming:
            raise ValueError("fill() of a payload that is sent")
        view = memoryview(data).cast("B")
        total = 0
        while total < view.nbytes and self.left:
            target = self._scatter.first[: view.nbytes - total]
            target[:] = view[total : total + target.nbytes]
            self.advance(target.nbytes)
            total += target.nbytes
        return total

    def _hash(self, count: int) -> None:
        """Hash the next ``count`` bytes: they are there."""
        self._ahead += count
        while self._hashing is not None:
            view, summed = self._hashing
            step = min(count, view.nbytes - self._within)
            if not step and view.nbytes:
                return
            whole = step == view.nbytes
            if summed and not whole:
                self._state.update(view[self._within : self._within + step])
            self._within += step
            count -= step
            if self._within < view.nbytes:
                return
            if summed:
                self._sums.append(checksum(view) if whole else self._state.intdigest())
                self._state.reset()
            self._within = 0
            self._hashing = next(self._unhashed, None)
            if self._is_trailed and self._hashing is not None and self._hashing[0].obj is self._trailer:
                self._trailer[:] = self._sums.tobytes()


def _bytes_of(buffer: ReadableBuffer, *, writable: bool) -> memoryview:
    view = memoryview(buffer)
    if not view.c_contiguous:
        raise BufferError("a buffer is not C-contiguous")
    if writable and view.readonly:
        raise BufferError("a buffer to receive into is not writable")
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")
