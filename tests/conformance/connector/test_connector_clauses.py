"""vLLM's contract clause by clause, on a small engine and on vLLM's own scheduler: docs/connector-contract.md."""

from __future__ import annotations

import gc
import pickle
import random
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from kvrelay.client.blocking import PoolClient
from kvrelay.client.lead import Lead
from kvrelay.connector.core.orders import LoadOutcome, RankReport
from kvrelay.testing.contract_moves import WAIT_S, until, until_idle
from kvrelay.testing.contract_world import Shape
from kvrelay.testing.engine_shapes import ConnectorOutput
from kvrelay.testing.fake_scheduler import Settings
from kvrelay.testing.paged_engine import chunks_of
from kvrelay.testing.true_kv import BLOCK, CHUNK
from kvrelay.types import Reason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvrelay.testing.contract_world import ContractEngine
    from kvrelay.testing.pool import PoolThread

    Make = Callable[..., ContractEngine]

BRIEF_S = 0.05
"""How long a pool that says nothing is asked for a prompt."""
SOON_S = 5.0
"""Sooner than any lease runs out by itself."""
PROMPT = list(range(100, 170))


def serve(engine: ContractEngine, name: str, prompt: list[int], new: int = 2, **options: Any) -> None:
    """Serve a request and wait until nothing of it is left."""
    engine.add(name, prompt, new, **options)
    until_idle(engine)


def settled(engine: ContractEngine, request: Any, local: int = 0) -> tuple[int, bool]:
    """Ask as the engine does, step after step, until there is an answer."""
    deadline = time.monotonic() + WAIT_S
    while True:
        count, later = engine.connector.get_num_new_matched_tokens(request, local)
        if count is not None:
            return count, later
        assert time.monotonic() < deadline
        engine.side._lookups.new_step()


def waiting(engine: ContractEngine, name: str, prompt: list[int], **options: Any) -> Any:
    """A request the connector knows and the engine does not schedule yet."""
    engine.add(name, prompt, 2, **options)
    return engine.scheduler.requests[name]


@contextmanager
def silent(pool: PoolThread) -> Iterator[Callable[[], None]]:
    """A pool that does nothing at all, for the length of a ``with`` block, or until what it gives is called."""
    stopped, go = threading.Event(), threading.Event()

    def hang() -> None:
        stopped.set()
        go.wait(WAIT_S)

    pool._loop.call_soon_threadsafe(hang)
    assert stopped.wait(WAIT_S)
    try:
        yield go.set
    finally:
        go.set()


def stats(pool: PoolThread) -> dict[str, int]:
    """The pool's gauges."""
    with PoolClient.connect(pool.unix, name="auditor") as auditor:
        return auditor.stat()


def nothing_held(pool: PoolThread) -> None:
    """The pool hears of ends as of everything else: a moment later."""
    deadline = time.monotonic() + SOON_S
    while now := {name: count for name in ("leases", "unsealed") if (count := stats(pool)[name])}:
        assert time.monotonic() < deadline, now
        threading.Event().wait(0.005)


def descriptors() -> int:
    """How many this process has."""
    return len(list(Path("/proc/self/fd").iterdir()))


def settle_until(done: Callable[[], object]) -> None:
    """Wait for other threads."""
    deadline = time.monotonic() + WAIT_S
    while not done():
        assert time.monotonic() < deadline
        threading.Event().wait(0.002)


def ordered_to_load(engine: ContractEngine) -> bool:
    """Schedule until a load is ordered, which no rank has heard of yet; False if there is none."""
    while not engine.scheduler.idle:
        engine.schedule()
        if engine.connector.loading:
            return True
        engine.settle()
    return False


def loaded(engine: ContractEngine) -> int:
    """Prompt tokens that were loaded since the last call: all, or all but one that is computed again."""
    return int(engine.counters.take().get("loaded_tokens", 0))


WHOLE = (len(PROMPT), len(PROMPT) - 1)

# --- what is promised ---


