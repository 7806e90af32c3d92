"""Engines that share no key are told, by the names they registered with a real pool."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from kvrelay.client.aio import AsyncPoolClient
from kvrelay.router import pool_link
from kvrelay.testing.pool import PoolThread
from kvrelay.testing.raw_http import get

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvrelay.testing.fake_engine import FakeEngine


@pytest.fixture
def no_blocking() -> None:
    """The pool's thread starts and ends while the event loop waits for it."""


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[PoolThread]:
    with PoolThread(tmp_path) as thread:
        yield thread


async def register(pool: PoolThread, name: str, namespace: str, **facts: str) -> AsyncPoolClient:
    client = await AsyncPoolClient.connect(pool.unix, name=name, map_arena=False)
    await client.register(name, "kv_consumer" if name.startswith("D") else "kv_both", namespace, facts)
    return client


async def start(router: Any, fakes: list[FakeEngine], pool: PoolThread) -> int:
    async def connect() -> AsyncPoolClient:
        return await AsyncPoolClient.connect(pool.unix, name="router", map_arena=False)

    port: int = (await router(fakes[:1], fakes[1:], pool=connect)).port
    return port


async def health_when(port: int, count: int) -> Any:
    """``/health`` once that many mismatches are known."""
    async with asyncio.timeout(10):
        while len((view := (await get(port, "/health")).json)["kv_mismatches"]) != count:
            pass
    return view


async def test_engines_that_cannot_exchange_kv_are_told_once_and_served_all_the_same(
    engine: Any, router: Any, pool: PoolThread, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """1. P0 and D0 differ at the router's start. 2. D0 is gone: who is left beside P0 was never meant for it. 3. D0 is
    back, with P0's settings.
    """
    monkeypatch.setattr(pool_link, "COMPATIBILITY_S", 0.02)
    monkeypatch.setattr(pool_link, "CHECK_S", 0.01)
    fakes = [await engine(), await engine()]
    prefill = await register(pool, "P0", "a", kv_dtype="float32", layers="4")
    decode = await register(pool, "D0", "b", kv_dtype="bfloat16", layers="4")
    other = await register(pool, "elsewhere", "c", kv_dtype="int8")
    port = await start(router, fakes, pool)
    view = await health_when(port, 1)
    sentence = "P0 and D0 cannot exchange KV: kv dtype is float32 on P0 and bfloat16 on D0"
    assert (view["status"], view["kv_mismatches"]) == ("ok", [sentence])
    assert "kvrelay_router_kv_mismatches 2.0" in (await get(port, "/metrics")).body.decode()
    await decode.close()
    await health_when(port, 0)
    decode = await register(pool, "D0", "a", kv_dtype="float32", layers="4")
    assert (await get(port, "/health")).json["kv_mismatches"] == []
    assert "kvrelay_router_kv_mismatches 0.0" in (await get(port, "/metrics")).body.decode()
    errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert errors == [f"prompts are computed again on the decode side: {sentence}"]
    for client in (prefill, decode, other):
        await client.close()


async def test_engines_of_other_names_are_compared_where_the_routers_are_not_registered(
    engine: Any, router: Any, pool: PoolThread
) -> None:
    fakes = [await engine(), await engine()]
    clients = [await register(pool, "left", "a", weights="1"), await register(pool, "D-right", "b", weights="2")]
    port = await start(router, fakes, pool)
    (sentence,) = (await health_when(port, 1))["kv_mismatches"]
    assert sentence == "left and D-right cannot exchange KV: weights is 1 on left and 2 on D-right"
    for client in clients:
        await client.close()
