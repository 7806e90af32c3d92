"""The index of what engines hold, told by events as vLLM encodes them."""

from __future__ import annotations

import random

import msgspec
import pytest

from kvrelay.errors import ProtocolError
from kvrelay.router.core.kv.events import AllBlocksCleared, BlockRemoved, BlockStored, CacheEvent, decode_batch
from kvrelay.router.core.kv.index import MAX_BLOCK_SIZES, KvIndex, Source

P0, P1 = Source("P0"), Source("P1")
PROMPT = list(range(100, 112))
"""Three blocks of four tokens."""


def index(*sources: Source, max_blocks: int = 1_000) -> KvIndex:
    made = KvIndex(seed=7, max_blocks=max_blocks)
    for source in sources or (P0, P1):
        made.join(source)
    return made


def stored(
    tokens: list[int], names: list[int | bytes], parent: int | bytes | None = None, **more: object
) -> BlockStored:
    fields = {"block_hashes": names, "parent_block_hash": parent, "token_ids": tokens, "block_size": 4, "group_idx": 0}
    return msgspec.convert({"type": "BlockStored", "medium": "GPU", **fields, **more}, BlockStored)


def removed(*names: int | bytes, medium: str = "GPU") -> BlockRemoved:
    return BlockRemoved(block_hashes=list(names), medium=medium, group_idx=0)


def encoded(*events: dict[str, object] | list[object], rank: int | None = None) -> bytes:
    """A batch as vLLM writes it: an array; events are maps, or arrays in older versions."""
    return msgspec.msgpack.encode([1.5, list(events), rank])


def test_a_batch_is_read_as_maps_and_as_arrays() -> None:
    expected: list[CacheEvent] = [
        BlockStored([b"a", b"b"], None, [1, 2, 3, 4], 2, medium="GPU"),
        BlockRemoved([b"a"], "GPU"),
        AllBlocksCleared(),
    ]
    maps = decode_batch(
        encoded(
            {"type": "BlockStored", "block_hashes": [b"a", b"b"], "parent_block_hash": None, "token_ids": [1, 2, 3, 4],
             "block_size": 2, "lora_id": None, "medium": "GPU", "lora_name": None, "session_id": "new in 0.32"},
            {"type": "BlockRemoved", "block_hashes": [b"a"], "medium": "GPU"},
            {"type": "AllBlocksCleared"},
            rank=3,
        )
    )  # fmt: skip
    arrays = decode_batch(
        encoded(
            ["BlockStored", [b"a", b"b"], None, [1, 2, 3, 4], 2, None, "GPU", None],
            ["BlockRemoved", [b"a"], "GPU"],
            ["AllBlocksCleared"],
        )
    )
    assert maps.events == expected
    for read, meant in zip(arrays.events, expected, strict=True):
        assert isinstance(read, type(meant))
        assert msgspec.structs.asdict(read) == msgspec.structs.asdict(meant)
    assert (maps.ts, maps.rank, arrays.rank) == (1.5, 3, None)


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x93\x01\x02", encoded({"type": "BlockMoved"})])
def test_what_is_no_batch_is_refused(payload: bytes) -> None:
    with pytest.raises(ProtocolError, match="not a batch of KV cache events"):
        decode_batch(payload)


def test_the_longest_prefix_counts_but_for_the_last_token() -> None:
    known = index()
    known.apply(P0, [stored(PROMPT, [1, 2, 3])])
    known.apply(P1, [stored(PROMPT[:4], [b"x" * 32])])
    assert known.cached([*PROMPT, 5]) == {"P0": 12, "P1": 4}
    assert known.cached(PROMPT) == {"P0": 8, "P1": 4}
    assert known.cached([*PROMPT[:4], 0, 0, 0, 0, 0]) == {"P0": 4, "P1": 4}
    assert known.cached([0, *PROMPT]) == {}


