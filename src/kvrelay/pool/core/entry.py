"""An object that is being written in segments.

::

    (absent) ─announce─► WRITING ─every segment written─► SEALED ─evicted, expired, deleted, corrupt─► GONE
                            └─writer lost, lease over, given up, deleted───────────────────────────────► GONE

The states are the catalog's; an `Entry` stands beside a row from its announcement until it is sealed or, when it was
given up, until nobody can touch its bytes: no pin (lease, ticket, transfer in progress) and no holdout (a shared-memory
writer that has not said that it stopped).
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, NamedTuple

from kvrelay.errors import ConflictError

if TYPE_CHECKING:
    from kvrelay.wire.messages import Spec


class Landing(NamedTuple):
    """Where ``size`` bytes of a payload go, from segment ``first`` on: an offset in the arena; None: they are there."""

    offset: int | None
    size: int
    first: int
    segments: int


class Entry:
    """Place, geometry, what has been written of an object and who is writing it."""

    __slots__ = (
        "deadline",
        "group",
        "handle",
        "holdouts",
        "key",
        "layers",
        "missing",
        "offset",
        "open",
        "ready",
        "row",
        "segments",
        "size",
        "sums",
        "writers",
        "written",
    )

    def __init__(self, row: int, handle: int, spec: Spec, offset: int, group: str, deadline: float) -> None:
        self.row = row
        self.handle = handle
        self.key = spec.key
        self.size = spec.size
        self.layers = spec.layers
        self.segments = spec.segments
        self.offset = offset
        self.group = group
        self.deadline = deadline
        self.open = True
        """Whether it can be written: neither sealed nor given up."""
        self.sums = array("Q", bytes(8 * spec.layers * spec.segments))
        self.written = bytearray(spec.layers * spec.segments)
        self.missing = [spec.segments] * spec.layers
        self.ready = 0
        self.writers: set[int] = set()
        self.holdouts: set[int] = set()

    @property
    def segment_bytes(self) -> int:
        """Size of one segment."""
        return self.size // (self.layers * self.segments)

    def landings(self, first: int, sums: list[int]) -> list[Landing]:
        """Where in the arena a run of segments goes.

        Raises:
            ConflictError: a segment was written before with other bytes.
        """
        size = self.segment_bytes
        landings: list[Landing] = []
        at, end = first, first + len(sums)
        while at < end:
            if self.written[at]:
                self._check_same(at, sums[at - first])
                following = at + 1
                landings.append(Landing(None, size, at, 1))
            else:
                following = self.written.find(1, at, end)
                if following < 0:
                    following = end
                landings.append(Landing(self.offset + at * size, (following - at) * size, at, following - at))
            at = following
        return landings

    def _check_same(self, segment: int, checksum: int) -> None:
        if self.written[segment] and self.sums[segment] != checksum:
            raise ConflictError(f"segment {segment} of object {self.key.hex()} was written before with other bytes")

    def write(self, first: int, sums: list[int]) -> bool:
        """Note that a run of segments holds bytes of these checksums; whether the object is complete now.

        Writing a segment again with the same checksum changes nothing.

        Raises:
            ConflictError: a segment was written before with other bytes.
        """
        for segment, checksum in enumerate(sums, first):
            self._check_same(segment, checksum)
            if self.written[segment]:
                continue
            self.written[segment] = 1
            self.sums[segment] = checksum
            self.missing[segment // self.segments] -= 1
        while self.ready < self.layers and not self.missing[self.ready]:
            self.ready += 1
        return self.ready == self.layers

    def check_integrity(self) -> None:
        """Raise AssertionError unless the counters agree with each other."""
        for layer in range(self.layers):
            row = self.written[layer * self.segments : (layer + 1) * self.segments]
            assert self.missing[layer] == row.count(0)
        assert all(not missing for missing in self.missing[: self.ready])
        assert self.ready < self.layers, "what is whole is sealed"
        assert self.missing[self.ready]
        assert self.writers or not self.open, "an object in writing has a writer"
