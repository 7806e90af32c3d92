"""Loads of what is still being computed: followed chunk by chunk and layer by layer, and every way that can end."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from kvrelay.client.blocking import PoolClient
from kvrelay.connector.config import BOUNDS
from kvrelay.connector.core.orders import LoadKind, LoadOrder
from kvrelay.testing.pool import PoolThread
from kvrelay.types import Reason

np = pytest.importorskip("numpy")

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    Make = Callable[..., Any]

TOKENS = 200
P_BLOCKS, D_BLOCKS = [3, 9, 1, 4, 12, 7, 20], [10, 2, 11, 0, 5, 19, 8]
TICKET = "ho-1"


@pytest.fixture
def router(pool: PoolThread) -> Iterator[PoolClient]:
    """Who owns the ticket."""
    with PoolClient.connect(pool.unix, name="router", map_arena=False) as client:
        client.open_ticket(TICKET, 60.0)
        yield client


def early(order: LoadOrder) -> LoadOrder:
    return msgspec.structs.replace(order, kind=LoadKind.EARLY, ticket=TICKET)


def begun(pool: PoolThread, make_rank: Make, chunks: Any, **options: Any) -> Any:
    """A decode rank that follows the prompt and has found nothing yet."""
    d = make_rank(pool.unix, name="D", **options)
    d.step(loads=(early(d.load_order(chunks, D_BLOCKS)),))
    waiting(pool)
    return d


def waiting(pool: PoolThread) -> None:
    deadline = time.monotonic() + 10.0
    with PoolClient.connect(pool.unix, name="stat", map_arena=False) as client:
        while not client.stat()["waiting"]:
            assert time.monotonic() < deadline, "nobody waits"


def same(d: Any, p: Any, count: int) -> bool:
    pairs = zip(d.tokens(D_BLOCKS, count), p.tokens(P_BLOCKS, count), strict=True)
    return all(np.array_equal(ours, theirs) for ours, theirs in pairs)


def test_a_prompt_is_followed_step_by_step_while_it_is_computed(
    pool: PoolThread, router: PoolClient, make_rank: Make, make_chunks: Make
) -> None:
    """1. D claims and waits. 2. P computes two chunks a step. 3. D has each layer before the next is computed.

    So has it each step's tokens before the next step begins, and all of them with the last layer of the last step.
    """
    chunks = make_chunks(TOKENS)
    d, p = begun(pool, make_rank, chunks), make_rank(pool.unix)
    for part in (chunks[:2], chunks[2:4], chunks[4:]):
        assert d.side.take_results().finished_recving == set()
        p.announce(saves=(p.save_order(part, P_BLOCKS, ticket=TICKET),))
        for layer, right in enumerate(p.tokens(P_BLOCKS, part[-1].end)):
            p.side.layer_computed(layer)
            d.until_holds(layer, D_BLOCKS, right)
        p.side.end_step()
    results = d.loaded()
    outcome = results.report.loads["r"]
    assert (outcome.valid_end, outcome.reason) == (TOKENS, Reason.NONE)
    assert same(d, p, TOKENS)
    assert not router.follow(TICKET, b"no such key", 0.0).present


@pytest.mark.parametrize("timeout_s", [BOUNDS["load_timeout_s"][1], BOUNDS["early_load_timeout_s"][1]])
def test_a_load_works_with_the_longest_time_out_there_may_be(
    pool: PoolThread, router: PoolClient, make_rank: Make, make_chunks: Make, timeout_s: float
) -> None:
    chunks = make_chunks(TOKENS)
    d, p = begun(pool, make_rank, chunks, load_timeout_s=timeout_s), make_rank(pool.unix)
    for part in (chunks[:2], chunks[2:]):
        p.step(saves=(p.save_order(part, P_BLOCKS, ticket=TICKET),))
        p.saved(1)
    outcome = d.loaded().report.loads["r"]
    assert (outcome.valid_end, outcome.reason) == (TOKENS, Reason.NONE)
    assert not router.follow(TICKET, b"no such key", 0.0).present


def test_a_load_may_begin_behind_what_the_engine_has(
    pool: PoolThread, router: PoolClient, make_rank: Make, make_chunks: Make
) -> None:
    chunks = make_chunks(TOKENS)
    p, d = make_rank(pool.unix), make_rank(pool.unix, name="D")
    d.step(loads=(early(d.load_order(chunks, D_BLOCKS, start=64)),))
    p.step(saves=(p.save_order(chunks[:3], P_BLOCKS, ticket=TICKET),))
    p.step(saves=(p.save_order(chunks[3:], P_BLOCKS, ticket=TICKET),))
    assert d.loaded().report.loads["r"].valid_end == TOKENS
    for ours, theirs in zip(d.tokens(D_BLOCKS, TOKENS, 64), p.tokens(P_BLOCKS, TOKENS, 64), strict=True):
        assert np.array_equal(ours, theirs)
    assert router.stat()["leases"] == 0


@pytest.mark.parametrize("how", ["sealed", "ended", "router gone"])
def test_a_promise_that_is_withdrawn_ends_the_load_at_once(
    pool: PoolThread, router: PoolClient, make_rank: Make, make_chunks: Make, how: str
) -> None:
    """1. P computes part. 2. The router says that there will be no more, or is no more."""
    chunks = make_chunks(TOKENS)
    d, p = begun(pool, make_rank, chunks, load_timeout_s=600.0), make_rank(pool.unix)
    p.step(saves=(p.save_order(chunks[:2], P_BLOCKS, ticket=TICKET),))
    p.saved(1)
    if how == "sealed":
        router.seal_ticket(TICKET)
    elif how == "ended":
        router.end_ticket(TICKET)
    else:
        router.close()
    results = d.loaded()
    outcome = results.report.loads["r"]
    assert (outcome.valid_end, outcome.reason) == (96, Reason.PARTIAL)
    assert results.invalid_block_ids == set(D_BLOCKS[3:])
    assert same(d, p, 96)


def test_a_promise_of_which_nothing_came_is_a_miss(
    pool: PoolThread, router: PoolClient, make_rank: Make, make_chunks: Make
) -> None:
    d = begun(pool, make_rank, make_chunks(TOKENS), load_timeout_s=600.0)
    router.seal_ticket(TICKET)
    outcome = d.loaded().report.loads["r"]
    assert (outcome.valid_end, outcome.reason) == (0, Reason.MISS)


def test_when_the_writer_dies_another_is_followed(
    pool: PoolThread, router: PoolClient, make_rank: Make, make_chunks: Make
) -> None:
    """1. P saves two chunks and a layer of two more. 2. It dies. 3. The router asks another P, who saves them all."""
    chunks = make_chunks(TOKENS)
    d, p = begun(pool, make_rank, chunks), make_rank(pool.unix)
    p.step(saves=(p.save_order(chunks[:2], P_BLOCKS, ticket=TICKET),))
    p.saved(1)
    p.announce(saves=(p.save_order(chunks[2:4], P_BLOCKS, ticket=TICKET),))
    p.side.layer_computed(0)
    pages = [layer.copy() for layer in p.pages]
    p.close()
    other = make_rank(pool.unix, name="Q")
    for mine, theirs in zip(other.pages, pages, strict=True):
        mine[:] = theirs
    other.step(saves=(other.save_order(chunks, P_BLOCKS, ticket=TICKET),))
    outcome = d.loaded().report.loads["r"]
    assert (outcome.valid_end, outcome.reason) == (TOKENS, Reason.NONE)
    assert same(d, other, TOKENS)
    assert router.stat()["leases"] == 0


def test_when_the_writer_dies_and_nobody_takes_over_what_is_sealed_stays(
    pool: PoolThread, router: PoolClient, make_rank: Make, make_chunks: Make
) -> None:
    chunks = make_chunks(TOKENS)
    d, p = begun(pool, make_rank, chunks), make_rank(pool.unix)
    p.step(saves=(p.save_order(chunks[:2], P_BLOCKS, ticket=TICKET),))
    p.saved(1)
    p.announce(saves=(p.save_order(chunks[2:4], P_BLOCKS, ticket=TICKET),))
    p.close()
    router.seal_ticket(TICKET)
    outcome = d.loaded().report.loads["r"]
    assert (outcome.valid_end, outcome.reason) in ((96, Reason.WRITER_LOST), (96, Reason.PARTIAL))


def test_a_prefill_that_takes_too_long_costs_the_deadline_and_no_more(
    pool: PoolThread, router: PoolClient, make_rank: Make, make_chunks: Make
) -> None:
    chunks = make_chunks(TOKENS)
    p = make_rank(pool.unix)
    p.step(saves=(p.save_order(chunks[:2], P_BLOCKS, ticket=TICKET),))
    p.saved(1)
    d = make_rank(pool.unix, name="D", load_timeout_s=2.0)
    d.step(loads=(early(d.load_order(chunks, D_BLOCKS)),))
    outcome = d.loaded().report.loads["r"]
    assert (outcome.valid_end, outcome.reason) == (96, Reason.TIMEOUT)
    assert router.stat()["leases"] == 0


def test_a_damaged_object_ends_it_with_what_is_whole(
    pool: PoolThread, router: PoolClient, make_rank: Make, make_chunks: Make
) -> None:
    chunks = make_chunks(TOKENS)
    p = make_rank(pool.unix)
    p.step(saves=(p.save_order(chunks, P_BLOCKS, ticket=TICKET),))
    p.saved(1)
    with PoolClient.connect(pool.unix, name="vandal") as vandal:
        found = vandal.match_prefix([chunk.key for chunk in chunks], lease_s=5.0)
        assert vandal.arena is not None
        vandal.arena[found.views[2].offset + found.views[2].size - 1] ^= 1
    d = make_rank(pool.unix, name="D")
    d.step(loads=(early(d.load_order(chunks, D_BLOCKS)),))
    outcome = d.loaded().report.loads["r"]
    assert (outcome.valid_end, outcome.reason) == (96, Reason.CORRUPT)
    assert same(d, p, 96)
    assert router.stat()["leases"] == 0


def test_an_aborted_request_ends_it(pool: PoolThread, router: PoolClient, make_rank: Make, make_chunks: Make) -> None:
    d = begun(pool, make_rank, make_chunks(TOKENS), load_timeout_s=600.0)
    d.step(cancelled=("r",))
    assert d.loaded().finished_recving == {"r"}
    assert router.stat()["waiting"] == 0


def test_when_the_pool_dies_the_load_ends_with_what_was_certain(
    tmp_path: Path, make_rank: Make, make_chunks: Make
) -> None:
    chunks = make_chunks(TOKENS)
    pool = PoolThread(tmp_path).__enter__()
    with PoolClient.connect(pool.unix, name="router", map_arena=False) as client:
        client.open_ticket(TICKET, 60.0)
        p, d = make_rank(pool.unix), make_rank(pool.unix, name="D", load_timeout_s=600.0)
        p.step(saves=(p.save_order(chunks[:2], P_BLOCKS, ticket=TICKET),))
        p.saved(1)
        d.step(loads=(early(d.load_order(chunks, D_BLOCKS)),))
        waiting(pool)
        pool.__exit__()
        outcome = d.loaded().report.loads["r"]
    assert (outcome.valid_end, outcome.reason) == (96, Reason.POOL_DOWN)
    assert same(d, p, 96)
