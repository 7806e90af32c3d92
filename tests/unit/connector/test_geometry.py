from __future__ import annotations

import pytest

from kvrelay.connector.core.backoff import Backoff
from kvrelay.connector.core.geometry import KvGeometry, rank_share
from kvrelay.errors import ConfigError
from kvrelay.identity.core.chunks import prompt_chunks

(GROUP,) = KvGeometry.dense(layers=30, kv_heads=3, head_size=64, item_bytes=4).groups


def test_an_object_is_all_heads_of_all_layers() -> None:
    assert GROUP.segment_bytes(64) == 2 * 64 * 64 * 4
    assert GROUP.object_bytes(64) == 30 * 3 * 2 * 64 * 64 * 4
    spec = GROUP.spec(b"key", 5)
    assert (spec.layers, spec.segments) == (30, 3)
    assert spec.size == 30 * 3 * GROUP.segment_bytes(5)


def test_chunks_are_announced_as_each_would_be_by_itself() -> None:
    chunks = prompt_chunks(b"seed", range(200), 64)
    assert GROUP.specs(chunks) == [(chunk, GROUP.spec(chunk.key, chunk.tokens)) for chunk in chunks]


@pytest.mark.parametrize("tp_size", [1, 2, 4, 8])
@pytest.mark.parametrize("pp_size", [1, 2, 3])
def test_the_ranks_that_write_cover_every_segment_once(tp_size: int, pp_size: int) -> None:
    (group,) = KvGeometry.dense(layers=6, kv_heads=4, head_size=32, item_bytes=2).groups
    written: list[int] = []
    for stage in range(pp_size):
        count = 6 // pp_size
        for tp_rank in range(tp_size):
            share = rank_share(group, tp_rank=tp_rank, tp_size=tp_size, first_layer=stage * count, layers=count)
            for layer in range(share.first_layer, share.first_layer + share.layers):
                first = share.first_segment(layer, group)
                if share.writes:
                    written += range(first, first + share.heads)
    assert sorted(written) == list(range(6 * 4))


def test_ranks_that_share_a_head_read_the_same_segment() -> None:
    (group,) = KvGeometry.dense(layers=1, kv_heads=2, head_size=32, item_bytes=2).groups
    shares = [rank_share(group, tp_rank=rank, tp_size=4, first_layer=0, layers=1) for rank in range(4)]
    assert [share.first_head for share in shares] == [0, 0, 1, 1]
    assert [share.writes for share in shares] == [True, False, True, False]


def test_heads_that_do_not_divide_are_refused_with_a_mend() -> None:
    with pytest.raises(ConfigError, match="3 KV heads cannot be split over tensor_parallel_size 2: choose"):
        rank_share(GROUP, tp_rank=0, tp_size=2, first_layer=0, layers=30)


def test_delays_double_up_to_a_limit_and_start_over_after_a_success() -> None:
    backoff = Backoff(first_s=0.1, most_s=0.5)
    assert [backoff.failed() for _ in range(5)] == [0.1, 0.2, 0.4, 0.5, 0.5]
    backoff.worked()
    assert backoff.failed() == 0.1
