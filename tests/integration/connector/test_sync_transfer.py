"""Synchronous loads: done when the step's forward pass begins, or given up."""

from __future__ import annotations

import random
import threading
from array import array
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from kvrelay.client.blocking import PoolClient
from kvrelay.connector.attempt import LoadJob
from kvrelay.connector.core.orders import LoadKind, LoadOrder, Placed
from kvrelay.testing.paged_engine import PagedEngine
from kvrelay.types import Reason

np = pytest.importorskip("numpy")

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvrelay.testing.pool import PoolThread

    Make = Callable[..., Any]

WAIT_S = 30.0
TOKENS = 200
P_BLOCKS, D_BLOCKS = [3, 9, 1, 4, 12, 7, 20], [10, 2, 11, 0, 5, 19, 8]


def now(order: LoadOrder, end: int) -> LoadOrder:
    """The same, synchronous, and up to ``end``."""
    chunks = tuple(chunk for chunk in order.chunks if chunk.start < end)
    return msgspec.structs.replace(order, kind=LoadKind.NOW, chunks=chunks, end=end)


def prefilled(pool: PoolThread, make_rank: Make, chunks: Sequence[Any]) -> tuple[Any, Any]:
    p, d = make_rank(pool.unix), make_rank(pool.unix, name="D")
    p.step(saves=(p.save_order(chunks, P_BLOCKS),))
    p.saved(1)
    return p, d


@pytest.mark.parametrize("end", [199, 192, 191, 100])
def test_it_is_there_when_the_forward_pass_begins_and_no_other_slot_was_touched(
    pool: PoolThread, make_rank: Make, make_chunks: Make, end: int
) -> None:
    p, d = prefilled(pool, make_rank, make_chunks(TOKENS))
    before = [pages.copy() for pages in d.pages]
    d.begin(loads=(now(d.load_order(make_chunks(TOKENS), D_BLOCKS, start=32), end),))
    for ours, theirs in zip(d.tokens(D_BLOCKS, end, 32), p.tokens(P_BLOCKS, end, 32), strict=True):
        assert np.array_equal(ours, theirs)
    for pages, old in zip(d.pages, before, strict=True):
        assert (pages != old).sum() <= (end - 32) * 4 * 2 * 32
    results = d.side.take_results()
    assert (results.finished_recving, results.invalid_block_ids) == (set(), set())
    assert results.report.loads["r"].valid_end == end


