"""Prefill engines with a pool each, one of which is gone: its engine is passed over, and nobody waits for a proof."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from kvrelay.errors import PoolUnavailableError
from kvrelay.router.several_pools import SeveralPools
from kvrelay.testing.fake_tickets import FakePool, a_proof
from kvrelay.testing.raw_http import get, post
from kvrelay.wire.messages import Engine

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from kvrelay.testing.fake_engine import Exchange, FakeEngine

PATH = "/v1/completions"
ASK = {"prompt": "a", "max_tokens": 3}


class Pools:
    """Two, of P0 and of P1; D0 knows both."""

    def __init__(self) -> None:
        self.each = [FakePool(), FakePool()]
        self.there = [True, True]
        for number, pool in enumerate(self.each):
            pool.registered = [
                Engine(engine=name, role="kv_both", namespace="n", facts={}) for name in (f"P{number}", "D0")
            ]
        self.joined = SeveralPools([(f"unix:/{number}", self.connector(number)) for number in range(2)])

    def connector(self, number: int) -> Callable[[], Awaitable[FakePool]]:
        async def connect() -> FakePool:
            if not self.there[number]:
                raise PoolUnavailableError("nobody listens")
            return self.each[number]

        return connect

    async def kill(self, number: int) -> None:
        """Once the router knows who registered there."""
        async with asyncio.timeout(20):
            while not self.joined._pools[number].engines:  # noqa: ASYNC110 - nothing tells of it
                await asyncio.sleep(0.01)
        self.there[number], self.each[number].closed = False, True


async def proven(pool: FakePool, fake: FakeEngine, exchange: Exchange) -> None:
    pool.post(a_proof(exchange.request.json["kv_transfer_params"]["kvrelay"]))
    await fake.answer_well(exchange)


@pytest.mark.parametrize("policy", ["recompute", "reprefill", "fail", "strict"])
async def test_an_engine_whose_pool_is_gone_is_passed_over_for_one_whose_pool_is_there(
    engine: Any, router: Any, policy: str
) -> None:
    prefills, decode, pools = [await engine(), await engine()], await engine(), Pools()
    service = await router(prefills, [decode], pool=pools.joined.reach, on_lost_kv=policy)
    await pools.kill(0)
    decode.script(*[lambda exchange: proven(pools.each[1], decode, exchange)] * 4)
    for _ in range(4):
        assert (await post(service.port, PATH, ASK)).status == 200
    assert [len(prefill.requests) for prefill in prefills] == [0, 4]


@pytest.mark.parametrize("policy", ["fail", "strict"])
async def test_where_no_other_engine_is_there_what_must_be_proven_is_refused_before_anybody_is_asked(
    engine: Any, router: Any, policy: str
) -> None:
    prefill, decode, pools = await engine(), await engine(), Pools()
    service = await router([prefill], [decode], pool=pools.joined.reach, on_lost_kv=policy)
    await pools.kill(0)
    answer = await post(service.port, PATH, ASK)
    assert (answer.status, answer.json["error"]["code"]) == (503, "kv_lost")
    assert prefill.requests == decode.requests == []


async def test_where_no_other_engine_is_there_a_decode_engine_has_it_alone(engine: Any, router: Any) -> None:
    prefill, decode, pools = await engine(), await engine(), Pools()
    service = await router([prefill], [decode], pool=pools.joined.reach)
    await pools.kill(0)
    answer = await post(service.port, PATH, ASK)
    record = (await get(service.port, f"/kvrelay/handovers/{answer.headers['x-kvrelay-handover']}")).json
    assert (answer.status, [detour["reason"] for detour in record["detours"]]) == (200, ["pool_away"])
    assert prefill.requests == []
