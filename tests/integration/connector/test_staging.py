"""KV staged in host memory before there are blocks for it, through a real pool, and what can go wrong meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest

np = pytest.importorskip("numpy")

from msgspec.structs import replace  # noqa: E402 - after the skip

from kvrelay.client.blocking import PoolClient  # noqa: E402
from kvrelay.testing.pool import PoolProcess  # noqa: E402
from kvrelay.types import Reason  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

    from kvrelay.testing.pool import PoolThread

Make: TypeAlias = Callable[..., Any]

P_BLOCKS = [7, 3, 4, 5, 20, 1, 0, 9, 11, 12]
D_BLOCKS = [2, 13, 6, 21, 22, 23, 1, 8, 17, 18]
TOKENS = 200


def stage_of(order: Any, number: int = 1) -> Any:
    """The same, before there are blocks."""
    return replace(order, tables=(), staged=number)


def same(one: list[Any], other: list[Any]) -> bool:
    return all(np.array_equal(mine, yours) for mine, yours in zip(one, other, strict=True))


def staged(rank: Any, number: int, layers: int) -> None:
    """Wait until this many layers of the order are in the rank's memory."""
    deadline = time.monotonic() + 10.0
    while (held := rank.staging._held.get(number)) is None or len(held.layers) < layers:
        assert time.monotonic() < deadline, f"{layers} layers are computed, and not staged"
        time.sleep(0.001)


@pytest.mark.parametrize(("staged_from", "loaded_from"), [(0, 0), (32, 32), (0, 96)])
def test_what_is_staged_is_loaded_without_the_pool(
    tmp_path: Path, make_rank: Make, make_chunks: Make, staged_from: int, loaded_from: int
) -> None:
    """1. D stages what P saved. 2. The pool is killed. 3. D gets blocks, and loads: all of it is right."""
    pool = PoolProcess(tmp_path)
    chunks = make_chunks(TOKENS)
    p, d = make_rank(pool.tcp), make_rank(pool.unix, name="D")
    p.step(saves=(p.save_order(chunks, P_BLOCKS),))
    d.step(stages=(stage_of(d.load_order(chunks, D_BLOCKS, staged_from)),))
    assert d.staged().valid_end == TOKENS
    used = d.staging.used
    assert used > 0
    pool.kill()
    before = [pages.copy() for pages in d.pages]
    d.step(loads=(replace(d.load_order(chunks, D_BLOCKS, loaded_from), staged=1),))
    results = d.loaded()
    assert (results.invalid_block_ids, results.report.loads["r"].reason) == (set(), Reason.NONE)
    assert same(d.tokens(D_BLOCKS, TOKENS, loaded_from), p.tokens(P_BLOCKS, TOKENS, loaded_from))
    untouched = [at for at in range(24) if at not in D_BLOCKS[:7]]
    assert all(np.array_equal(old[untouched], new[untouched]) for old, new in zip(before, d.pages, strict=True))
    assert d.staging.used == 0
    assert pool.process.stdout is not None
    pool.process.stdout.close()


def test_each_layer_is_staged_while_the_writer_computes_the_next(
    pool: PoolThread, make_rank: Make, make_chunks: Make
) -> None:
    chunks = make_chunks(TOKENS)
    p, d = make_rank(pool.unix), make_rank(pool.tcp, name="D")
    p.announce(saves=(p.save_order(chunks, P_BLOCKS),))
    d.step(stages=(stage_of(d.load_order(chunks, D_BLOCKS)),))
    for layer in range(len(p.layers)):
        p.side.layer_computed(layer)
        staged(d, 1, layer + 1)
    p.side.end_step()
    assert (d.staged().reason, d.staging.used) == (Reason.NONE, TOKENS * 4 * 4 * 2 * 32 * 4)


def test_a_damaged_chunk_is_found_before_anything_is_claimed(
    pool: PoolThread, make_rank: Make, make_chunks: Make
) -> None:
    chunks = make_chunks(TOKENS)
    p, d = make_rank(pool.unix), make_rank(pool.unix, name="D")
    p.step(saves=(p.save_order(chunks, P_BLOCKS),))
    p.saved(1)
    with PoolClient.connect(pool.unix, name="vandal") as vandal:
        prefix = vandal.match_prefix([chunks[2].key], lease_s=10.0)
        assert vandal.arena is not None
        vandal.arena[prefix.views[0].offset] ^= 1
        vandal.release(prefix)
    d.step(stages=(stage_of(d.load_order(chunks, D_BLOCKS)),))
    assert d.staged().reason is Reason.CORRUPT
    assert d.staging.used == 0


def test_memory_is_bounded_and_what_has_gone_makes_room(pool: PoolThread, make_rank: Make, make_chunks: Make) -> None:
    chunks = make_chunks(TOKENS)
    p = make_rank(pool.unix)
    p.step(saves=(p.save_order(chunks, P_BLOCKS),))
    p.saved(1)
    d = make_rank(pool.unix, name="D", staging_bytes=TOKENS * 4 * 4 * 2 * 32 * 4)
    d.step(stages=(stage_of(d.load_order(chunks, D_BLOCKS), 1),))
    assert d.staged(1).reason is Reason.NONE
    d.step(stages=(stage_of(d.load_order(chunks, D_BLOCKS), 2),))
    assert d.staged(2).reason is Reason.STAGING_FULL
    d.step(unstaged=(1,), stages=(stage_of(d.load_order(chunks, D_BLOCKS), 3),))
    assert d.staged(3).reason is Reason.NONE


def test_an_order_that_is_taken_back_in_the_step_that_brings_it_holds_nothing(
    pool: PoolThread, make_rank: Make, make_chunks: Make
) -> None:
    chunks = make_chunks(TOKENS)
    p, d = make_rank(pool.unix), make_rank(pool.unix, name="D")
    p.step(saves=(p.save_order(chunks, P_BLOCKS),))
    p.saved(1)
    d.step(stages=(stage_of(d.load_order(chunks, D_BLOCKS)),), unstaged=(1,))
    with d.side._changed:
        assert d.side._changed.wait_for(lambda: not d.side._ledger._stages, 10.0)
    assert (d.side.take_results().report.stages, d.staging.used) == ({}, 0)


def test_staging_nobody_waits_for_any_more_ends_early_and_holds_nothing(
    pool: PoolThread, make_rank: Make, make_chunks: Make
) -> None:
    """1. D stages what P is still writing. 2. The request is aborted. 3. D does not wait for P, nor report."""
    chunks = make_chunks(TOKENS)
    p, d = make_rank(pool.unix), make_rank(pool.unix, name="D")
    p.announce(saves=(p.save_order(chunks, P_BLOCKS),))
    d.step(stages=(stage_of(d.load_order(chunks, D_BLOCKS)),))
    d.step(unstaged=(1,))
    with d.side._changed:
        assert d.side._changed.wait_for(lambda: not d.side._ledger._stages, 10.0)
    assert d.side.take_results().report.stages == {}
    assert d.staging.used == 0
