"""Conversations on small engines and a real pool: what a turn leaves for the next one, and for whom."""

from __future__ import annotations

import random
import time
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("numpy")

from kvrelay.client.blocking import PoolClient
from kvrelay.testing.paged_engine import PagedEngine, chunks_of
from kvrelay.testing.pool import PoolThread
from kvrelay.testing.true_kv import CHUNK, true_object

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kvrelay.testing.true_kv import Request

    Make = Callable[..., PagedEngine]

WAIT_S = 30.0
PROMPT = [100 + at for at in range(30)]
NEW = 31


@pytest.fixture
def make_engine(pool: PoolThread) -> Iterator[Make]:
    engines: list[PagedEngine] = []
    ends = ExitStack()

    def make(name: str, **more: Any) -> PagedEngine:
        engines.append(new_engine(pool, name, **more))
        ends.callback(engines[-1].close)
        return engines[-1]

    with ends:
        yield make
        for engine in engines:
            engine.drain(WAIT_S)


def new_engine(pool: PoolThread, name: str, **more: Any) -> PagedEngine:
    """An engine that has all the time it needs."""
    options = {"shape": (1, 1), "caching": False, "shm": True, "hold_s": WAIT_S, "load_s": WAIT_S, "lookup_s": WAIT_S}
    return PagedEngine(pool.unix, name, random.Random(name), **{**options, **more})


def run(engine: PagedEngine, tokens: list[int], new: int = 1, **more: Any) -> tuple[Request, float]:
    """One request to its end; what it was, and how many tokens of its prompt were loaded."""
    engine.counters.take()
    request = engine.add(f"r{engine.name}{len(tokens)}", tokens, new, **more)
    engine.finish_all(WAIT_S)
    return request, engine.counters.take().get("loaded_tokens", 0)


def stored(pool: PoolThread, engine: PagedEngine, tokens: list[int], salt: str | None = None) -> int:
    """How many chunks of these tokens the pool has, all of them true."""
    with PoolClient.connect(pool.unix, name="auditor") as auditor:
        found = 0
        for chunk in chunks_of(engine.side, tokens, salt):
            bytes_ = auditor.get(chunk.key)
            assert bytes_ in (None, true_object(tokens, chunk.start, chunk.end))
            found += bytes_ is not None
    return found


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("role", ["kv_consumer", "kv_both"])
def test_the_next_turn_loads_what_the_last_one_generated(make_engine: Make, drafts: int, role: str) -> None:
    prefill, decode = make_engine("P"), make_engine("D", drafts=drafts, role=role)
    run(prefill, PROMPT)
    first, loaded = run(decode, PROMPT, NEW)
    assert loaded == len(PROMPT) - 1, "the last token is computed in any case"
    said = first.truth.tokens
    assert run(prefill, [*said, 1, 2, 3])[1] == len(said) // CHUNK * CHUNK > len(PROMPT)
    second, loaded = run(decode, [*said, 1, 2, 3], NEW)
    assert loaded == len(said) + 2
    assert run(prefill, [*second.truth.tokens, 4])[1] == len(second.truth.tokens) // CHUNK * CHUNK


def test_a_turn_that_lost_its_blocks_midway_leaves_the_same(make_engine: Make) -> None:
    engine = make_engine("D")
    request = engine.add("r", PROMPT, NEW)
    while len(request.tokens) < len(PROMPT) + NEW // 2:
        engine.step()
    engine.preempt(request)
    engine.finish_all(WAIT_S)
    said = request.truth.tokens
    assert run(engine, [*said, 1])[1] == len(said) // CHUNK * CHUNK


def test_what_the_pool_holds_is_not_written_again(make_engine: Make) -> None:
    engine, other = make_engine("A"), make_engine("B")
    run(engine, PROMPT)
    other.counters.take()
    other.add("r", PROMPT, 1)
    other.finish_all(WAIT_S)
    counted = other.counters.take()
    assert not [name for name in counted if name.startswith(("saved", "not_saved"))]


def test_what_the_engine_still_has_and_the_pool_has_lost_is_saved_again(pool: PoolThread, make_engine: Make) -> None:
    engine = make_engine("P", caching=True)
    run(engine, PROMPT)
    chunks = chunks_of(engine.side, PROMPT)
    assert stored(pool, engine, PROMPT) == len(chunks)
    with PoolClient.connect(pool.unix, name="thief") as thief:
        thief.delete([chunk.key for chunk in chunks])
    assert stored(pool, engine, PROMPT) == 0
    run(engine, PROMPT)
    assert stored(pool, engine, PROMPT) == len(chunks)


def test_what_the_engine_still_has_is_saved_to_the_pool_that_takes_the_place_of_another(
    tmp_path: Path,
) -> None:
    with PoolThread(tmp_path) as pool:
        engine = new_engine(pool, "P", caching=True)
        run(engine, PROMPT)
    with PoolThread(tmp_path) as successor, closing(engine):
        deadline = time.monotonic() + WAIT_S
        while stored(successor, engine, PROMPT) < len(chunks_of(engine.side, PROMPT)):
            assert time.monotonic() < deadline
            run(engine, PROMPT)  # its connections find the successor when they do
        engine.drain(WAIT_S)


def test_tenants_do_not_meet(make_engine: Make) -> None:
    prefill, decode = make_engine("P"), make_engine("D", role="kv_consumer")
    for salt in ("a", None):
        run(prefill, PROMPT, salt=salt)
    assert run(decode, PROMPT, NEW, salt="b")[1] == 0
    first, loaded = run(decode, PROMPT, NEW, salt="a")
    assert loaded == len(PROMPT) - 1
    turn = [*first.truth.tokens, 1]
    assert [run(prefill, turn, salt=salt)[1] for salt in ("b", None)] == [24, 24], (
        "only what all tenants' prompts share"
    )
    assert run(prefill, turn, salt="a")[1] == 60


@pytest.mark.parametrize("role", ["kv_both", "kv_consumer"])
def test_a_request_aborted_after_any_step_leaves_nothing(pool: PoolThread, make_engine: Make, role: str) -> None:
    prefill, engine = make_engine("P"), make_engine("D", role=role, drafts=2)
    for steps in range(14):
        prompt = [steps, *PROMPT, *PROMPT]
        if steps % 2:
            run(prefill, prompt)
        engine.add(f"r{steps}", prompt, NEW)
        for _ in range(steps):
            engine.step()
        engine.abort(f"r{steps}")
        engine.drain(WAIT_S)
    with PoolClient.connect(pool.unix, name="auditor") as auditor:
        stats = auditor.stat()
    assert [stats[name] for name in ("leases", "tickets", "unsealed", "waiting")] == [0, 0, 0, 0]