def test_a_step_does_not_wait_for_the_pool_to_hear_that_a_load_is_done(
    pool: PoolThread, make_rank: Make, make_chunks: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, d = prefilled(pool, make_rank, make_chunks(TOKENS))

    def waits(*_: Any) -> None:
        raise AssertionError("the load waited for its lease to end")

    monkeypatch.setattr(PoolClient, "release", waits)
    d.begin(loads=(now(d.load_order(make_chunks(TOKENS), D_BLOCKS), TOKENS - 1),))
    assert d.side.take_results().report.loads["r"].valid_end == TOKENS - 1
    with PoolClient.connect(pool.unix, name="asks") as client:  # its requests come after the release
        assert client.stat()["leases"] == 0


def placed(pool: PoolThread, order: LoadOrder, *, at: int = 0, name: str = "") -> LoadOrder:
    """The same, with the places of its chunks. ``at``: bytes they are said to be off; ``name``: another pool's."""
    with PoolClient.connect(pool.unix, name="scheduler") as client:
        found = client.match_prefix([chunk.key for chunk in order.chunks], lease_s=5.0, sums=1 << 10)
        sums = b"".join(known.tobytes() for known in found._sums)
        offsets = array("Q", (view.offset + at for view in found.views)).tobytes()
        return msgspec.structs.replace(order, placed=Placed(name or client.welcome.pool, offsets, sums))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What loads have asked the pool for."""
    names: list[str] = []

    def noted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def calls(*given: Any, **more: Any) -> Any:
            names.append(name)
            return call(*given, **more)

        return calls

    for name in ("match_prefix", "wait", "release"):
        monkeypatch.setattr(PoolClient, name, noted(name, getattr(PoolClient, name)))
    return names


@pytest.mark.parametrize("kind", [LoadKind.NOW, LoadKind.LATER])
@pytest.mark.parametrize(("start", "end"), [(0, 199), (48, 192), (64, 100)])
def test_of_what_is_placed_the_pool_is_asked_nothing(
    pool: PoolThread, make_rank: Make, make_chunks: Make, asked: list[str], kind: LoadKind, start: int, end: int
) -> None:
    p, d = prefilled(pool, make_rank, make_chunks(TOKENS))
    before = [pages.copy() for pages in d.pages]
    order = placed(pool, now(d.load_order(make_chunks(TOKENS), D_BLOCKS, start=start), end))
    asked.clear()
    d.begin(loads=(msgspec.structs.replace(order, kind=kind),))
    outcome = d.results(lambda results: "r" in results.report.loads).report.loads["r"]
    assert (outcome.valid_end, outcome.reason, asked) == (end, Reason.NONE, [])
    for ours, theirs in zip(d.tokens(D_BLOCKS, end, start), p.tokens(P_BLOCKS, end, start), strict=True):
        assert np.array_equal(ours, theirs)
    for pages, old in zip(d.pages, before, strict=True):
        assert (pages != old).sum() <= (end - start) * 4 * 2 * 32


@pytest.mark.parametrize("kind", [LoadKind.NOW, LoadKind.LATER])
@pytest.mark.parametrize("wrong", [{"at": 64}, {"at": 1 << 40}, {"name": "another pool"}])
def test_what_is_not_where_it_was_found_is_asked_for(
    pool: PoolThread, make_rank: Make, make_chunks: Make, asked: list[str], kind: LoadKind, wrong: dict[str, Any]
) -> None:
    """1. The scheduler's side finds it. 2. Its lease ends, and the place is another's; or the pool is a new one."""
    p, d = prefilled(pool, make_rank, make_chunks(TOKENS))
    order = placed(pool, now(d.load_order(make_chunks(TOKENS), D_BLOCKS), TOKENS - 1), **wrong)
    asked.clear()
    d.begin(loads=(msgspec.structs.replace(order, kind=kind),))
    outcome = d.results(lambda results: "r" in results.report.loads).report.loads["r"]
    assert (outcome.valid_end, asked[0]) == (TOKENS - 1, "match_prefix")
    for ours, theirs in zip(d.tokens(D_BLOCKS, 199), p.tokens(P_BLOCKS, 199), strict=True):
        assert np.array_equal(ours, theirs)


def test_a_placed_load_that_finds_damage_tells_the_pool(pool: PoolThread, make_rank: Make, make_chunks: Make) -> None:
    chunks = make_chunks(TOKENS)
    _, d = prefilled(pool, make_rank, chunks)
    order = placed(pool, now(d.load_order(chunks, D_BLOCKS), TOKENS - 1))
    with PoolClient.connect(pool.unix, name="vandal") as vandal:
        found = vandal.match_prefix([chunk.key for chunk in chunks], lease_s=5.0)
        assert vandal.arena is not None
        vandal.arena[found.views[2].offset] ^= 1
    d.begin(loads=(order,))
    results = d.side.take_results()
    assert results.report.loads["r"].reason is Reason.CORRUPT
    assert results.invalid_block_ids == set(D_BLOCKS)
    with PoolClient.connect(pool.unix, name="asks") as client:
        assert client.stat()["corrupt"] == 1


def test_a_synchronous_load_that_another_is_still_in_the_way_of_is_left_to_its_thread(
    pool: PoolThread, make_rank: Make, make_chunks: Make
) -> None:
    """1. The step before gave a load up, and its thread is still in the pool. 2. The next step loads."""
    _, d = prefilled(pool, make_rank, make_chunks(TOKENS))
    order = placed(pool, now(d.load_order(make_chunks(TOKENS), D_BLOCKS), TOKENS - 1))
    loader = d.side._sync_loader
    with loader._using[0]:
        assert not loader.load_here(order)
    assert loader.load_here(order)


def test_what_takes_too_long_is_given_up_and_nothing_is_written_any_more(
    pool: PoolThread, make_rank: Make, make_chunks: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. The load is stuck in the pool. 2. The step goes on without it. 3. The pool answers after all."""
    _, d = prefilled(pool, make_rank, make_chunks(TOKENS))
    stuck, done = threading.Event(), threading.Event()
    fetch, release = PoolClient.fetch, PoolClient.release

    def slow(client: PoolClient, *given: Any, **more: Any) -> Any:
        assert stuck.wait(10.0)
        return fetch(client, *given, **more)

    def last(client: PoolClient, *given: Any) -> None:
        release(client, *given)
        done.set()

    monkeypatch.setattr(PoolClient, "fetch", slow)
    monkeypatch.setattr(PoolClient, "release", last)
    d.side._sync_load_wait_s = 0.05
    d.begin(loads=(now(d.load_order(make_chunks(TOKENS), D_BLOCKS), TOKENS - 1),))
    before = [pages.copy() for pages in d.pages]
    results = d.side.take_results()
    assert results.report.loads["r"].reason is Reason.TIMEOUT
    assert results.report.loads["r"].took_s >= 0.05
    assert results.invalid_block_ids == set(D_BLOCKS)
    stuck.set()
    assert done.wait(10.0)
    assert all(np.array_equal(pages, old) for pages, old in zip(d.pages, before, strict=True))
    assert d.side.take_results().report.loads == {}
    assert d.counters.take()["load_failed_timeout"] == 1


def test_a_damaged_object_makes_the_whole_load_fail(pool: PoolThread, make_rank: Make, make_chunks: Make) -> None:
    chunks = make_chunks(TOKENS)
    _, d = prefilled(pool, make_rank, chunks)
    with PoolClient.connect(pool.unix, name="vandal") as vandal:
        found = vandal.match_prefix([chunk.key for chunk in chunks], lease_s=5.0)
        assert vandal.arena is not None
        vandal.arena[found.views[2].offset + found.views[2].size - 1] ^= 1
    d.begin(loads=(now(d.load_order(chunks, D_BLOCKS), TOKENS - 1),))
    results = d.side.take_results()
    assert results.report.loads["r"].reason is Reason.CORRUPT
    assert results.invalid_block_ids == set(D_BLOCKS)


def test_it_does_not_queue_behind_asynchronous_loads(pool: PoolThread, make_rank: Make, make_chunks: Make) -> None:
    """1. An asynchronous load waits for a writer. 2. A synchronous one of another prompt is claimed."""
    p, d = prefilled(pool, make_rank, make_chunks(TOKENS))
    p.begin(saves=(p.save_order(make_chunks(100, 1), [21, 22, 23, 6], request="s"),))
    assert p.side._step.announced.wait(10.0)
    d.step(loads=(d.load_order(make_chunks(100, 1), [13, 14, 15, 16], request="s"),))
    d.begin(loads=(now(d.load_order(make_chunks(TOKENS), D_BLOCKS), TOKENS - 1),))
    assert d.side.take_results().report.loads["r"].reason is Reason.NONE
    p.side.end_step()
    d.loaded("s")


@pytest.mark.parametrize("seed", range(3))
def test_what_a_failed_one_left_in_the_prefix_cache_is_taken_by_nobody(
    pool: PoolThread, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. A request's synchronous load fails. 2. It is aborted before it computes again. 3. Another begins alike."""
    rng = random.Random(seed)
    prompt = [rng.randrange(50) for _ in range(60)]
    patient: Any = {"shape": (1, 1), "caching": True, "shm": True, "hold_s": WAIT_S, "lookup_s": WAIT_S}
    p = PagedEngine(pool.unix, "P", rng, **patient)
    d = PagedEngine(pool.unix, "D", rng, sync_bytes=1 << 20, **patient)
    try:
        p.add("p", prompt, 1)
        while p.requests:
            p.step()
        (rank,) = d.ranks
        monkeypatch.setattr(rank.side, "_sync_load_wait_s", 0.0)
        monkeypatch.setattr(rank.side._sync_loader, "load_here", lambda _: False)
        monkeypatch.setattr(rank.side._sync_loader, "load", lambda order: LoadJob(order, 0.0))
        d.add("first", prompt, 2)
        while not d.synchronous:
            d.step()
        assert d.requests["first"].computed == 0
        d.abort("first")
        d.add("second", prompt, 2)
        while d.requests:
            d.step()
    finally:
        p.close()
        d.close()