def test_asking_again_changes_nothing(pool: PoolThread, make_engine: Make) -> None:
    serve(make_engine(), "a", PROMPT)
    engine = make_engine()
    request = waiting(engine, "b", PROMPT)
    first = settled(engine, request)
    assert first[0]
    for _ in range(5):
        assert settled(engine, request, 2 * BLOCK) == (first[0] - 2 * BLOCK, first[1])
        assert settled(engine, request) == first
    assert stats(pool)["leases"] == 1
    until_idle(engine)
    assert loaded(engine) in WHOLE


def test_what_is_not_known_yet_is_none_and_not_asynchronous(pool: PoolThread, make_engine: Make) -> None:
    serve(make_engine(), "a", PROMPT)
    engine = make_engine()
    with silent(pool):
        request = waiting(engine, "b", PROMPT)
        assert engine.connector.get_num_new_matched_tokens(request, 0) == (None, False)
    assert settled(engine, request)[0]
    engine.drain(WAIT_S)


def test_nothing_to_load_is_never_asynchronous(make_engine: Make) -> None:
    engine = make_engine()
    assert settled(engine, waiting(engine, "a", PROMPT)) == (0, False)
    assert settled(engine, waiting(engine, "b", [1])) == (0, False)
    engine.drain(WAIT_S)


@pytest.mark.parametrize("length", [1, 2, BLOCK, BLOCK + 1, 24, 25, 48, 49, len(PROMPT)])
def test_no_more_than_the_prompt_is_promised_and_not_all_of_it_at_once(make_engine: Make, length: int) -> None:
    serve(make_engine(), "a", PROMPT[:length])
    engine = make_engine()
    request = waiting(engine, "b", PROMPT[:length])
    for local in range(0, length, BLOCK):
        count, later = settled(engine, request, local)
        assert local + count <= length
        assert later or not count or local + count < length
        assert count == 0 or count > 1 or not later, "one token is computed sooner than loaded"
    engine.drain(WAIT_S)


def test_a_prompt_of_which_nothing_is_spared_is_not_loaded(make_engine: Make) -> None:
    serve(make_engine(), "a", PROMPT[: 2 * BLOCK + 1])
    engine = make_engine()
    request = waiting(engine, "b", PROMPT[: 2 * BLOCK + 1])
    assert settled(engine, request, 2 * BLOCK) == (0, False)
    engine.drain(WAIT_S)


def test_what_the_engine_does_not_take_is_let_go(pool: PoolThread, make_engine: Make) -> None:
    serve(make_engine(), "a", PROMPT)
    engine = make_engine()
    request = waiting(engine, "b", PROMPT)
    assert settled(engine, request)[0]
    assert stats(pool)["leases"] == 1
    engine.side.allocated("b", ([],), 0)
    engine.side.step((), (), lambda _: ([],))
    nothing_held(pool)
    engine.drain(WAIT_S)


# --- loading ---


