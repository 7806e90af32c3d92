"""What the pool holds decides whether a prefill engine is asked."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Any

import httpx
import msgspec
import pytest

from kvrelay.identity.core.chunks import chain_seed, prompt_chunks
from kvrelay.router.core.kv.settings import KvSettings
from kvrelay.router.core.routing import RoutingSettings
from kvrelay.router.kv import pool_index
from kvrelay.testing.fake_tickets import FakePool
from kvrelay.wire.messages import Engine

if TYPE_CHECKING:
    from kvrelay.router.service import RouterService
    from kvrelay.testing.fake_engine import Exchange

    from .conftest import StartEngine, StartRouter

pytest.importorskip("zmq")
from kvrelay.testing.fake_publisher import FakePublisher, stored

PROMPT = list(range(1_000, 1_200))
FACTS = {"kv_groups": "full_attention", "chunk_tokens": "64"}
Ask = Callable[..., Awaitable[str | None]]


def keys(tokens: list[int], salt: str | None = None) -> Iterable[bytes]:
    return [chunk.key for chunk in prompt_chunks(chain_seed("ns", salt=salt), tokens, 64)]


async def models(exchange: Exchange) -> None:
    """As an engine with an adapter."""
    if exchange.request.target == "/v1/models":
        cards = [{"id": "m", "parent": None}, {"id": "sql", "parent": "m"}]
        exchange.answer(200, msgspec.json.encode({"object": "list", "data": cards}))
    else:
        await exchange.engine.answer_well(exchange)


@pytest.fixture
def pool() -> FakePool:
    made = FakePool()
    made.registered = [Engine(name, "kv_both", "ns", FACTS) for name in ("P0", "D0")]
    return made


@pytest.fixture
async def ask(engine: StartEngine, router: StartRouter, pool: FakePool, monkeypatch: pytest.MonkeyPatch) -> Ask:
    """Who prefills a prompt: None if nobody does."""
    monkeypatch.setattr(pool_index, "MODELS_TIMEOUT_S", 20.0)
    monkeypatch.setattr(pool_index, "FIRST_PAUSE_S", 1_000.0)
    monkeypatch.setattr(pool_index, "LONGEST_PAUSE_S", 1_000.0)
    first, second = await engine(default=models), await engine(default=models)
    service: RouterService = await router(
        [first],
        [second],
        pool=pool.connect,
        routing=RoutingSettings(policy="kv-aware", disaggregate_above="20"),
        kv=KvSettings(events=("D0=ipc:///nobody/publishes",), pool_index=True),
    )
    async with asyncio.timeout(30):
        while service._endpoints._compatibility.naming is None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    async def send(**fields: Any) -> str | None:
        url = f"http://127.0.0.1:{service.port}/v1/completions"
        async with httpx.AsyncClient() as client:
            answer = await client.post(url, json={"model": "m", "prompt": PROMPT, "max_tokens": 1, **fields})
        assert answer.status_code == 200
        prefill: str | None = answer.headers.get("x-kvrelay-prefill")
        return prefill

    return send


async def test_a_prompt_that_the_pool_holds_needs_no_prefill_engine(ask: Ask, pool: FakePool) -> None:
    assert await ask() == "P0"
    pool.held.update(keys(PROMPT))
    assert await ask() is None
    assert await ask(prompt=[*PROMPT[:192], *range(20)]) is None
    assert await ask(prompt=[*PROMPT[:192], *range(21)]) == "P0"


async def test_an_engine_that_has_it_itself_comes_before_the_pool(
    engine: StartEngine, router: StartRouter, pool: FakePool
) -> None:
    pool.held.update(keys(PROMPT))
    publisher = await FakePublisher.start()
    first, second, third = [await engine(default=models) for _ in range(3)]
    service: RouterService = await router(
        [first],
        [second, third],
        pool=pool.connect,
        routing=RoutingSettings(policy="kv-aware", disaggregate_above="20"),
        kv=KvSettings(events=(f"D1={publisher.endpoint},{publisher.replay}",), pool_index=True),
    )
    try:
        await publisher.subscribed()
        await publisher.publish(stored(PROMPT[:192], block_size=16))
        async with asyncio.timeout(30):
            while not (service.kv and service.kv.index.cached(PROMPT) and service._endpoints._compatibility.naming):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        url = f"http://127.0.0.1:{service.port}/v1/completions"
        async with httpx.AsyncClient() as client:
            for _ in range(4):
                answer = await client.post(url, json={"model": "m", "prompt": PROMPT, "max_tokens": 1})
                assert answer.headers["x-kvrelay-decode"] == "D1"
                assert "x-kvrelay-prefill" not in answer.headers
    finally:
        await publisher.stop()


async def test_tenants_are_told_apart(ask: Ask, pool: FakePool) -> None:
    pool.held.update(keys(PROMPT, "tenant"))
    assert await ask() == "P0"
    assert await ask(cache_salt="tenant") is None


@pytest.mark.parametrize("model", ["sql", "unheard-of"])
async def test_what_may_be_an_adapter_is_not_looked_up(ask: Ask, pool: FakePool, model: str) -> None:
    pool.held.update(keys(PROMPT))
    assert await ask(model=model) == "P0"
    assert pool.num_counted == 0


async def test_short_prompts_are_not_looked_up(ask: Ask, pool: FakePool) -> None:
    assert await ask(prompt=PROMPT[:20]) is None
    assert pool.num_counted == 0


async def test_a_pool_that_does_not_say_costs_a_prefill(
    ask: Ask, pool: FakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = 0

    async def hang(_: object) -> None:
        nonlocal asked
        asked += 1
        await asyncio.Event().wait()

    monkeypatch.setattr(pool, "count_prefix", hang)
    assert [await ask() for _ in range(5)] == ["P0"] * 5
    assert asked == 3
