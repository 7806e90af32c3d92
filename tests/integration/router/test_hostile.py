"""Engines and clients at their worst: what one does must not hurt another, nor be done twice."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvrelay.router import health_checks, models, passthrough
from kvrelay.router.core.health import HealthSettings
from kvrelay.router.http import upstream
from kvrelay.router.http.server import Limits
from kvrelay.testing.fake_engine import DONE, FakeEngine, drop, fail, hang, raw, stream
from kvrelay.testing.raw_http import RawClient, get, post

Pair = tuple[FakeEngine, FakeEngine, int]
ASK = {"prompt": "a", "max_tokens": 2}
BODY = b'{"prompt":"a","max_tokens":1}'
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


# --- clients ---


async def test_half_a_request_behind_a_whole_one_does_not_cut_its_answer(engine: Any, router: Any) -> None:
    """1. A request and the beginning of the next arrive in one piece. 2. The limits on receiving pass while the first
    is being answered. 3. It is answered all the same; only then does the clock of the second run.
    """
    prefill, decode = await engine(), await engine()
    gate = asyncio.Semaphore(0)
    decode.script(stream([DONE], gate=gate))
    service = await router([prefill], [decode], limits=Limits(idle_s=0.5, receive_s=0.5))
    async with await RawClient.open(service.port) as client, await RawClient.open(service.port) as idle:
        client.send(HEAD + b"content-length: %d\r\n\r\n" % len(BODY) + BODY + HEAD)
        await decode.asked(1)
        assert await idle.rest() == b""  # the limits have passed
        gate.release()
        await client.head()
        assert await client.chunk() == DONE
        assert await client.chunk() == b""
        assert (await client.answer()).status == 408


async def test_a_request_being_received_when_the_router_stops_is_still_answered(engine: Any, router: Any) -> None:
    service = await router([await engine()], [await engine()], drain_timeout_s=10.0)
    async with await RawClient.open(service.port) as client, await RawClient.open(service.port) as idle:
        client.send(HEAD + b"content-length: %d\r\nexpect: 100-continue\r\n\r\n" % len(BODY))
        assert (await client.head())[0] == 100
        stopping = asyncio.create_task(service.stop())
        assert await idle.rest() == b""
        client.send(BODY)
        answer = await client.answer()
        assert (answer.status, answer.headers["connection"]) == (200, "close")
        assert await client.rest() == b""
        assert await stopping == 0


@pytest.mark.parametrize("content_type", ["", "content-type: application/JSON; charset=utf-8\r\n"])
async def test_hand_over_parameters_do_not_pass_under_another_content_type(pair: Pair, content_type: str) -> None:
    _, decode, port = pair
    body = b'{"input":"a","kv_transfer_params":{"do_remote_prefill":true}}'
    async with await RawClient.open(port) as client:
        head = f"POST /v1/embeddings HTTP/1.1\r\nhost: x\r\n{content_type}content-length: {len(body)}\r\n\r\n"
        client.send(head.encode() + body)
        assert (await client.answer()).status == 200
    assert decode.requests[0].body == b'{"input":"a"}'


# --- engines ---


async def test_a_connection_that_answered_before_it_took_the_request_is_not_used_again(
    engine: Any, router: Any
) -> None:
    """1. The engine refuses a large request after its head and stops reading. 2. The next request goes elsewhere."""
    body = b'{"prompt":"' + b"x" * (24 << 20) + b'"}'
    refusal = b"HTTP/1.1 413 Too Large\r\ncontent-length: 2\r\n\r\nno"
    accepted, gone = 0, asyncio.Event()

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal accepted
        accepted += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write(refusal)
        await writer.drain()
        await gone.wait()
        writer.close()

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    service = await router([await engine()], [url], decode_timeout_s=5.0)
    for count in (1, 2):
        answer = await post(service.port, "/tokenize", body)
        assert (answer.status, answer.body, accepted) == (413, b"no", count)
    gone.set()
    server.close()


async def test_a_request_an_engine_has_had_for_a_while_is_not_sent_to_it_again(
    engine: Any, router: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. A connection is kept. 2. The engine takes the next request and dies over it. 3. It may have generated: it is
    not asked again.
    """
    monkeypatch.setattr(upstream, "STALE_S", 0.05)
    prefill, decode = await engine(), await engine()
    service = await router([prefill], [decode])
    await post(service.port, "/v1/completions", ASK)

    async def die(exchange: Any) -> None:
        await asyncio.sleep(0.1)
        exchange.abort()

    decode.script(die)
    answer = await post(service.port, "/v1/completions", ASK)
    assert answer.status == 502
    assert len(decode.requests) == 2


async def test_a_request_that_kills_engines_does_not_get_to_all_of_them(engine: Any, router: Any) -> None:
    prefill, decodes = await engine(), [await engine(default=drop()) for _ in range(5)]
    service = await router([prefill], decodes)
    assert (await post(service.port, "/v1/completions", ASK)).status == 502
    assert sum(len(decode.requests) for decode in decodes) == 2
    assert (await post(service.port, "/v1/embeddings", {"input": "a"})).status == 502
    assert sum(len(decode.requests) for decode in decodes) == 4


async def test_engines_that_cannot_be_reached_are_all_tried(engine: Any, router: Any) -> None:
    prefill, gone = await engine(), [await engine() for _ in range(4)]
    urls = [fake.url for fake in gone]
    for fake in gone:
        await fake.stop()
    alive = await engine()
    service = await router([prefill], [*urls, alive.url])
    assert (await post(service.port, "/v1/completions", ASK)).status == 200
    assert (await post(service.port, "/v1/embeddings", {"input": "a"})).status == 200


