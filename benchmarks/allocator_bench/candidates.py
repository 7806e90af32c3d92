"""Allocators to compare, behind two methods. `Blocks` is the pool's own."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from typing import TYPE_CHECKING, Protocol

from kvrelay.pool.core import blocks

if TYPE_CHECKING:
    from collections.abc import Callable

PAGE = blocks.PAGE_BYTES


class Allocator(Protocol):
    """Gives out pieces of an arena."""

    def allocate(self, size: int) -> int | None:
        """A name for ``size`` bytes, or None: they do not fit."""
        ...

    def free(self, name: int) -> None:
        """Give back what `allocate` gave."""
        ...


class BestFit:
    """The smallest free extent that is large enough, of these the one with the lowest address; pages throughout.

    A sorted list: what it costs grows with the number of holes.
    """

    def __init__(self, size: int) -> None:
        self._lengths: dict[int, int] = {}  # of what is live
        self._by_size: list[tuple[int, int]] = []
        self._start: dict[int, int] = {}
        self._end: dict[int, int] = {}
        self._insert(0, size // PAGE * PAGE)

    def allocate(self, size: int) -> int | None:
        need = -(-size // PAGE) * PAGE
        place = bisect_left(self._by_size, (need, 0))
        if place == len(self._by_size):
            return None
        length, offset = self._by_size[place]
        self._remove(offset, length)
        if length > need:
            self._insert(offset + need, length - need)
        self._lengths[offset] = need
        return offset

    def free(self, name: int) -> None:
        offset, length = name, self._lengths.pop(name)
        following = self._start.get(offset + length)
        if following is not None:
            self._remove(offset + length, following)
            length += following
        before = self._end.get(offset)
        if before is not None:
            length += self._start[before]
            self._remove(before, self._start[before])
            offset = before
        self._insert(offset, length)

    def _insert(self, offset: int, length: int) -> None:
        insort(self._by_size, (length, offset))
        self._start[offset] = length
        self._end[offset + length] = offset

    def _remove(self, offset: int, length: int) -> None:
        del self._by_size[bisect_left(self._by_size, (length, offset))]
        del self._start[offset]
        del self._end[offset + length]


class Buddy:
    """Powers of two from 4 KiB on, each aligned to its size; two free halves melt together."""

    def __init__(self, size: int) -> None:
        self._top = (size // PAGE).bit_length() - 1
        self._free: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(self._top + 1)]
        at = 0
        for order in range(self._top, -1, -1):
            if size // PAGE >> order & 1:
                self._free[order][at] = None
                at += 1 << order
        self._order: dict[int, int] = {}

    def allocate(self, size: int) -> int | None:
        order = (-(-size // PAGE) - 1).bit_length()
        found = next((o for o in range(order, self._top + 1) if self._free[o]), None)
        if found is None:
            return None
        page, _ = self._free[found].popitem()
        while found > order:
            found -= 1
            self._free[found][page + (1 << found)] = None
        self._order[page] = order
        return page

    def free(self, name: int) -> None:
        page, order = name, self._order.pop(name)
        while order < self._top and (page ^ 1 << order) in self._free[order]:
            del self._free[order][page ^ 1 << order]
            page &= ~(1 << order)
            order += 1
        self._free[order][page] = None


class Slabs:
    """Size classes a quarter apart, each with slabs of 4 MiB of its own; an empty slab serves any class again."""

    SLAB = 4 << 20

    def __init__(self, size: int) -> None:
        self._empty = list(range(size // self.SLAB))
        self._classes = [64]
        while self._classes[-1] < self.SLAB:
            self._classes.append(min(self.SLAB, -(-self._classes[-1] * 5 // 4 // 64) * 64))
        self._partial: list[OrderedDict[int, None]] = [OrderedDict() for _ in self._classes]
        self._class: dict[int, int] = {}  # of a slab
        self._open: dict[int, list[int]] = {}  # free places of a slab

    def allocate(self, size: int) -> int | None:
        number = bisect_left(self._classes, size)
        partial = self._partial[number]
        if not partial:
            if not self._empty:
                return None
            slab = self._empty.pop()
            self._class[slab] = number
            self._open[slab] = list(range(self.SLAB // self._classes[number]))
            partial[slab] = None
        slab = next(reversed(partial))
        places = self._open[slab]
        place = places.pop()
        if not places:
            del partial[slab]
        return slab * (self.SLAB // 64) + place

    def free(self, name: int) -> None:
        slab, place = divmod(name, self.SLAB // 64)
        number = self._class[slab]
        places = self._open[slab]
        places.append(place)
        if len(places) == self.SLAB // self._classes[number]:
            self._partial[number].pop(slab, None)
            self._empty.append(slab)
        else:
            self._partial[number][slab] = None


CANDIDATES: dict[str, Callable[[int], Allocator]] = {
    "blocks": blocks.Blocks,
    "best fit": BestFit,
    "slabs": Slabs,
    "buddy": Buddy,
}
