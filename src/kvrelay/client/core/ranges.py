"""Byte ranges of one object, over the segments they lie in."""

from __future__ import annotations

import contextlib
from itertools import pairwise
from typing import TYPE_CHECKING

from kvrelay.client.core.blocks import bytes_of
from kvrelay.client.core.given import pairs_of, whole_number
from kvrelay.client.core.prefix import StagePart
from kvrelay.errors import BadRequestError, ConflictError, KvRelayError, NotFoundError, PoolFullError
from kvrelay.wire import limits
from kvrelay.wire import messages as m

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvrelay.client.core.segments import Segments
    from kvrelay.client.core.steps import Operation

LEASE_S = 60.0


def read_ranges(segments: Segments, key: bytes, ranges: Sequence[tuple[int, int]]) -> Operation[list[bytes] | None]:
    """Verified bytes of ranges ``(offset, size)`` of a sealed object; None when it is not there.

    Whole segments are read and verified, so a range costs the segments it touches.

    Raises:
        BadRequestError: a range is empty or reaches beyond the object.
        CorruptionError: bytes do not match their checksum. The pool has been told.
    """
    starts, lengths = pairs_of(ranges, "ranges", "offset and size")
    ranges = [
        (whole_number(start, "offset"), whole_number(length, "size"))
        for start, length in zip(starts, lengths, strict=True)
    ]
    prefix = yield from segments.match_prefix([key], lease_s=LEASE_S, unsealed=False)
    if not prefix:
        return None
    size, segment = prefix.views[0].size, prefix.segment_bytes(0)
    try:
        spans = [_span(offset, length, size, segment) for offset, length in ranges]
        yield from segments.wait(prefix, prefix.layers, timeout_s=0.0)
        views = yield from segments.fetch(prefix, spans, shared=False)
        found = [
            bytes(view[offset - span.first * segment :][:length])
            for view, span, (offset, length) in zip(views, spans, ranges, strict=True)
        ]
    except KvRelayError:
        with contextlib.suppress(KvRelayError):
            yield from segments.release(prefix)
        raise
    yield from segments.release(prefix)
    return found


def _span(offset: int, length: int, size: int, segment: int) -> m.Range:
    if offset < 0 or length <= 0 or offset + length > size:
        raise BadRequestError(f"a range of {length} bytes at {offset} is not within the object's {size} bytes")
    first = offset // segment
    return m.Range(0, first, (offset + length - 1) // segment - first + 1)


def write_ranges(
    segments: Segments,
    key: bytes,
    size: int,
    pieces: Sequence[tuple[int, memoryview]],
    *,
    segment_bytes: int,
    group: str | None,
    lease_s: float,
    ticket: str | None,
) -> Operation[bool]:
    """Write pieces ``(offset, bytes)`` of an object of ``size`` bytes; whether it is sealed now, every byte written.

    Pieces begin and end at multiples of ``segment_bytes``. Clients that give one ``group`` write one object together;
    writing the same bytes again changes nothing.

    Raises:
        BadRequestError: a piece is not made of whole segments of the object, or two of them overlap.
        ConflictError: another group is writing the object, or other bytes were written there before.
        NotFoundError: the object was given up meanwhile.
        PoolFullError: no room.
    """
    size, segment_bytes = whole_number(size, "size"), whole_number(segment_bytes, "segment_bytes")
    if segment_bytes <= 0 or size <= 0 or size % segment_bytes or size // segment_bytes > limits.MAX_SEGMENTS:
        raise BadRequestError(f"{size} bytes are not 1 to {limits.MAX_SEGMENTS} segments of {segment_bytes} bytes each")
    spec = m.Spec(key, size, 1, size // segment_bytes)
    starts = [whole_number(offset, "offset") for offset, _ in pieces]
    datas = [bytes_of(data) for _, data in pieces]
    for offset, data in zip(starts, datas, strict=True):
        if offset < 0 or offset % segment_bytes or data.nbytes % segment_bytes or not data.nbytes:
            raise BadRequestError(
                f"a piece of {data.nbytes} bytes at {offset} is not made of whole segments of {segment_bytes} bytes"
            )
        if offset + data.nbytes > size:
            raise BadRequestError(f"a piece of {data.nbytes} bytes at {offset} ends beyond the object's {size} bytes")
    _check_apart(starts, datas)
    group = segments.group if group is None else group
    announced = yield from segments.announce([spec], group=group, lease_s=lease_s, ticket=ticket)
    grant = announced.grants[0]
    match grant.state:
        case "sealed":
            return True
        case "busy":
            raise ConflictError(f"object {key.hex()} is being written by another group")
        case "full":
            why = announced.why or PoolFullError.WHY
            raise PoolFullError(f"the pool had no room for an object of {size} bytes: {why}")
    parts = [
        StagePart(grant, spec, offset // segment_bytes, data.nbytes // segment_bytes)
        for offset, data in zip(starts, datas, strict=True)
    ]
    if segments.arena is None:
        yield from segments.commit(parts, datas)
    else:
        views = segments.stage(parts)
        for view, data in zip(views, datas, strict=True):
            view[:] = data
        yield from segments.commit(parts, views)
    try:
        reply = yield from segments.announce([spec], group=group, lease_s=lease_s, ticket=ticket)
    except NotFoundError:
        return False
    return reply.grants[0].state == "sealed"


def _check_apart(starts: Sequence[int], datas: Sequence[memoryview]) -> None:
    """Refuse pieces of one call that overlap: which of them counts would depend on how they travel."""
    spans = sorted(
        (start, start + data.nbytes, index) for index, (start, data) in enumerate(zip(starts, datas, strict=True))
    )
    for (start, end, index), (following, following_end, other) in pairwise(spans):
        if following < end:
            raise BadRequestError(
                f"pieces {index} and {other} overlap: bytes {start} to {end - 1} and {following} to "
                f"{following_end - 1} of the object"
            )
