from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.identity.core.chunks import Chunk, ChunkChain, Extra, chain_seed, prompt_chunks

SEED = chain_seed("n" * 64)
tokens = st.lists(st.integers(0, (1 << 32) - 1), max_size=40)


def keys(token_ids: list[int], *, seed: bytes = SEED, size: int = 8, extras: tuple[Extra, ...] = ()) -> list[bytes]:
    return [chunk.key for chunk in prompt_chunks(seed, token_ids, size, extras)]


@given(tokens, st.integers(1, 9))
def test_chunks_cover_a_prompt_without_gap_or_overlap(token_ids: list[int], size: int) -> None:
    chunks = prompt_chunks(SEED, token_ids, size)
    assert [at for chunk in chunks for at in range(chunk.start, chunk.end)] == list(range(len(token_ids)))
    assert all(chunk.tokens == size for chunk in chunks[:-1])


@given(tokens, tokens, st.integers(1, 9))
def test_two_prompts_share_exactly_the_keys_of_their_common_chunks(one: list[int], other: list[int], size: int) -> None:
    ours, theirs = prompt_chunks(SEED, one, size), prompt_chunks(SEED, other, size)
    for mine, yours in zip(ours, theirs, strict=False):
        same = mine.end == yours.end and one[: mine.end] == other[: yours.end]
        assert (mine.key == yours.key) == same


@given(st.lists(tokens, max_size=5))
def test_a_chain_that_grows_ends_with_the_keys_of_the_whole(pieces: list[list[int]]) -> None:
    chain = ChunkChain(SEED, 8)
    for piece in pieces:
        chain.extend(piece)
    assert tuple(chain.all()) == prompt_chunks(SEED, [token for piece in pieces for token in piece], 8)


def test_a_short_last_chunk_has_a_key_of_its_own() -> None:
    assert keys([1, 2, 3]) != keys([1, 2, 3, 0])
    assert keys([1, 2, 3, 4, 5, 6, 7, 8])[0] == keys([1, 2, 3, 4, 5, 6, 7, 8, 9])[0]


def test_a_change_in_one_token_changes_every_later_key() -> None:
    one, other = keys(list(range(40))), keys([*range(9), 99, *range(10, 40)])
    assert [mine == yours for mine, yours in zip(one, other, strict=True)] == [True, False, False, False, False]


@pytest.mark.parametrize(
    "seed",
    [
        chain_seed("m" * 64),
        chain_seed("n" * 64, lora="adapter"),
        chain_seed("n" * 64, salt="tenant"),
        chain_seed("n" * 64, salt=""),
        chain_seed("n" * 64, lora="tenant"),
    ],
)
def test_namespace_adapter_and_salt_part_the_keys(seed: bytes) -> None:
    assert not set(keys(list(range(20)))) & set(keys(list(range(20)), seed=seed))


def test_chunk_size_parts_nothing_by_itself_but_covers_other_tokens() -> None:
    assert keys(list(range(16)), size=8)[0] == keys(list(range(8)), size=16)[0]


def test_an_image_changes_the_keys_of_its_chunk_and_all_later_ones() -> None:
    plain = keys(list(range(32)))
    image = keys(list(range(32)), extras=(Extra(10, 14, b"image"),))
    assert [mine == yours for mine, yours in zip(plain, image, strict=True)] == [True, False, False, False]
    moved = keys(list(range(32)), extras=(Extra(11, 15, b"image"),))
    other = keys(list(range(32)), extras=(Extra(10, 14, b"another"),))
    assert len({image[1], moved[1], other[1]}) == 3


def test_an_image_over_two_chunks_counts_in_both() -> None:
    at_the_edge = keys(list(range(24)), extras=(Extra(6, 10, b"image"),))
    plain = keys(list(range(24)))
    assert at_the_edge[0] != plain[0]
    assert at_the_edge[1] != plain[1]


def test_keys_are_the_same_in_every_process() -> None:
    assert keys([1, 2, 3])[0].hex() == "18c54ecb251f54cbdefc1cc4db256ebd0194e7980c05f6f1b27b1be00c608299"


def test_a_token_id_that_is_no_u32_is_refused() -> None:
    with pytest.raises(ValueError, match="token id -1 is outside"):
        keys([1, -1])
    with pytest.raises(ValueError, match="chunk_tokens"):
        prompt_chunks(SEED, [1], 0)


def test_an_empty_prompt_has_no_chunks() -> None:
    assert prompt_chunks(SEED, [], 8) == ()
    assert ChunkChain(SEED, 8).tail() is None


def test_a_chunk_knows_how_many_tokens_it_holds() -> None:
    assert Chunk(b"k", 64, 100).tokens == 36


def test_a_chunk_sent_to_a_worker_is_the_same_chunk() -> None:
    chunk = Chunk(b"k" * 32, 64, 128)
    assert pickle.loads(pickle.dumps(chunk)) == chunk
