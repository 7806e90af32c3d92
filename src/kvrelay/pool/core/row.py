"""What the pure catalog keeps of one object, and of one tenant."""

from __future__ import annotations

import math
from enum import IntEnum
from typing import NamedTuple
from zlib import crc32

from kvrelay.pool.core.order import Order, Standing


class State(IntEnum):
    """Where a row is in its life."""

    FREE = 0
    """No object's."""
    WRITING = 1
    """It has a name; its bytes are arriving."""
    SEALED = 2
    """Whole; it never changes again."""
    GONE = 3
    """It has no name any more, and is freed when nobody can touch its bytes."""


class Info(NamedTuple):
    """All that is known of one row. ``expires``: a time of the caller's clock, infinite for never."""

    tenant: int
    key: bytes
    state: State
    offset: int
    size: int
    layers: int
    segments: int
    pins: int
    held: bool
    kept: bool
    clean: bool
    expires: float


class Row:
    """One object. ``span``: bytes of the arena it takes, ``size`` rounded up."""

    __slots__ = (
        "block",
        "clean",
        "counted",
        "expires",
        "generation",
        "held",
        "kept",
        "key",
        "layers",
        "newer",
        "number",
        "offset",
        "older",
        "pins",
        "segments",
        "size",
        "span",
        "standing",
        "state",
        "sums",
        "tenant",
        "visited",
    )

    def __init__(self, number: int) -> None:
        self.number = number
        self.generation = 0
        self.state = State.FREE

    def begin(self, tenant: Holding, key: bytes, size: int, span: int, layers: int, segments: int) -> None:
        """Become a new object, without a place yet."""
        self.generation += 1
        self.tenant = tenant
        self.key = key
        self.size = size
        self.span = span
        self.layers = layers
        self.segments = segments
        self.offset = self.block = 0
        self.state = State.WRITING
        self.sums = b""
        self.pins = 0
        self.held = self.kept = self.clean = self.visited = self.counted = False
        self.standing = Standing.FRESH
        self.expires = math.inf
        self.older: Row | None = None
        self.newer: Row | None = None

    @property
    def handle(self) -> int:
        """This object's name among all there ever were."""
        return self.generation << 32 | self.number

    @property
    def mark(self) -> int:
        """A hash of its name among its tenant's, for the order of eviction."""
        return crc32(self.key)

    @property
    def evictable(self) -> bool:
        """Whether nobody minds losing it."""
        return self.state is State.SEALED and not self.pins and not self.kept

    @property
    def whole(self) -> bool:
        """Whether it is one segment."""
        return self.layers == self.segments == 1


class Holding:
    """What one tenant holds."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.names: dict[bytes, Row] = {}
        self.queue: Order[Row] = Order(self._moved)
        """Sealed objects that are not kept."""
        self.idle, self.clean_idle = [0, 0, 0], [0, 0, 0]
        """How many of them can be evicted, and how many of these are clean, by standing."""
        self.bytes = 0
        """Of the arena, in any state."""
        self.evictable_bytes = 0
        self.clean_bytes = 0
        """Of these, what is not lost when it is evicted."""
        self.quota: int | None = None
        self.max_objects: int | None = None

    def over(self, span: int) -> tuple[int, int]:
        """By how many bytes, and objects, one more of ``span`` bytes would be over the quota."""
        size = 0 if self.quota is None else max(0, self.bytes + span - self.quota)
        return size, 0 if self.max_objects is None else max(0, len(self.names) + 1 - self.max_objects)

    def account(self, row: Row, sign: int) -> None:
        """Count an object that can be evicted from now on (1), or cannot any more (-1)."""
        self.evictable_bytes += sign * row.span
        self.idle[row.standing] += sign
        row.counted = sign > 0
        if row.clean:
            self.clean_bytes += sign * row.span
            self.clean_idle[row.standing] += sign

    def _moved(self, row: Row, before: Standing) -> None:
        if row.counted:
            for counts in (self.idle, self.clean_idle) if row.clean else (self.idle,):
                counts[before] -= 1
                counts[row.standing] += 1

    def victim(self, *, clean: bool = False) -> Row | None:
        """What to evict next, if anything; ``clean``: of what is not lost with it."""
        if not (self.clean_bytes if clean else self.evictable_bytes):
            return None
        return self.queue.victim(_clean, self.clean_idle) if clean else self.queue.victim(_idle, self.idle)


def _idle(row: Row) -> bool:
    return not row.pins


def _clean(row: Row) -> bool:
    return row.clean and not row.pins
