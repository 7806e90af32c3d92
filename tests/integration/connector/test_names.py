"""Requests whose keys are more than tokens: adapters, media, embeddings; against a real pool."""

from __future__ import annotations

import random
import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("numpy")

from kvrelay.client.blocking import PoolClient
from kvrelay.connector.adapters import Adapter, Adapters
from kvrelay.errors import ConfigError
from kvrelay.identity.core.chunks import Extra, chain_seed, prompt_chunks
from kvrelay.identity.digests import DigestCache
from kvrelay.testing.paged_engine import PagedEngine
from kvrelay.testing.true_kv import CHUNK
from kvrelay.types import Reason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kvrelay.testing.pool import PoolThread

    Make = Callable[..., PagedEngine]

WAIT_S = 30.0
PROMPT = [100 + at for at in range(40)]
LAST = len(PROMPT) - 1


@pytest.fixture
def make_engine(pool: PoolThread, tmp_path: Path) -> Iterator[Make]:
    engines: list[PagedEngine] = []
    ends = ExitStack()

    def make(name: str, **more: Any) -> PagedEngine:
        options: dict[str, Any] = {"shape": (1, 1), "caching": False, "shm": True}
        options |= {"hold_s": WAIT_S, "load_s": WAIT_S, "lookup_s": WAIT_S}
        options |= {"adapters": Adapters(DigestCache(tmp_path / f"{name}.json")), **more}
        engines.append(PagedEngine(pool.unix, name, random.Random(name), **options))
        ends.callback(engines[-1].close)
        return engines[-1]

    with ends:
        yield make
        for engine in engines:
            engine.drain(WAIT_S)