def test_blocks_follow_on_their_parent() -> None:
    known = index()
    known.apply(P0, [stored(PROMPT[:4], [1])])
    known.apply(P0, [stored(PROMPT[4:], [2, 3], parent=1)])
    known.apply(P1, [stored(PROMPT[4:], [2, 3], parent=1)])
    assert known.cached([*PROMPT, 5]) == {"P0": 12}
    assert known.count(P1).skipped == {"no_parent": 2}


def test_a_hole_ends_a_prefix_until_it_is_filled() -> None:
    known = index()
    known.apply(P0, [stored(PROMPT, [1, 2, 3]), removed(2)])
    assert known.cached([*PROMPT, 5]) == {"P0": 4}
    known.apply(P0, [stored(PROMPT[4:8], [2], parent=1)])
    assert known.cached([*PROMPT, 5]) == {"P0": 12}


def test_a_block_counts_while_one_medium_has_it() -> None:
    known = index()
    known.apply(P0, [stored(PROMPT[:4], [1]), stored([], [1], block_size=0, medium="CPU"), removed(1)])
    assert known.cached(PROMPT) == {"P0": 4}
    known.apply(P0, [removed(1, medium="CPU")])
    assert known.cached(PROMPT) == {}
    assert known.num_nodes == 0


def test_a_cleared_cache_holds_nothing() -> None:
    known = index()
    known.apply(P0, [stored(PROMPT, [1, 2, 3]), AllBlocksCleared()])
    assert known.cached([*PROMPT, 5]) == {}
    assert known.count(P0).cleared == 1


def test_adapters_and_salts_are_prompts_of_their_own() -> None:
    known = index()
    known.apply(P0, [stored(PROMPT[:8], [1, 2], lora_name="sql", lora_id=1, extra_keys=[["sql", "tenant"], ["sql"]])])
    known.apply(P1, [stored(PROMPT[:4], [3], extra_keys=[["tenant"]])])
    assert known.cached(PROMPT) == {}
    assert known.cached(PROMPT, model="base") == {}
    assert known.cached(PROMPT, model="sql", salt="tenant") == {"P0": 8}
    assert known.cached(PROMPT, model="base", salt="tenant") == {"P1": 4}


def test_an_adapter_of_the_salts_name_is_not_mistaken_for_it() -> None:
    known = index()
    known.apply(P0, [stored(PROMPT[:4], [1], lora_name="same", lora_id=1, extra_keys=[["same", "same"]])])
    assert known.cached(PROMPT, model="same") == {}
    assert known.cached(PROMPT, model="same", salt="same") == {"P0": 4}


def test_blocks_with_images_and_what_follows_on_them_are_not_indexed() -> None:
    known = index()
    known.apply(P0, [stored(PROMPT, [1, 2, 3], extra_keys=[None, [["image", 0]], None])])
    assert known.cached([*PROMPT, 5]) == {"P0": 4}
    assert known.count(P0).skipped == {"media": 2}


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"locality": "REMOTE"}, "remote"),
        ({"kv_cache_spec_kind": "sliding_window"}, "other_group"),
        ({"block_size": 5}, "malformed"),
        ({"block_size": 0}, "malformed"),
        ({"token_ids": [0, 0, 0, 1 << 32]}, "malformed"),
        ({"token_ids": []}, "no_tokens"),
    ],
)
def test_what_is_not_indexed_is_counted(more: dict[str, object], why: str) -> None:
    known = index()
    known.apply(P0, [stored(**{"tokens": PROMPT[:4], "names": [1], **more})])  # type: ignore[arg-type]
    assert known.count(P0).skipped == {why: 1}
    assert known.cached(PROMPT) == {}
    assert known.num_nodes == 0
    known.check_integrity()


