"""What the disk tier keeps in mind of its regions, and which of them goes when room is needed."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kvrelay.pool.tiers.index import SLOT_BITS, Place

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvrelay.pool.tiers.core.tier import Shape

SPARSE = 0.25
"""A region with less than this share of it alive is dropped before older ones."""


class Record(NamedTuple):
    """An object about to be written: ``buffers`` are its header and its bytes."""

    key: bytes
    shape: Shape
    digest: int
    head_bytes: int
    buffers: tuple[bytes | memoryview, ...]

    @property
    def record_bytes(self) -> int:
        """Header and bytes."""
        return self.head_bytes + self.shape.size


class Region:
    """One region: ``size`` bytes written, of which ``live_bytes`` are ``objects`` that can be found."""

    __slots__ = ("live_bytes", "number", "objects", "size", "used")

    def __init__(self, number: int, size: int = 0, objects: int = 0, live_bytes: int = 0, slots: int = 0) -> None:
        self.number = number
        self.size = size
        self.objects = objects
        self.live_bytes = live_bytes
        self.used = bytearray(slots)
        """A byte a slot: whether it was loaded, or stored again, since it was written."""

    def places(self, batch: Sequence[Record], offset: int) -> list[Place]:
        """Where the next records of this region are, if they begin at ``offset``."""
        places: list[Place] = []
        for slot, record in enumerate(batch, len(self.used)):
            number = self.number << SLOT_BITS | slot
            places.append(Place(record.key, number, offset, record.head_bytes, record.shape, record.digest))
            offset += record.record_bytes
        return places

    def wrote(self, batch: Sequence[Record], end: int) -> None:
        """Enter records that have been written, up to ``end``."""
        self.used.extend(bytes(len(batch)))
        self.live_bytes += end - self.size
        self.size = end
        self.objects += len(batch)

    def lost(self, place: Place) -> None:
        """An object of this region cannot be found any more."""
        self.objects -= 1
        self.live_bytes -= place.record_bytes

    def use(self, place: Place) -> None:
        """Note that an object was asked for."""
        if place.slot < len(self.used):  # else it is being entered this very moment
            self.used[place.slot] = 1


def victim(regions: Sequence[Region]) -> Region:
    """The region to drop: the oldest, or one that is nearly dead."""
    sparsest = min(regions, key=lambda region: region.live_bytes / max(region.size, 1))
    if sparsest.live_bytes < SPARSE * sparsest.size:
        return sparsest
    return min(regions, key=lambda region: region.number)