async def test_a_busy_d_is_passed_over_for_one_that_is_not_and_not_blamed(engine: Any, router: Any) -> None:
    prefill, busy, free = await engine(), await engine(default=fail(429)), await engine()
    service = await router([prefill], [busy, free], health=HealthSettings(failures=1, rest_s=60.0))
    for _ in range(4):
        assert (await post(service.port, "/v1/completions", ASK)).status == 200
        assert (await post(service.port, "/v1/embeddings", {"input": "a"})).status == 200
    assert len(busy.requests) >= 4
    states = {state["name"]: state["resting"] for state in (await get(service.port, "/health")).json["engines"]}
    assert not any(states.values())


async def test_when_every_d_is_busy_the_client_is_told_so_with_their_headers(engine: Any, router: Any) -> None:
    async def busy(exchange: Any) -> None:
        exchange.answer(429, b'{"error":"busy"}', extra="retry-after: 7\r\nx-more: 1\r\nx-more: 2\r\n")

    prefill, decodes = await engine(), [await engine(default=busy), await engine(default=busy)]
    service = await router([prefill], decodes)
    for path in ("/v1/completions", "/v1/embeddings"):
        answer = await post(service.port, path, ASK)
        assert (answer.status, answer.body, answer.headers["retry-after"]) == (429, b'{"error":"busy"}', "7")
    assert [len(decode.requests) for decode in decodes] == [2, 2]


async def test_a_busy_p_is_passed_over_for_one_that_is_not(engine: Any, router: Any) -> None:
    busy, free, decode = await engine(default=fail(429)), await engine(), await engine()
    service = await router([busy, free], [decode], health=HealthSettings(failures=1, rest_s=60.0))
    for _ in range(4):
        answer = await post(service.port, "/v1/completions", ASK)
        assert (answer.status, answer.headers["x-kvrelay-prefill"]) == (200, "p1")
    assert len(busy.requests) >= 2


@pytest.mark.parametrize("path", ["/v1/models", "/version"])
async def test_an_engine_that_hangs_does_not_take_the_models_with_it(
    engine: Any, router: Any, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(passthrough, "ANY_TIMEOUT_S", 1.0)
    monkeypatch.setattr(models, "WAIT_S", 1.0)
    prefill, hung = await engine(), await engine(default=hang())
    service = await router([prefill], [hung])
    assert (await get(service.port, path)).status == 200
    assert (await get(service.port, path)).body == (await get(prefill.port, path)).body


async def test_an_engine_that_hangs_does_not_make_health_slow_and_is_asked_once_at_a_time(
    engine: Any, router: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health_checks, "WAIT_S", 1.0)
    hung, decode = await engine(default=hang()), await engine()
    service = await router([hung], [decode])
    views = await asyncio.gather(*(get(service.port, "/health") for _ in range(20)))
    assert {view.status for view in views} == {200}
    assert {view.json["engines"][0]["healthy"] for view in views} == {False}
    assert hung.num_accepted == 1


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nabcdef",
        b"HTTP/1.1 200 OK\r\ncontent-length: 99999999999999999999999\r\n\r\n",
        b"HTTP/1.1 2x0 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * 300_000,
        b"HTTP/1.1 100 Continue\r\n\r\n" * 20_000,
        b"SSH-2.0-OpenSSH\r\n",
        b"\x00" * 64,
    ],
    ids=["both-framings", "two-lengths", "huge-length", "status", "head", "endless-interim", "ssh", "zeros"],
)
async def test_an_answer_that_is_no_http_is_a_502(pair: Pair, answer: bytes) -> None:
    _, decode, port = pair
    decode.script(raw(answer), raw(answer))
    assert (await post(port, "/v1/completions", ASK)).status == 502
    assert (await post(port, "/v1/completions", ASK)).status == 502
    assert (await post(port, "/v1/completions", ASK)).status == 200


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nab",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nab",
    ],
)
async def test_a_body_that_breaks_off_is_never_made_to_look_whole(pair: Pair, answer: bytes) -> None:
    _, decode, port = pair
    decode.script(raw(answer, close=True))
    async with await RawClient.open(port) as client:
        client.post("/v1/completions", ASK)
        status, _ = await client.head()
        if status == 200:
            assert not (await client.rest()).endswith(b"0\r\n\r\n")
        else:
            assert status == 502


async def test_a_prefill_leg_ends_in_time_even_if_its_engine_drips(engine: Any, router: Any) -> None:
    dripping, decode = await engine(), await engine()

    async def drip(exchange: Any) -> None:
        exchange.head(200, "application/json")
        while not exchange.gone.is_set():
            exchange.chunk(b" ")
            await asyncio.sleep(0.01)

    dripping.script(drip)
    service = await router([dripping], [decode], prefill_timeout_s=0.1)
    answer = await post(service.port, "/v1/completions", ASK)
    assert answer.status == 200
    assert "x-kvrelay-prefill" not in answer.headers


async def test_headers_that_repeat_pass_both_ways(pair: Pair) -> None:
    _, decode, port = pair
    decode.script(raw(b"HTTP/1.1 418 Teapot\r\nset-cookie: a\r\nset-cookie: b\r\ncontent-length: 0\r\n\r\n"))
    async with await RawClient.open(port) as client:
        lines = "x-tag: 1\r\nx-tag: 2\r\nconnection: close, x-private\r\nx-private: 3\r\n"
        client.post("/v1/completions", ASK, headers=lines)
        data = await client.rest()
    assert data.startswith(b"HTTP/1.1 418 Teapot\r\n")
    assert data.lower().count(b"set-cookie: ") == 2
    assert decode.requests[0].headers["x-tag"] == "2"
    assert "x-private" not in decode.requests[0].headers