def test_blocks_are_told_twice_and_loaded_into_once(make_engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(make_engine(), "a", PROMPT)
    engine = make_engine()
    told: list[int] = []
    orders: list[Any] = []
    allocated, step = engine.side.allocated, engine.side.step

    def note(*given: Any) -> None:
        told.append(given[2])
        allocated(*given)

    def noted(*given: Any) -> Any:
        orders.append(step(*given))
        return orders[-1]

    monkeypatch.setattr(engine.side, "allocated", note)
    monkeypatch.setattr(engine.side, "step", noted)
    serve(engine, "b", PROMPT)
    loads = [load for one in orders for load in one.loads]
    assert (told == [len(PROMPT), 0] and len(loads) == 1) or told == [len(PROMPT) - 1]


def test_the_last_token_of_a_whole_prompt_is_computed_again(make_engine: Make) -> None:
    serve(make_engine(), "a", PROMPT)
    engine = make_engine()
    engine.add("b", PROMPT, 2)
    scheduled: list[tuple[int, int]] = []
    while not engine.scheduler.idle:
        engine.step()
        scheduled += [(row.computed, row.count) for row in engine.last.rows]
    assert scheduled[0] == (len(PROMPT) - 1, 1)


def test_a_load_ends_in_steps_that_compute_nothing(make_engine: Make) -> None:
    serve(make_engine(), "a", PROMPT)
    engine = make_engine(sync_loads=False)
    engine.add("b", PROMPT, 2)
    assert ordered_to_load(engine)
    assert not engine.last.rows
    until(engine, lambda: not engine.connector.loading)
    until_idle(engine)
    assert loaded(engine) in WHOLE


@pytest.mark.parametrize("lost", [0, 2, 5])
def test_failed_blocks_are_told_with_their_request_at_the_latest_and_it_is_promised_nothing_again(
    pool: PoolThread, make_engine: Make, lost: int
) -> None:
    first = make_engine()
    serve(first, "a", PROMPT)
    engine = make_engine(tp=2)
    request = waiting(engine, "b", PROMPT)
    assert settled(engine, request)[0]
    key = chunks_of(engine.side, PROMPT)[lost].key
    with PoolClient.connect(pool.unix, name="thief") as thief:
        if (found := thief.match_prefix([key])).views:
            assert thief.arena is not None
            thief.arena[found.views[0].offset] ^= 1  # leased bytes stay where they are when they are deleted
        thief.delete([key])
    until_idle(engine)  # the guard and the workers look at everything on the way
    assert loaded(engine) < len(PROMPT) - 1


def test_a_load_goes_on_when_every_rank_has_ended_it(make_engine: Make) -> None:
    """1. A load is ordered. 2. One rank carries out step after step, and ends it. 3. The other has begun none: nothing
    reaches the scheduler. 4. It catches up.
    """
    serve(make_engine(), "a", PROMPT)
    engine = make_engine(tp=2, settings=Settings(in_flight=2))
    engine.add("b", PROMPT, 2)
    assert ordered_to_load(engine)
    engine.execute(0)
    settle_until(lambda: not engine.ranks[0].side._ledger.loading)
    engine.schedule()
    engine.execute(0)
    assert not engine.last.rows
    assert engine.connector.loading
    until_idle(engine)
    assert not engine.aggregator.waiting


def test_requests_that_lose_their_blocks_and_are_asked_about_in_one_step_load_again(make_engine: Make) -> None:
    serve(make_engine(), "a", PROMPT)
    engine = make_engine(settings=Settings(caching=False))
    engine.add("b", PROMPT, 9)
    until(engine, lambda: engine.scheduler.requests["b"].num_output_tokens == 3)
    until(engine, lambda: not engine.connector.loading)
    engine.counters.take()
    engine.scheduler.reset_prefix_cache(running=True)
    until_idle(engine)
    assert engine.counters.take().get("loaded_bytes")


def test_a_request_that_reads_no_external_kv_costs_no_lookup_however_often_it_comes_back(make_engine: Make) -> None:
    serve(make_engine(), "a", PROMPT)
    engine = make_engine()
    options = {"sampling_params": SimpleNamespace(prompt_logprobs=1), "skip_reading_prefix_cache": True}
    engine.add("b", PROMPT, 9, **options)
    for _ in range(3):
        until(engine, lambda: engine.scheduler.requests["b"].num_computed_tokens)
        engine.scheduler.reset_prefix_cache(running=True)
        engine.step()
        entry = engine.side._ledger.entry("b")
        assert entry is None or not any("look" in told for told in entry.story)
    engine.drain(WAIT_S)


# --- orders and reports ---


def test_orders_are_given_once_and_a_step_of_nothing_has_none(make_engine: Make) -> None:
    serve(make_engine(), "a", PROMPT)
    engine = make_engine()
    engine.add("b", PROMPT, 2)
    seen: list[tuple[str, str]] = []
    for _ in range(200):
        engine.step()
        orders = engine.last.output.kv_connector_metadata.orders
        seen += [("load", load.request_id) for load in orders.loads]
        seen += [("held", name) for name in orders.held]
        if engine.scheduler.idle:
            break
    assert len(seen) == len(set(seen))
    engine.step()
    orders = engine.last.output.kv_connector_metadata.orders
    assert not any((orders.saves, orders.loads, orders.held, orders.preempted, orders.cancelled))


def test_orders_are_small(make_engine: Make) -> None:
    engine = make_engine(settings=Settings(budget=200, chunks=(200,)))
    prompt = list(range(200))
    engine.add("a", prompt, 1)
    sizes = []
    while not engine.scheduler.idle:
        engine.step()
        sizes.append(len(pickle.dumps(engine.last.output.kv_connector_metadata)))
    empty, chunks = sizes[-1], len(chunks_of(engine.side, prompt))
    assert max(sizes) - empty < 300 + 100 * chunks


def test_a_report_without_metadata_ends_what_it_names(pool: PoolThread, make_engine: Make) -> None:
    """What ended is known by its name alone; only figures are lost."""
    serve(make_engine(), "a", PROMPT)
    engine = make_engine(sync_loads=False)
    engine.add("b", PROMPT, 2)
    assert ordered_to_load(engine)
    for worker in engine.workers:
        worker.connector.build_connector_worker_meta = lambda: None
    until(engine, lambda: not engine.connector.loading)
    engine.drain(WAIT_S)
    nothing_held(pool)


def test_reports_of_ranks_join_to_the_same_in_any_order() -> None:
    rng = random.Random(3)

    def drawn() -> RankReport:
        names = rng.sample("abcd", rng.randrange(4))
        return RankReport(
            saves_ended={name: rng.randrange(1, 4) for name in names},
            loads={
                name: LoadOutcome(rng.randrange(9), rng.randrange(99), float(rng.randrange(9)), Reason.TIMEOUT)
                for name in rng.sample("abcd", rng.randrange(4))
            },
        )

    for _ in range(200):
        one, two, three = drawn(), drawn(), drawn()
        left, right = one.join(two).join(three), one.join(two.join(three))
        turned = three.join(one.join(two))
        assert left == right == turned
        before = [ConnectorOutput(kv_connector_worker_meta=item) for item in (one, two)]
        one.join(two)
        assert [item.kv_connector_worker_meta for item in before] == [one, two]


# --- saving ---


def test_a_finished_request_keeps_its_blocks_until_every_rank_has_saved_them(
    pool: PoolThread, make_engine: Make
) -> None:
    engine = make_engine(tp=2, lookup_s=BRIEF_S)
    with silent(pool) as wake:
        engine.add("a", PROMPT, 1)
        until(engine, lambda: engine.connector.held)
        for _ in range(3):
            engine.step()
        assert engine.scheduler.held >= len(PROMPT) // BLOCK
        wake()
        until_idle(engine)
    assert not engine.scheduler.held
    nothing_held(pool)


def test_blocks_are_kept_no_longer_than_saves_may_take(pool: PoolThread, make_engine: Make) -> None:
    engine = make_engine(hold_s=0.02, lookup_s=BRIEF_S)
    with silent(pool):
        engine.add("a", PROMPT, 1)
        until_idle(engine)
    engine.drain(WAIT_S)


def test_waiting_for_saves_is_bounded_and_does_nothing_without_any(
    pool: PoolThread, make_engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(lookup_s=BRIEF_S)
    waits: list[float | None] = []
    wait = threading.Event.wait
    monkeypatch.setattr(threading.Event, "wait", lambda self, timeout=None: _noted(waits, wait, self, timeout))
    engine.step()
    assert _mine(waits) == []
    with silent(pool):
        waits.clear()
        engine.add("a", PROMPT, 4)
        until(engine, lambda: not engine.scheduler.requests or engine.scheduler.requests["a"].num_computed_tokens > 70)
        assert _mine(waits)
        assert all(limit is not None and limit <= 0.01 for limit in _mine(waits))
        engine.scheduler.abort("a")
    engine.drain(WAIT_S)


def _noted(waits: list[Any], wait: Any, event: threading.Event, timeout: float | None) -> bool:
    waits.append((threading.current_thread() is threading.main_thread(), timeout))
    done: bool = wait(event, timeout)
    return done


def _mine(waits: list[Any]) -> list[float | None]:
    return [limit for mine, limit in waits if mine]


def test_preempted_blocks_are_not_read_once_the_step_has_begun(pool: PoolThread, make_engine: Make) -> None:
    """1. A request computes, its saves wait for a silent pool. 2. It is preempted. 3. Its blocks are another's, who
    fills them. 4. The pool wakes: what is sealed is the first one's, or nothing.
    """
    engine = make_engine(settings=Settings(caching=False), lookup_s=BRIEF_S)
    with silent(pool):
        engine.add("a", PROMPT, 8)
        until(engine, lambda: engine.scheduler.requests["a"].num_computed_tokens > 40)
        engine.scheduler.reset_prefix_cache(running=True)
        engine.add("b", [7] * 60, 1)
        engine.step()
    until_idle(engine)
    with PoolClient.connect(pool.unix, name="auditor") as auditor:
        for key, expected in engine.truths.items():
            assert auditor.get(key) in (None, expected)


# --- ends ---


POINTS = ["before its lookup", "looking", "claimable", "loading", "prefilling", "decoding", "saving"]


@pytest.mark.parametrize("point", POINTS)
def test_an_abort_at_any_point_leaves_nothing(pool: PoolThread, make_engine: Make, point: str) -> None:
    serve(make_engine(), "a", PROMPT)
    times = {"lookup_s": BRIEF_S} if point == "saving" else {}
    engine = make_engine(tp=2, sync_loads=point != "loading", **times)
    fresh = [*PROMPT[:30], *range(900, 990)]
    if point in ("before its lookup", "looking"):
        with silent(pool):
            waiting(engine, "b", PROMPT)
            if point == "looking":
                engine.step()
            engine.scheduler.abort("b")
            engine.step()
    elif point == "saving":
        with silent(pool):
            engine.add("b", fresh[::-1], 1)
            until(engine, lambda: engine.connector.held)
            engine.scheduler.abort("b")  # it has finished: vLLM does not tell us
    else:
        engine.add("b", PROMPT if point in ("claimable", "loading") else fresh, 9)
        request = engine.scheduler.requests["b"]
        if point == "claimable":
            assert settled(engine, request)[0]
        elif point == "loading":
            assert ordered_to_load(engine)
        elif point == "prefilling":
            until(engine, lambda: request.num_computed_tokens > 30 and "b" not in engine.connector.loading)
        else:
            until(engine, lambda: request.num_output_tokens)
        engine.scheduler.abort("b")
    engine.drain(WAIT_S)
    nothing_held(pool)


def test_an_abort_while_a_step_is_carried_out_leaves_nothing(pool: PoolThread, make_engine: Make) -> None:
    """1. A step loads synchronously and computes. 2. The request is aborted before the step's output is taken in, as
    vLLM does with aborts that come meanwhile. 3. Its saves, if any, hold its blocks; its load is reported.
    """
    serve(make_engine(), "a", PROMPT)
    for length in (len(PROMPT), len(PROMPT) - 20):
        engine = make_engine()
        engine.add("b", PROMPT[:length], 1)
        for _ in range(100):
            engine.schedule()
            engine.execute(0)
            if engine.last.rows:
                break
            engine.update()
        engine.scheduler.abort("b")
        engine.check()
        engine.update()
        engine.drain(WAIT_S)
    nothing_held(pool)


@pytest.mark.parametrize("tp", [1, 2])
def test_a_drafters_layer_is_saved_though_it_comes_after_the_steps_report_and_several_times(
    make_engine: Make, tp: int
) -> None:
    p, d = (make_engine(name, tp=tp, drafter=True, settings=Settings(drafts=3)) for name in "PD")
    said = p.add("r", PROMPT, 30).truth.tokens
    until_idle(p)
    serve(d, "next", said)
    whole = (len(said) - 1) // CHUNK * CHUNK  # the last token said was never computed
    assert d.counters.take()["loaded_tokens"] == whole


@pytest.mark.parametrize("tp", [1, 2])
def test_what_a_request_computes_in_the_step_that_loads_and_ends_it_is_saved(make_engine: Make, tp: int) -> None:
    """vLLM says that it ended before it says how the load did, and keeps its blocks if it is told to."""
    serve(make_engine(), "a", PROMPT[:40])
    engine = make_engine(tp=tp)
    serve(engine, "b", PROMPT, 1)
    told = engine.counters.take()
    assert told["sync_loads"] == 1
    assert 0 < told["loaded_tokens"] <= 40
    engine.drain(WAIT_S)
    reader = make_engine()
    serve(reader, "c", PROMPT)
    assert loaded(reader) in WHOLE


def test_an_id_may_be_used_again_when_it_is_free(make_engine: Make) -> None:
    engine = make_engine(settings=Settings(caching=False))
    for prompt in (PROMPT, PROMPT[::-1], PROMPT):
        serve(engine, "same", prompt)
    assert loaded(engine) in WHOLE


def test_shutting_down_twice_leaves_no_thread_descriptor_or_lease(
    pool: PoolThread, kind: type[ContractEngine], make_engine: Make
) -> None:
    serve(make_engine(), "a", PROMPT)
    threads, files = set(threading.enumerate()), descriptors()
    engine = kind(pool.unix, "ends", random.Random(1), Shape(tp=2))
    engine.add("b", PROMPT, 2)
    engine.add("c", PROMPT[::-1], 2)
    engine.step()
    engine.step()
    engine.close()  # twice, and what ran is broken off
    assert not set(threading.enumerate()) - threads
    del engine
    gc.collect()
    nothing_held(pool)
    settle_until(lambda: descriptors() <= files)  # the pool's ends are its own thread's to close


# --- caches that are reset ---


def test_a_reset_waits_for_loads_and_parts_with_everything_known(make_engine: Make) -> None:
    serve(make_engine(), "a", PROMPT)
    engine = make_engine(sync_loads=False)
    engine.add("b", PROMPT, 2)
    assert ordered_to_load(engine)
    assert engine.side.reset() is False
    until_idle(engine)
    assert engine.scheduler.reset_prefix_cache(connector=True)
    engine.counters.take()
    serve(engine, "c", PROMPT)
    assert engine.counters.take().get("loaded_tokens", 0) == 0
    engine.drain(WAIT_S)


def test_an_engine_that_slept_loads_what_it_lost(make_engine: Make) -> None:
    """1. It saves. 2. It sleeps, and keeps its weights. 3. What its blocks held is in the pool. 4. So is it not when
    nobody knows its weights, nor after that."""
    engine, names = make_engine(), iter("abcdef")

    def loaded_then() -> float:
        engine.counters.take()
        serve(engine, next(names), PROMPT)
        return loaded(engine)

    loaded_then()
    for _ in range(2):
        assert engine.nap()
        assert loaded_then() in WHOLE
    assert engine.nap(weights_stay=False)
    assert loaded_then() == 0
    assert engine.nap()
    assert loaded_then() == 0, "it may have found what other weights left"


# --- time ---


def test_the_scheduler_waits_for_a_silent_pool_no_longer_than_a_millisecond_a_step(
    pool: PoolThread, make_engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    waited = 0.0
    pump = Lead.pump

    def timed(self: Lead, call: Any, timeout_s: float) -> bool:
        nonlocal waited
        if threading.current_thread() is threading.main_thread():
            waited += timeout_s
        return pump(self, call, timeout_s)

    monkeypatch.setattr(Lead, "pump", timed)
    with silent(pool):
        for number in range(40):
            engine.add(f"r{number}", [number, *range(4000)][:190], 2)
            waited = 0.0
            engine.scheduler.schedule()
            assert waited <= 0.001 * 1.001
        for number in range(40):
            waited = 0.0
            engine.scheduler.abort(f"r{number}")
            assert waited == 0.0
