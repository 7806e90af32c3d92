"""What workers leave to those that come after them, should all of them end at once.

Memory that the parent makes before it forks, and only holds: it has nothing to do, and nothing that can fail. The first
worker writes there; it may be killed meanwhile, so there are two places in turn, each with its checksum.
"""

from __future__ import annotations

import os
import zlib

from msgspec import Struct

_HEAD = 16
"""Bytes before a place's data: its number in order, its length, its CRC-32."""


class SavedState(Struct, frozen=True):
    """Descriptors of the two places. Made before there are workers."""

    places: tuple[int, int]

    @classmethod
    def new(cls) -> SavedState:
        """Nothing saved yet."""
        first, second = (os.memfd_create(f"kvrelay-router-state-{number}", os.MFD_CLOEXEC) for number in range(2))
        return cls((first, second))

    def save(self, data: bytes) -> None:
        """Keep this instead of what was saved before. By one process at a time."""
        number, _, other = max((*self._read(place), place) for place in self.places)
        place = next(place for place in self.places if place != other)
        number += 1
        head = number.to_bytes(8) + len(data).to_bytes(4) + zlib.crc32(number.to_bytes(8) + data).to_bytes(4)
        os.ftruncate(place, 0)
        os.pwrite(place, head + data, 0)

    def load(self) -> bytes:
        """What was saved last; empty if nothing was."""
        return max(map(self._read, self.places))[1]

    def close(self) -> None:
        """It is needed no longer."""
        for place in self.places:
            os.close(place)

    @staticmethod
    def _read(place: int) -> tuple[int, bytes]:
        """A place's number and data; zero and nothing where they are not whole."""
        held = os.pread(place, os.fstat(place).st_size, 0)
        number, size, data = held[:8], int.from_bytes(held[8:12]), held[_HEAD:]
        whole = len(held) >= _HEAD and len(data) == size
        if not whole or zlib.crc32(number + data) != int.from_bytes(held[12:_HEAD]):
            return 0, b""
        return int.from_bytes(number), data
