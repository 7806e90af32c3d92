from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from kvrelay.pool.core.blocks import GRANULE_BYTES, PAGE_BYTES, Blocks, room, rounded
from kvrelay.pool.core.clearing import MOST_BLOCKS, REACH, window

SIZES = st.one_of(st.integers(1, 8 * GRANULE_BYTES), st.integers(1, 20 * PAGE_BYTES), st.just(PAGE_BYTES))


class BlocksMachine(RuleBasedStateMachine):
    """Whatever is allocated, freed and cleared: no byte is given twice, none is lost, and a cleared window has room."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = Blocks(64 * PAGE_BYTES + 17)
        self.held: dict[int, int] = {}  # block -> size

    taken = Bundle("taken")

    @rule(target=taken, size=SIZES)
    def allocate(self, size: int) -> int | None:
        block = self.blocks.allocate(size)
        if block is None:
            assert self.blocks.largest < rounded(size)
            return None
        assert block not in self.held
        self.held[block] = size
        offset = self.blocks.offset[block]
        assert offset % (PAGE_BYTES if rounded(size) >= PAGE_BYTES else GRANULE_BYTES) == 0
        assert self.blocks.length[block] == rounded(size)
        return block

    @rule(block=consumes(taken))
    def free(self, block: int | None) -> None:
        if self.held.pop(block or 0, None) is not None:
            self.blocks.free(block or 0)

    @rule(block=consumes(taken), size=SIZES, pinned=st.sets(st.integers(0, 40)))
    def clear(self, block: int | None, size: int, pinned: set[int]) -> None:
        if block not in self.held or block is None:
            return
        victims = window(self.blocks, block, size, lambda b: None if b in pinned else float(self.held[b]))
        if victims is None:
            return
        assert victims[0] == block
        assert not pinned & set(victims)
        for victim in victims:
            del self.held[victim]
            self.blocks.free(victim)
        made = self.blocks.allocate(size)
        assert made is not None
        self.blocks.free(made)

    @invariant()
    def every_byte_is_held_or_free(self) -> None:
        self.blocks.check_integrity()
        assert {block for block in self.blocks if self.blocks.is_live(block)} == set(self.held)
        assert self.blocks.free_bytes + sum(map(rounded, self.held.values())) == self.blocks.size


TestBlocks = BlocksMachine.TestCase
TestBlocks.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)


def filled(count: int, size: int) -> tuple[Blocks, list[int]]:
    blocks = Blocks(count * size)
    taken = [blocks.allocate(size) for _ in range(count)]
    assert blocks.free_bytes == 0
    return blocks, [block for block in taken if block is not None]


def test_freeing_everything_leaves_one_block() -> None:
    blocks, taken = filled(10, PAGE_BYTES)
    for block in taken[::2] + taken[1::2]:
        blocks.free(block)
    assert blocks.largest == blocks.free_bytes == blocks.size == 10 * PAGE_BYTES
    assert len(list(blocks)) == 1


def test_freeing_twice_is_caught() -> None:
    blocks, taken = filled(4, PAGE_BYTES)
    blocks.free(taken[1])
    with pytest.raises(AssertionError, match="not allocated"):
        blocks.free(taken[1])


def test_an_arena_smaller_than_a_page_has_no_room() -> None:
    blocks = Blocks(PAGE_BYTES - 1)
    assert (blocks.size, blocks.largest, blocks.allocate(1)) == (0, 0, None)
    blocks.check_integrity()


def test_small_objects_share_a_page_and_the_hole_they_leave_is_found_by_them_first() -> None:
    blocks = Blocks(8 * PAGE_BYTES)
    small = [blocks.allocate(100) for _ in range(32)]
    assert blocks.free_bytes == 7 * PAGE_BYTES
    assert small[5] is not None
    place = blocks.offset[small[5]]
    blocks.free(small[5])
    again = blocks.allocate(128)
    assert again is not None
    assert blocks.offset[again] == place


def test_an_exact_hole_is_preferred_to_a_larger_one() -> None:
    blocks, taken = filled(16, 4 * PAGE_BYTES)
    blocks.free(taken[3])
    for block in taken[8:11]:
        blocks.free(block)
    made = blocks.allocate(4 * PAGE_BYTES)
    assert made is not None
    assert blocks.offset[made] == 3 * 4 * PAGE_BYTES


@given(start=st.integers(0, 300), length=st.integers(1, 300))
def test_room_is_what_an_aligned_allocation_can_use(start: int, length: int) -> None:
    first, last = start * GRANULE_BYTES, (start + length) * GRANULE_BYTES
    fitting = [n for n in range(GRANULE_BYTES, PAGE_BYTES, GRANULE_BYTES) if first + n <= last]
    fitting += [
        n
        for page in range(-(-first // PAGE_BYTES) * PAGE_BYTES, last, PAGE_BYTES)
        for n in range(PAGE_BYTES, last - page + 1, PAGE_BYTES)
    ]
    assert room(first, last) == max(fitting)


def test_a_window_takes_the_cheaper_neighbours_and_no_more_than_it_needs() -> None:
    blocks, taken = filled(8, PAGE_BYTES)
    cost = dict(zip(taken, [9.0, 9.0, 1.0, 1.0, 9.0, 9.0, 9.0, 9.0], strict=True))
    victims = window(blocks, taken[3], 2 * PAGE_BYTES, cost.get)
    assert victims == [taken[3], taken[2]]


def test_a_window_gathers_holes_when_that_makes_room_cheaper() -> None:
    blocks, taken = filled(9, PAGE_BYTES)
    for at in (2, 6):
        blocks.free(taken[at])
    # Objects 3 and 4 with the hole at 2 make room once, 5 with the hole at 6 once more, 1 a third time: 4 for 6 pages.
    victims = window(blocks, taken[4], 2 * PAGE_BYTES, lambda block: float(blocks.length[block]))
    assert victims is not None
    assert set(victims) == {taken[1], taken[3], taken[4], taken[5]}
    for victim in victims:
        blocks.free(victim)
    assert blocks.largest == 6 * PAGE_BYTES


def test_a_window_stops_at_what_is_pinned() -> None:
    blocks, taken = filled(4, PAGE_BYTES)
    pinned = {taken[1], taken[3]}
    assert window(blocks, taken[2], 2 * PAGE_BYTES, lambda b: None if b in pinned else 1.0) is None
    assert window(blocks, taken[1], PAGE_BYTES, lambda b: None if b in pinned else 1.0) is None
    assert window(blocks, taken[2], PAGE_BYTES, lambda b: None if b in pinned else 1.0) == [taken[2]]


def test_a_window_of_more_objects_than_may_go_is_not_made() -> None:
    blocks, taken = filled(MOST_BLOCKS + 1, PAGE_BYTES)
    victims = window(blocks, taken[0], MOST_BLOCKS * PAGE_BYTES, lambda _: 1.0)
    assert victims is not None
    assert len(victims) == MOST_BLOCKS
    assert window(blocks, taken[0], (MOST_BLOCKS + 1) * PAGE_BYTES, lambda _: 1.0) is None


def test_a_window_gathers_holes_no_farther_than_it_reaches() -> None:
    """Every other page is free, and all objects but the first cost next to nothing: each makes room once more."""
    blocks, taken = filled(100, PAGE_BYTES)
    for at in range(1, 100, 2):
        blocks.free(taken[at])
    victims = window(blocks, taken[0], 2 * PAGE_BYTES, lambda block: 10.0 if block == taken[0] else 0.1)
    assert victims == taken[: 2 * (1 + REACH) : 2]


def test_a_large_neighbour_is_not_taken_for_the_little_that_is_missing() -> None:
    blocks = Blocks(12 * PAGE_BYTES)
    large, *small = [blocks.allocate(size * PAGE_BYTES) for size in (8, 1, 1, 1, 1)]
    assert large is not None
    assert small[0] is not None
    # A byte of the large one costs no more than one of the small, but only one page of its eight is needed.
    victims = window(blocks, small[0], 2 * PAGE_BYTES, lambda block: float(blocks.length[block]))
    assert victims == small[:2]
