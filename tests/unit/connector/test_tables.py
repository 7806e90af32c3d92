from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvrelay.connector.core.tables import Blocks, Table, Tables

NULL = 0
MIXED = Tables((Table(8, 0), Table(4, 1), Table(8, 1)), (0, 10), NULL)


def test_part_of_a_load_counts_only_with_one_table_and_no_window() -> None:
    assert Tables.one(8).divisible
    assert not Tables((Table(8, 0),), (16,), NULL).divisible
    assert not Tables((Table(8, 0), Table(8, 1)), (0, 0), NULL).divisible


def test_what_a_window_needs_begins_with_a_block_of_every_table_it_lies_in() -> None:
    assert MIXED.needed_from(0, 100) == 0
    assert MIXED.needed_from(1, 100) == 88  # token 91 is the first reached: block 22 of 4, block 11 of 8
    assert MIXED.needed_from(1, 5) == 0


def test_a_group_is_held_from_where_all_its_tables_have_blocks() -> None:
    full, small, large = [1, 2, 3], [NULL, NULL, 5, 6, 7], [NULL, 8, 9]
    assert MIXED.held_from((full, small, large), 20) == (0, 8)
    small[2] = NULL
    assert MIXED.held_from((full, small, large), 20) == (0, 12)
    assert MIXED.stretch((full, small, large), (0, 12), 20) == (
        Blocks((1, 2, 3), 0), Blocks((6, 7), 3), Blocks((8, 9), 1),
    )  # fmt: skip


def test_blocks_are_found_by_their_tokens() -> None:
    stretch = Blocks((40, 41, 42), 3)
    assert stretch.between(24, 48, 8) == (40, 41, 42)
    assert stretch.between(33, 34, 8) == (41,)


@given(
    block=st.integers(1, 9), window=st.integers(2, 40), computed=st.integers(0, 200), more=st.integers(1, 60),
    chunk=st.integers(1, 40),
)  # fmt: skip
def test_a_chunk_no_longer_than_the_window_is_whole_in_the_step_that_completes_it(
    block: int, window: int, computed: int, more: int, chunk: int
) -> None:
    """VLLM frees whole blocks below the window of the first token a step computes."""
    tables = Tables((Table(block, 0),), (window,), NULL)
    freed = max(0, computed - window + 1) // block
    count = -(-(computed + more) // block)
    ids = [NULL] * freed + list(range(1, count - freed + 1))
    (held,) = tables.held_from((ids,), computed + more)
    assert held == freed * block
    assert held <= tables.needed_from(0, max(0, computed))
    for start in range(0, computed + more, chunk):
        end = min(start + chunk, computed + more)
        if chunk <= window and end > computed:
            assert held <= start
