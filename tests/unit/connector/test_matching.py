"""What is asked of the pool, and what is made of its answers, against a pool that is a set of keys."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.connector.core.geometry import KvGeometry, KvGroup
from kvrelay.connector.core.matching import Found, Search, load_end
from kvrelay.connector.core.tables import Table, Tables
from kvrelay.identity.core.chunks import Chunk
from kvrelay.wire import messages as m

CHUNK, BLOCK = 8, 4
VIEW = m.View(0, 1, 1, 1, 1)


def chunks_of(tokens: int) -> tuple[Chunk, ...]:
    return tuple(Chunk(b"%d" % at, at, min(at + CHUNK, tokens)) for at in range(0, tokens, CHUNK))


def model(*windows: int) -> tuple[KvGeometry, Tables]:
    several = len(windows) > 1
    groups = tuple(
        KvGroup((at,), 1, 8, 4, window=window, tag=b"%d" % at if several else b"") for at, window in enumerate(windows)
    )
    return KvGeometry(groups), Tables(tuple(Table(BLOCK, at) for at in range(len(windows))), windows, 0)


class Pool:
    """Keys that are there; leases it gave."""

    def __init__(self, keys: set[bytes]) -> None:
        self.keys = keys
        self.leases: dict[int, list[bytes]] = {}
        self.asked = 0

    def answer(self, question: m.Match | m.Exists) -> m.Matched | m.Existing:
        self.asked += 1
        assert question.keys
        if isinstance(question, m.Exists):
            return m.Existing(0, [key in self.keys for key in question.keys])
        count = next((at for at, key in enumerate(question.keys) if key not in self.keys), len(question.keys))
        if count:
            self.leases[self.asked] = question.keys[:count]
        return m.Matched(0, self.asked if count else 0, count, [VIEW] * count)

    def search(self, search: Search) -> Found:
        while True:
            found, release = search.take(self.answer(search.ask(1.0)))
            if release:
                del self.leases[release]
            if found is not None:
                assert set(self.leases) == ({found.lease} if found.chunks else set())
                return found


def needed(chunks: tuple[Chunk, ...], count: int, tokens: int, geometry: KvGeometry, tables: Tables) -> set[bytes]:
    """Everything the engine needs to go on behind ``count`` chunks, said as plainly as possible."""
    end = load_end(chunks[count - 1].end, tokens, tables)
    keys = set()
    for at, group in enumerate(geometry.groups):
        first = tables.needed_from(at, end)
        keys |= {group.key(chunk.key) for chunk in chunks[:count] if chunk.end > first}
    return keys


@given(
    tokens=st.integers(2, 90),
    windows=st.sampled_from([(0,), (12,), (0, 12), (0, 8, 20), (0, 0), (9, 30)]),
    missing=st.sets(st.tuples(st.integers(0, 11), st.integers(0, 2)), max_size=8),
)
def test_the_longest_end_is_found_in_three_questions_under_one_lease(
    tokens: int, windows: tuple[int, ...], missing: set[tuple[int, int]]
) -> None:
    geometry, tables = model(*windows)
    chunks = chunks_of(tokens)
    keys = {
        group.key(chunk.key)
        for number, chunk in enumerate(chunks)
        for at, group in enumerate(geometry.groups)
        if (number, at) not in missing
    }
    pool = Pool(keys)
    found = pool.search(Search(chunks, tokens, geometry, tables))
    whole = [n for n in range(1, len(chunks) + 1) if needed(chunks, n, tokens, geometry, tables) <= keys]
    assert found.chunks == max(whole, default=0)
    assert pool.asked <= 3
    if found.chunks:
        assert needed(chunks, found.chunks, tokens, geometry, tables) <= set(pool.leases[found.lease])


def test_a_hand_over_takes_one_question() -> None:
    geometry, tables = model(0, 12)
    chunks = chunks_of(40)
    pool = Pool(needed(chunks, len(chunks), 40, geometry, tables))
    assert pool.search(Search(chunks, 40, geometry, tables)).chunks == len(chunks)
    assert pool.asked == 1


def test_one_full_group_is_asked_for_its_chunks_and_a_part_will_do() -> None:
    geometry, tables = model(0)
    chunks = chunks_of(40)
    search = Search(chunks, 40, geometry, tables)
    question = search.ask(3.0, "ticket")
    assert question == m.Match(0, [chunk.key for chunk in chunks], 3.0, unsealed=True, ticket="ticket")
    answer = m.Matched(0, 7, 2, [VIEW] * 2, fresh=[1])
    assert search.take(answer) == (Found(2, 7, (1,), 2, 2 * VIEW.size), 0)


@pytest.mark.parametrize(
    ("view", "sums"),
    [
        (m.View(64, 512, 1, 1, 1), 2),
        (m.View(64, 512, 1, 1, 1), 3),
        (m.View(64, 256, 1, 1, 1), 2),
        (m.View(64, 512, 2, 1, 2), 2),
    ],
)
def test_where_chunks_are_is_known_if_the_answer_brings_their_checksums_and_they_are_what_they_are_called(
    view: m.View, sums: int
) -> None:
    geometry, tables = model(0)
    search = Search(chunks_of(40), 40, geometry, tables, sums=5)
    question = search.ask(1.0)
    assert isinstance(question, m.Match)
    assert question.sums == 5
    found, _ = search.take(m.Matched(0, 7, 2, [view] * 2, sums=bytes(8 * sums)))
    assert found is not None
    whole = (view.size, view.layers, sums) == (512, 1, 2)
    assert (found.offsets, found.sums) == ((2 * (64).to_bytes(8, "little"), bytes(16)) if whole else (b"", b""))


@pytest.mark.parametrize("windows", [(12,), (0, 12)])
def test_of_windows_no_places_are_asked_for(windows: tuple[int, ...]) -> None:
    geometry, tables = model(*windows)
    question = Search(chunks_of(40), 40, geometry, tables, sums=5).ask(1.0)
    assert isinstance(question, m.Match)
    assert question.sums == 0


def test_chunks_before_all_windows_came_from_where_the_first_that_is_needed_did() -> None:
    geometry, tables = model(12)
    search = Search(chunks_of(40), 40, geometry, tables)
    assert len(search.ask(1.0).keys) == 2
    found, _ = search.take(m.Matched(0, 7, 2, [VIEW] * 2, fresh=[0, 1]))
    assert found == Found(5, 7, (0, 1, 2, 3, 4))


def test_what_is_evicted_between_two_questions_is_a_miss_and_no_lease_is_left() -> None:
    geometry, tables = model(0, 12)
    chunks = chunks_of(40)
    pool = Pool({group.key(chunk.key) for chunk in chunks[:4] for group in geometry.groups})
    search = Search(chunks, 40, geometry, tables)
    for _ in range(2):
        found, lease = search.take(pool.answer(search.ask(1.0)))
        assert found is None
        pool.leases.pop(lease, None)
    pool.keys.clear()
    assert pool.search(search).chunks == 0
    assert pool.leases == {}


@pytest.mark.parametrize(("windows", "end"), [((0,), 40), ((0, 12), 39)])
def test_with_a_window_the_last_token_is_left_to_the_engine(windows: tuple[int, ...], end: int) -> None:
    """1. All of a prompt is there. 2. Told of all, vLLM gives no block for a token that is just behind the window.

    3. It computes the last token itself, and that reaches one further back than the window of the next.
    """
    _, tables = model(*windows)
    assert load_end(40, 40, tables) == end
    assert load_end(32, 40, tables) == 32
