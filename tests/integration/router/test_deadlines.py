"""The time a request may take, as a whole and until its first byte; and a router that ends with notice."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from kvrelay.router.core.resilience import Resilience
from kvrelay.router.entrance.settings import EntranceSettings
from kvrelay.testing.fake_engine import DONE, hang, stream
from kvrelay.testing.fake_tickets import FakePool
from kvrelay.testing.pouring import Pour
from kvrelay.testing.raw_http import RawClient, get, post

ASK = {"prompt": "a", "max_tokens": 2}
STREAM = {**ASK, "stream": True}
LONG_S = 60.0
FIRST = b'data: {"choices":[{"text":"a"}]}\n\n'


def within(**settings: float) -> Resilience:
    return Resilience(probe_interval_s=0.0, **settings)


async def record_of(port: int, handover: str) -> dict[str, Any]:
    return (await get(port, f"/kvrelay/handovers/{handover}")).json


@pytest.mark.parametrize("place", ["prefill", "decode"])
async def test_a_request_that_takes_too_long_is_a_504_wherever_it_is(engine: Any, router: Any, place: str) -> None:
    prefill, decode, pool = await engine(), await engine(), FakePool()
    slow = {"prefill": prefill, "decode": decode}[place]
    slow.script(hang())
    service = await router([prefill], [decode], pool=pool.connect)
    answer = await post(service.port, "/v1/completions", ASK, headers="x-kvrelay-timeout: 2\r\n")
    assert (answer.status, answer.json["error"]["code"]) == (504, "deadline")
    await slow.left_by(1)
    await pool.all_ended()
    (handover,) = pool.ended
    record = await record_of(service.port, handover)
    assert record["state"] == "failed"
    assert record["detours"][-1]["reason"] == "deadline"
    assert (await post(service.port, "/v1/completions", ASK)).status == 200


async def test_a_request_whose_time_is_over_in_the_queue_leaves_it(engine: Any, router: Any) -> None:
    """1. A request has the only slot. 2. Another waits for it until its time is over. 3. A third gets it."""
    prefill, decode = await engine(), await engine()
    decode.script(hang())
    service = await router([prefill], [decode], entrance=EntranceSettings(max_concurrent=1))
    async with await RawClient.open(service.port) as first:
        first.post("/v1/completions", ASK)
        await decode.asked(1)
        waiting = await post(service.port, "/v1/completions", ASK, headers="x-kvrelay-timeout: 0.3\r\n")
        assert (waiting.status, waiting.json["error"]["code"]) == (504, "deadline")
        assert len(prefill.requests) == 1
        first.abort()
        assert (await post(service.port, "/v1/completions", ASK)).status == 200


async def test_a_stream_that_takes_too_long_ends_in_an_error_event(engine: Any, router: Any) -> None:
    prefill, decode = await engine(), await engine()
    decode.script(stream([FIRST, b"data: half of an ev"], ending="hang"))
    service = await router([prefill], [decode], resilience=within(request_timeout_s=2.0))
    answer = await post(service.port, "/v1/completions", STREAM)
    assert answer.status == 200
    assert answer.body.startswith(FIRST + b'data: {"error":{"message":"The request was not done within its 2 s"')
    await decode.left_by(1)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses"])
async def test_a_client_may_ask_for_less_time_and_not_for_more(engine: Any, router: Any, path: str) -> None:
    prefill, decode = await engine(), await engine()
    for deployment_s, header in ((0.0, "0.2"), (0.2, "50"), (50.0, "0.2")):
        decode.script(hang())
        service = await router([prefill], [decode], resilience=within(request_timeout_s=deployment_s))
        answer = await post(service.port, path, ASK, headers=f"x-kvrelay-timeout: {header}\r\n")
        assert (answer.status, answer.json["error"]["code"]) == (504, "deadline")
    assert all("x-kvrelay-timeout" not in asked.headers for asked in decode.requests)


@pytest.mark.parametrize("header", ["0", "-1", "soon", "nan", "inf", "1e9"])
async def test_a_time_that_is_none_is_refused(engine: Any, router: Any, header: str) -> None:
    prefill, decode = await engine(), await engine()
    service = await router([prefill], [decode])
    answer = await post(service.port, "/v1/completions", ASK, headers=f"x-kvrelay-timeout: {header}\r\n")
    assert answer.status == 400
    assert "x-kvrelay-timeout" in answer.json["error"]["message"]
    assert prefill.requests == []


async def test_a_stream_must_begin_within_its_own_time(engine: Any, router: Any) -> None:
    async def head_only(exchange: Any) -> None:
        exchange.head(200, "text/event-stream")
        await exchange.gone.wait()

    prefill, decode = await engine(), await engine()
    service = await router([prefill], [decode], resilience=within(first_byte_timeout_s=0.3))
    for behaviour in (hang(), head_only):
        decode.script(behaviour)
        answer = await post(service.port, "/v1/completions", STREAM)
        assert (answer.status, answer.json["error"]["code"]) == (504, "timeout")
    await decode.left_by(2)


# --- the end ---


async def test_a_router_gives_notice_before_it_takes_no_more(engine: Any, router: Any) -> None:
    """1. It is told to stop. 2. Its health says so, and it serves on. 3. Then it takes nothing more."""
    prefill, decode = await engine(), await engine()
    service = await router([prefill], [decode], resilience=within(drain_notice_s=LONG_S))
    assert (await get(service.port, "/health")).status == 200
    port = service.port
    stopping = asyncio.create_task(service.stop())
    await asyncio.sleep(0)
    health = await get(port, "/health")
    assert (health.status, health.json["status"]) == (503, "draining")
    assert (await post(port, "/v1/completions", ASK)).status == 200
    assert not stopping.done()
    stopping.cancel()
    await asyncio.wait({stopping})
    service.apply(msgspec.structs.replace(service.config, resilience=within()))
    await service.stop()
    with pytest.raises(ConnectionRefusedError):
        await RawClient.open(port)


# --- slow clients ---


async def test_a_client_that_does_not_read_its_stream_holds_the_engine_back(engine: Any, router: Any) -> None:
    """1. The engine would stream 24 MiB of events. 2. The client takes nothing: the engine is held back. 3. It reads:
    every event comes.
    """
    prefill, decode = await engine(), await engine()
    event, count = b"data: " + b"x" * (64 << 10) + b"\n\n", 384
    pour = Pour(event, count, last=DONE)
    decode.script(pour)
    service = await router([prefill], [decode])
    async with await RawClient.open(service.port, receive_buffer=64 << 10) as client:
        client.post("/v1/completions", STREAM)
        assert await pour.held_back() < 12 << 20
        answer = await client.answer()
        assert answer.body == event * count + DONE


async def test_an_answer_that_waits_for_its_proof_is_not_taken_whole_into_memory(
    engine: Any, router: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. An answer must be proven before it is passed on. 2. The engine pours, and proves nothing: it is held back."""
    from kvrelay.router.http import call

    monkeypatch.setattr(call, "MAX_KEPT_BYTES", 1 << 20)
    prefill, decode, pool = await engine(), await engine(), FakePool()
    pour = Pour(FIRST * 2000)
    decode.script(pour)
    service = await router([prefill], [decode], pool=pool.connect, on_lost_kv="strict", decode_timeout_s=LONG_S)
    async with await RawClient.open(service.port) as client:
        client.post("/v1/completions", STREAM)
        assert await pour.held_back() < 16 << 20
        client.abort()
        await decode.left_by(1)
    await pool.all_ended()