def write(folder: Path, weights: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_model.safetensors").write_text(weights)
    return folder


def run(engine: PagedEngine, **more: Any) -> dict[str, float]:
    """One request; what was counted."""
    engine.counters.take()
    engine.add("r", PROMPT, 1, **more)
    engine.finish_all(WAIT_S)
    return engine.counters.take()


def loaded(engine: PagedEngine, **more: Any) -> float:
    """How many tokens of the prompt were loaded."""
    return run(engine, **more).get("loaded_tokens", 0)


def test_adapters_meet_by_name_and_weights(make_engine: Make, tmp_path: Path) -> None:
    saving, loading = make_engine("P"), make_engine("D")
    run(saving, adapter=Adapter("sql", 1, str(write(tmp_path / "here", "weights"))))
    there = Adapter("sql", 7, str(write(tmp_path / "there", "weights")))
    assert loaded(loading, adapter=there) == LAST
    assert loaded(loading, adapter=Adapter("sql", 8, str(write(tmp_path / "other", "Weights")))) == 0
    assert loaded(loading, adapter=Adapter("code", 9, there.path)) == 0
    assert loaded(loading) == 0


def test_an_adapter_that_cannot_be_identified_is_neither_saved_nor_loaded(make_engine: Make, tmp_path: Path) -> None:
    engine = make_engine("E")
    for _ in range(2):
        counted = run(engine, adapter=Adapter("gone", 1, str(tmp_path / "gone")))
        assert counted["not_saved_adapter"] == counted["recomputed_adapter"] == len(PROMPT)
        assert not counted.keys() & {"saved_tokens", "loaded_tokens"} or not counted["loaded_tokens"]
        assert "saved_tokens" not in counted


def test_files_changed_in_place_share_nothing(make_engine: Make, tmp_path: Path) -> None:
    engine, other = make_engine("A"), make_engine("B")
    adapter = Adapter("sql", 1, str(write(tmp_path / "one", "weights")))
    run(engine, adapter=adapter)
    write(tmp_path / "one", "other weights")
    assert run(engine, adapter=adapter)["not_saved_adapter"] == len(PROMPT)
    assert loaded(other, adapter=adapter) == 0


def test_a_digest_that_takes_long_costs_its_requests_their_kv_and_no_step(make_engine: Make, tmp_path: Path) -> None:
    """1. A big adapter is asked for. 2. Other requests come and go. 3. Its own gives up, a later one has its KV."""
    go = threading.Event()

    class Slow(Adapters):
        def identity(self, adapter: Adapter) -> str:
            assert go.wait(WAIT_S)
            return super().identity(adapter)

    engine = make_engine("E", adapters=Slow(DigestCache(tmp_path / "slow.json")), lookup_s=1.0)
    adapter = Adapter("big", 1, str(write(tmp_path / "big", "weights")))
    engine.add("waiting", PROMPT, 1, adapter=adapter)
    engine.add("other", PROMPT, 1)
    while "other" in engine.requests:
        engine.step()
    engine.finish_all(WAIT_S)
    counted = engine.counters.take()
    assert counted["recomputed_adapter"] == counted["not_saved_adapter"] == len(PROMPT)
    go.set()
    assert run(engine, adapter=adapter)["saved_tokens"] == len(PROMPT)


def test_an_aborted_request_waits_for_no_name(make_engine: Make, tmp_path: Path) -> None:
    engine = make_engine("E")
    engine.add("r", PROMPT, 1, adapter=Adapter("sql", 1, str(write(tmp_path / "one", "weights"))))
    engine.abort("r")
    engine.drain(WAIT_S)


def test_a_request_that_runs_while_its_adapter_is_replaced_saves_nothing_more(
    make_engine: Make, tmp_path: Path
) -> None:
    adapters = Adapters(DigestCache(None))
    engine = make_engine("E", adapters=adapters)
    adapter = Adapter("sql", 1, str(write(tmp_path / "one", "weights")))
    request = engine.add("r", PROMPT, 60, adapter=adapter)
    while len(request.tokens) < len(PROMPT) + 10:
        engine.step()
    adapters.loading(Adapter("code", 2, adapter.path, in_place=True))
    adapters.loading(Adapter("sql", 1, adapter.path, in_place=True))
    engine.finish_all(WAIT_S)
    assert len(PROMPT) <= engine.counters.take()["saved_tokens"] <= len(PROMPT) + 12


def names_of(engine: PagedEngine, adapter: Adapter) -> list[bytes]:
    """Keys of the prompt's chunks under the name that an adapter has wherever nothing else ran."""
    lora = Adapters(DigestCache(None)).identity(adapter)
    return [chunk.key for chunk in prompt_chunks(chain_seed(engine.side.namespace, lora=lora), PROMPT, CHUNK)]


def test_what_an_engine_cached_with_an_adapters_old_weights_is_not_saved_as_the_new_ones(
    pool: PoolThread, make_engine: Make, tmp_path: Path
) -> None:
    """1. Requests run. 2. The adapter is unloaded, rewritten, and loaded again. 3. The engine finds the old KV."""
    adapters = Adapters(DigestCache(None))
    engine = make_engine("P", caching=True, adapters=adapters)
    old, new = (Adapter("sql", number, str(tmp_path / "one")) for number in (1, 2))
    write(tmp_path / "one", "weights")
    adapters.loading(old)
    run(engine, adapter=old)
    write(tmp_path / "one", "new weights")
    adapters.loading(new)
    counted = run(engine, adapter=new)
    assert counted["local_tokens"] > 0
    assert counted["not_saved_adapter"] == len(PROMPT)
    with PoolClient.connect(pool.unix, name="test") as client:
        assert not any(client.exists(names_of(engine, new)))
    engine.reset_prefix_cache()
    adapters.cache_dropped(engine.side.adapters_in_use)
    assert run(engine, adapter=new)["saved_tokens"] == len(PROMPT)


def test_requests_of_an_adapter_loaded_again_from_its_path_are_not_saved_from_what_the_new_one_left(
    make_engine: Make, tmp_path: Path
) -> None:
    """1. A request of the old adapter runs. 2. One of the new does. 3. Preempted, the old one could find its KV."""
    engine = make_engine("P", caching=True)
    old, new = (Adapter("sql", number, str(write(tmp_path / "one", "weights"))) for number in (1, 2))
    running = engine.add("old", [7, 8, *PROMPT], 60, adapter=old)
    while len(running.tokens) < len(PROMPT) + 10:
        engine.step()
    engine.add("new", PROMPT, 1, adapter=new)
    engine.finish_all(WAIT_S)
    assert len(PROMPT) <= engine.counters.take()["saved_tokens"] - len(PROMPT) <= len(PROMPT) + 2 * CHUNK


def test_an_adapter_found_spoiled_by_one_request_is_spoiled_for_all_that_have_their_names(
    make_engine: Make, tmp_path: Path
) -> None:
    """1. A request has its name and waits for room. 2. Files change. 3. Another request's name shows it."""
    engine = make_engine("E")
    adapter = Adapter("sql", 1, str(write(tmp_path / "one", "weights")))
    named = engine.add("named", PROMPT, 1, adapter=adapter)
    del engine.requests["named"]  # the engine has no room
    while engine.side.num_matched("named", 0)[0] is None:
        engine.step()
    write(tmp_path / "one", "other weights")
    run(engine, adapter=adapter)
    engine.requests["named"] = named
    engine.finish_all(WAIT_S)
    assert "saved_tokens" not in engine.counters.take()


def test_files_that_change_before_a_named_request_first_runs_are_noticed(make_engine: Make, tmp_path: Path) -> None:
    """1. A request has its name. 2. Files change. 3. It runs: the engine may have read them again for it."""
    engine = make_engine("E")
    adapter = Adapter("sql", 1, str(write(tmp_path / "one", "weights")))
    engine.add("r", PROMPT, 1, adapter=adapter)
    while engine.side.num_matched("r", 0)[0] is None:
        engine.side.step([], [], lambda _: ())
    write(tmp_path / "one", "other weights")
    engine.finish_all(WAIT_S)
    assert "saved_tokens" not in engine.counters.take()


@pytest.mark.parametrize("changed", [False, True])
def test_a_slow_disk_delays_saving_and_not_the_engine(make_engine: Make, tmp_path: Path, *, changed: bool) -> None:
    """1. A request has its name. 2. The disk hangs. 3. It runs and ends. 4. The disk answers."""
    go = threading.Event()
    go.set()

    class Slow(Adapters):
        def identity(self, adapter: Adapter) -> str:
            assert go.wait(WAIT_S)
            return super().identity(adapter)

    engine = make_engine("E", adapters=Slow(DigestCache(None)), lookup_s=WAIT_S)
    adapter = Adapter("sql", 1, str(write(tmp_path / "one", "weights")))
    request = engine.add("r", PROMPT, 1, adapter=adapter)
    while engine.side.num_matched("r", 0)[0] is None:
        engine.side.step([], [], lambda _: ())
    go.clear()
    while request.state != "held":
        engine.step()
    for _ in range(3):
        engine.step()
    assert "saved_tokens" not in engine.counters.take()
    if changed:
        write(tmp_path / "one", "other weights")
    go.set()
    engine.finish_all(WAIT_S)
    assert engine.counters.take().get("saved_tokens", 0) == (0 if changed else len(PROMPT))


def test_a_reset_while_a_name_is_made_names_nothing(make_engine: Make, tmp_path: Path) -> None:
    engine = make_engine("E")
    engine.add("r", PROMPT, 1, adapter=Adapter("sql", 1, str(write(tmp_path / "one", "weights"))))
    assert engine.side.reset()
    engine.finish_all(WAIT_S)
    assert "saved_tokens" not in engine.counters.take()


def image(content: bytes, start: int = 5, end: int = 20) -> dict[str, Any]:
    return {"extras": [Extra(start, end, content)]}


def test_images_meet_by_content_and_place(make_engine: Make) -> None:
    saving, loading = make_engine("P"), make_engine("D")
    run(saving, **image(b"cat"))
    assert loaded(loading, **image(b"cat")) == LAST
    assert loaded(loading, **image(b"dog")) == 0
    assert loaded(loading, **image(b"cat", 6, 21)) == 0
    assert loaded(loading) == 0
    assert loaded(loading, **image(b"dog", 24, 30)) == 24, "up to the image they are the same"


def test_embeddings_meet_by_content(make_engine: Make) -> None:
    def of(content: str) -> Callable[[int], list[Extra]]:
        return lambda size: [
            Extra(at, at + size, content[at : at + size].encode()) for at in range(0, len(PROMPT), size)
        ]

    saving, loading = make_engine("P"), make_engine("D")
    run(saving, digests=of("a" * 40))
    assert loaded(loading, digests=of("a" * 40)) == LAST
    assert loaded(loading, digests=of("a" * 30 + "b" * 10)) == 24
    assert loaded(loading) == 0


def test_a_prompt_that_cannot_be_named_is_counted_with_its_reason(make_engine: Make) -> None:
    engine = make_engine("E")

    def broken(_: int) -> list[Extra]:
        raise ConfigError("embeddings on another device")

    assert run(engine, digests=broken)["not_saved_no_keys"] == len(PROMPT)
    engine.side.on_new_request("media", None, 40, salt=None, params=None)
    assert engine.side.num_matched("media", 0) == (0, False)
    assert engine.side._ledger.entry("media").reason is Reason.NO_KEYS  # type: ignore[union-attr]
    assert engine.counters.take()["not_saved_no_keys"] == 40
    engine.side.finished("media")
