"""How an object is written to a tier's medium: a header that proves itself and the bytes, then the bytes.

::

    magic 8 | header bytes u32 | key bytes u16 | 0 u16 | layers u32 | segments u32 | size u64 | expires f64 |
    XXH3 of the sums u64 | XXH3 of all before it and the key u64 | key | sums, u64 a segment | bytes

All little-endian. What is fixed and the key fit in `HEAD_READ_BYTES`, so that one small read shows an object's shape.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

from kvrelay.pool.tiers.core.tier import MAX_TIER_KEY_BYTES, Shape
from kvrelay.transport.checksum import checksum, segment_sums
from kvrelay.wire.limits import MAX_OBJECT_BYTES, MAX_SEGMENTS

if TYPE_CHECKING:
    from kvrelay.pool.tiers.core.tier import Item

MAGIC = b"KVRLYOB1"
_FIXED = struct.Struct("<8sIHHIIQdQ")
_SUM = struct.Struct("<Q")
FIXED_BYTES = _FIXED.size + _SUM.size
HEAD_READ_BYTES = FIXED_BYTES + MAX_TIER_KEY_BYTES


class DamagedError(Exception):
    """A record is not what was written."""


class Head(NamedTuple):
    """What a record's header says, without the checksums of the segments. ``digest``: XXH3 of these."""

    key: bytes
    shape: Shape
    digest: int
    head_bytes: int

    @property
    def record_bytes(self) -> int:
        """Header and bytes."""
        return self.head_bytes + self.shape.size


def head_bytes(key: bytes, segments: int) -> int:
    """Size of the header of an object of ``segments`` segments in all."""
    return FIXED_BYTES + len(key) + 8 * segments


def pack_head(item: Item) -> bytes:
    """The header of an object."""
    key, shape, sums, _ = item
    size = FIXED_BYTES + len(key) + len(sums)
    digest = checksum(sums)
    fixed = _FIXED.pack(MAGIC, size, len(key), 0, shape.layers, shape.segments, shape.size, shape.expires_at, digest)
    return b"".join((fixed, _SUM.pack(checksum(fixed + key)), key, sums))


def parse_head(data: bytes | bytearray | memoryview) -> Head:
    """What the beginning of a record says; ``data`` is at least all before the sums.

    Raises:
        DamagedError: it is not the beginning of a record, or has changed since it was written.
    """
    if len(data) < FIXED_BYTES:
        raise DamagedError(f"{len(data)} bytes: too short for a header")
    magic, size, key_bytes, _, layers, segments, length, expires_at, digest = _FIXED.unpack_from(data)
    end = FIXED_BYTES + key_bytes
    if magic != MAGIC:
        raise DamagedError("there is no header where one was written")
    if len(data) < end:
        raise DamagedError(f"{len(data)} bytes: too short for the header's key")
    key = bytes(data[FIXED_BYTES:end])
    (proof,) = _SUM.unpack_from(data, _FIXED.size)
    if proof != checksum(bytes(data[: _FIXED.size]) + key):
        raise DamagedError("the header does not match its checksum")
    count = layers * segments
    if not 0 < count <= MAX_SEGMENTS or size != end + 8 * count or length % count or length > MAX_OBJECT_BYTES:
        raise DamagedError("the header contradicts itself")
    return Head(key, Shape(length, layers, segments, expires_at), digest, size)


def proven_sums(key: bytes, shape: Shape, header: bytes | bytearray | memoryview, data: memoryview) -> bytes:
    """The checksums of an object whose whole header and bytes have been read, all of it verified.

    Raises:
        DamagedError: something has changed since it was written.
    """
    head = parse_head(header)
    if head.key != key or head.shape != shape or data.nbytes != shape.size:
        raise DamagedError("another object is where this one was written")
    if len(header) != head.head_bytes:
        raise DamagedError("the header has another length than was written")
    sums = bytes(header[FIXED_BYTES + len(key) :])
    if checksum(sums) != head.digest:
        raise DamagedError("the checksums in the header have changed")
    count = shape.layers * shape.segments
    actual = segment_sums(data, shape.size // count) if shape.size else [checksum(b"")] * count
    if struct.pack(f"<{count}Q", *actual) != sums:
        raise DamagedError("the bytes do not match their checksums")
    return sums
