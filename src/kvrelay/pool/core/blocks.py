"""Which bytes of the arena are free: blocks in address order, the free ones filed by size.

The arena is cut into blocks that follow each other without a gap. Each is free or live; two free ones never touch. A
block is known by a small int, dense and used again, so that whoever owns live blocks can keep what it knows of them in
columns. A free block is filed in the bin of its size: 64 bins for each doubling, so that sizes in one bin differ by
less than 1/64 (under 4 KiB: each size has its own). Allocation searches the bin of the size asked for, briefly, then
takes the first block of the next bin that has one. So both allocating and freeing cost the same however many blocks
there are.

From 4 KiB on, offsets and lengths are multiples of 4 KiB; smaller blocks are multiples of 64 bytes, and fill what is
too small or too crooked for the others first.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE_BYTES = 4_096
GRANULE_BYTES = 64
_GRANULE_BITS = 6
_FINE_BITS = 6
_PROBES = 16
"""How many blocks of a bin whose sizes straddle the one asked for are looked at."""

_UNUSED, _FREE, _LIVE = 0, 1, 2


def rounded(size: int) -> int:
    """What an allocation of ``size`` bytes takes."""
    if size <= PAGE_BYTES - GRANULE_BYTES:
        return -(-size // GRANULE_BYTES) * GRANULE_BYTES
    return -(-size // PAGE_BYTES) * PAGE_BYTES


def room(start: int, end: int) -> int:
    """The largest `rounded` size that fits into the bytes ``[start, end)``."""
    pages = end // PAGE_BYTES * PAGE_BYTES - -(-start // PAGE_BYTES) * PAGE_BYTES
    return pages if pages > 0 else min(end - start, PAGE_BYTES - GRANULE_BYTES)


def _bin(size: int) -> int:
    """The bin of free blocks with `room` for ``size``. Grows with it."""
    granules = size >> _GRANULE_BITS
    shift = granules.bit_length() - _FINE_BITS - 1
    return granules if shift <= 0 else (shift << _FINE_BITS) + (granules >> shift)


class Blocks:
    """An arena of ``size`` bytes, rounded down to `PAGE_BYTES`. Block 0 is nobody's: it stands for both ends."""

    def __init__(self, size: int) -> None:
        self.size = size // PAGE_BYTES * PAGE_BYTES
        self.free_bytes = self.size
        self.offset = array("Q", [0])
        self.length = array("Q", [0])
        self.before = array("I", [0])
        """The block before each one in the arena; 0: none."""
        self.after = array("I", [0])
        self._state = bytearray([_LIVE])
        self._up = array("I", [0])  # neighbours in a bin's list; of an unused id, ``_down`` is the next unused one
        self._down = array("I", [0])
        self._unused = 0
        self._heads: list[int] = [0] * (_bin(max(self.size, PAGE_BYTES)) + 1)
        self._filled = 0  # bit mask of bins that are not empty
        if self.size:
            self._file(self._insert(0, 0, self.size))

    @property
    def largest(self) -> int:
        """The largest size that can be allocated now, in bytes."""
        return max(map(self._room, self._in_bin(self._filled.bit_length() - 1)), default=0)

    def __iter__(self) -> Iterator[int]:
        """All blocks in address order."""
        block = self.after[0]
        while block:
            yield block
            block = self.after[block]

    def is_live(self, block: int) -> bool:
        """Whether ``block`` is allocated."""
        return block > 0 and self._state[block] == _LIVE

    def is_free(self, block: int) -> bool:
        """Whether this is a free block."""
        return self._state[block] == _FREE

    def allocate(self, size: int) -> int | None:
        """A live block of ``size`` bytes, or None when no free block has room for it."""
        need = rounded(size)
        block = self._find(need)
        if not block:
            return None
        self._unfile(block)
        start = self.offset[block]
        end = start + self.length[block]
        at = self._place(start, end, need)
        if at > start:
            self._file(self._insert(self.before[block], start, at - start))
        if at + need < end:
            self._file(self._insert(block, at + need, end - at - need))
        self.offset[block] = at
        self.length[block] = need
        self._state[block] = _LIVE
        self.free_bytes -= need
        return block

    @staticmethod
    def _place(start: int, end: int, need: int) -> int:
        """Where in a free block to put ``need`` bytes."""
        first_page = -(-start // PAGE_BYTES) * PAGE_BYTES
        if need >= PAGE_BYTES:
            return first_page
        if end - start < PAGE_BYTES or first_page - start >= need:
            return start
        return end - need  # small ones break into a hole from its end, large ones from its start

    def free(self, block: int) -> None:
        """Give a live block back. Its number may be another block's from the next `allocate` on."""
        assert self.is_live(block), f"block {block} is not allocated"
        self.free_bytes += self.length[block]
        neighbour = self.before[block]
        if self._state[neighbour] == _FREE:
            self._unfile(neighbour)
            self.offset[block] = self.offset[neighbour]
            self.length[block] += self.length[neighbour]
            self._drop(neighbour)
        neighbour = self.after[block]
        if self._state[neighbour] == _FREE:
            self._unfile(neighbour)
            self.length[block] += self.length[neighbour]
            self._drop(neighbour)
        self._file(block)

    # --- the list in address order ---

    def _block(self, offset: int, length: int) -> int:
        block = self._unused
        if block:
            self._unused = self._down[block]
            self.offset[block] = offset
            self.length[block] = length
            return block
        self.offset.append(offset)
        self.length.append(length)
        for column in (self.before, self.after, self._up, self._down):
            column.append(0)
        self._state.append(_UNUSED)
        return len(self.offset) - 1

    def _insert(self, before: int, offset: int, length: int) -> int:
        """A new block after ``before`` (0: the first)."""
        block = self._block(offset, length)
        after = self.after[before]
        self.before[block] = before
        self.after[block] = after
        self.after[before] = block
        self.before[after] = block
        return block

    def _drop(self, block: int) -> None:
        before, after = self.before[block], self.after[block]
        self.after[before] = after
        self.before[after] = before
        self._state[block] = _UNUSED
        self._down[block] = self._unused
        self._unused = block

    # --- the bins ---

    def _room(self, block: int) -> int:
        start = self.offset[block]
        return room(start, start + self.length[block])

    def _in_bin(self, number: int) -> Iterator[int]:
        block = self._heads[number] if number >= 0 else 0
        while block:
            yield block
            block = self._down[block]

    def _find(self, need: int) -> int:
        """A free block with room for ``need``, nearly the smallest; 0: none."""
        number = _bin(need)
        filled = self._filled >> number
        if filled & 1:
            block = self._heads[number]
            for _ in range(_PROBES):
                if self._room(block) >= need:
                    return block
                block = self._down[block]
                if not block:
                    break
        filled >>= 1
        if not filled:
            return 0
        return self._heads[number + (filled & -filled).bit_length()]

    def _file(self, block: int) -> None:
        self._state[block] = _FREE
        number = _bin(self._room(block))
        head = self._heads[number]
        self._up[block] = 0
        self._down[block] = head
        if head:
            self._up[head] = block
        else:
            self._filled |= 1 << number
        self._heads[number] = block

    def _unfile(self, block: int) -> None:
        up, down = self._up[block], self._down[block]
        if down:
            self._up[down] = up
        if up:
            self._down[up] = down
            return
        number = _bin(self._room(block))
        self._heads[number] = down
        if not down:
            self._filled &= ~(1 << number)

    def check_integrity(self) -> None:
        """Raise AssertionError unless the blocks cover the arena and every free one is filed where it belongs."""
        assert (self.offset[0], self.length[0], self._state[0]) == (0, 0, _LIVE)
        end, free_bytes, was_free, ids = 0, 0, False, {0}
        for block in self:
            assert self.offset[block] == end, "blocks overlap or leave a gap"
            assert self.length[block] > 0
            assert self.length[block] % GRANULE_BYTES == 0
            assert self.after[self.before[block]] == block
            is_free = self.is_free(block)
            assert not (is_free and was_free), "two free blocks touch"
            if is_free:
                free_bytes += self.length[block]
            else:
                assert self.is_live(block)
                assert self.length[block] < PAGE_BYTES or not (self.length[block] | end) % PAGE_BYTES
            end += self.length[block]
            was_free = is_free
            ids.add(block)
        assert end == self.size
        assert free_bytes == self.free_bytes
        filed = [block for number in range(len(self._heads)) for block in self._in_bin(number)]
        assert sorted(filed) == sorted(block for block in ids if self.is_free(block))
        for number in range(len(self._heads)):
            assert bool(self._heads[number]) == bool(self._filled >> number & 1)
            assert all(_bin(self._room(block)) == number for block in self._in_bin(number))
        unused = self._unused
        while unused:
            assert unused not in ids
            ids.add(unused)
            unused = self._down[unused]
        assert len(ids) == len(self.offset), "an id is lost"