def test_of_several_groups_the_first_with_full_attention_speaks() -> None:
    known = index()
    known.apply(P0, [stored(PROMPT[:4], [1], group_idx=0, kv_cache_spec_kind="sliding_window")])
    known.apply(P0, [stored(PROMPT[:8], [1, 2], group_idx=1, kv_cache_spec_kind="full_attention")])
    known.apply(P0, [BlockRemoved(block_hashes=[1], medium="GPU", group_idx=0)])
    assert known.cached(PROMPT) == {"P0": 8}
    known.apply(P0, [BlockRemoved(block_hashes=[1], medium="GPU", group_idx=1)])
    assert known.cached(PROMPT) == {}


def test_an_engine_of_several_ranks_is_expected_to_hold_their_mean() -> None:
    known = index(Source("D0", 0), Source("D0", 1))
    known.apply(Source("D0", 0), [stored(PROMPT, [1, 2, 3])])
    assert known.cached([*PROMPT, 5]) == {"D0": 6}
    known.apply(Source("D0", 1), [stored(PROMPT[:4], [1])])
    assert known.cached([*PROMPT, 5]) == {"D0": 8}


def test_what_is_new_is_left_out_of_a_full_index() -> None:
    known = index(max_blocks=2)
    known.apply(P0, [stored(PROMPT, [1, 2, 3])])
    assert known.cached([*PROMPT, 5]) == {"P0": 8}
    assert known.count(P0).skipped == {"index_full": 1}
    known.apply(P1, [stored(PROMPT[:4], [1])])
    assert known.count(P1).skipped == {"index_full": 1}
    known.check_integrity()
    known.forget(P0)
    known.apply(P1, [stored(PROMPT[:4], [1])])
    assert known.cached(PROMPT) == {"P1": 4}


def test_there_is_no_room_for_ever_more_block_sizes() -> None:
    known = index()
    for size in range(1, MAX_BLOCK_SIZES + 2):
        known.apply(P0, [stored(list(range(size)), [size], block_size=size)])
    assert known.count(P0).skipped == {"index_full": 1}


def test_a_name_may_come_to_mean_another_block() -> None:
    known = index()
    known.apply(P0, [stored(PROMPT[:4], [1]), stored([9, 9, 9, 9], [1])])
    assert known.cached(PROMPT) == {}
    assert known.cached([9, 9, 9, 9, 9]) == {"P0": 4}
    known.check_integrity()


def test_two_names_of_one_block_leave_no_dead_end() -> None:
    known = index()
    known.apply(P0, [stored(PROMPT[:4], [1]), stored(PROMPT[:4], [2]), removed(1)])
    known.apply(P0, [stored(PROMPT[4:8], [3], parent=2)])
    assert known.count(P0).skipped == {"no_parent": 1}
    known.apply(P0, [stored(PROMPT[:8], [1, 3])])
    assert known.cached(PROMPT) == {"P0": 8}
    known.check_integrity()


def test_what_is_asked_twice_is_answered_anew_after_a_change() -> None:
    known = index()
    assert known.cached(PROMPT) == {}
    known.apply(P0, [stored(PROMPT, [1, 2, 3])])
    assert known.cached(PROMPT) == {"P0": 8}
    known.leave(P0)
    assert known.cached(PROMPT) == {}
    assert known.sources == (P1,)


def test_in_long_prompts_every_engines_reach_is_found() -> None:
    rng = random.Random(5)
    sources = [Source(f"D{number}") for number in range(40)]
    prompt = [rng.randrange(1_000) for _ in range(4 * 400 + 1)]
    for shape in ("any", "few", "holes"):
        known = index(*sources, max_blocks=100_000)
        expected = {}
        for source in sources:
            count = rng.choice([0, 1, 17, 400]) if shape == "few" else rng.randrange(401)
            known.apply(source, [stored(prompt[: 4 * count], list(range(count)))])
            if shape == "holes" and count:
                hole = rng.randrange(count)
                known.apply(source, [removed(hole)])
                count = hole
            if count:
                expected[source.engine] = 4 * count
        assert known.cached(prompt) == expected
        known.check_integrity()
