"""HTTP/1.1 as clients speak it, well and badly."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvrelay.router.http.server import Limits
from kvrelay.testing.fake_engine import DONE, FakeEngine, hang, stream
from kvrelay.testing.pouring import Pour
from kvrelay.testing.raw_http import RawClient, get, post

Pair = tuple[FakeEngine, FakeEngine, int]
BODY = b'{"prompt":"a","max_tokens":1}'
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


async def exchange(port: int, data: bytes) -> tuple[int, str, bytes]:
    """Status, error code and what is left after one answer."""
    async with await RawClient.open(port) as client:
        client.send(data)
        answer = await client.answer()
        return answer.status, answer.json["error"]["code"], await client.rest()


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
        (b"GARBAGE\r\n\r\n", 400),
        (b"GET / HTTP/1.1\nhost: x\n\n", 400),
        (b"GET / HTTP/1.1\r\nbad header\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\na: b\r\n folded\r\n\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (b"GET / HTTP/2.0\r\n\r\n", 505),
        (HEAD + b"content-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (HEAD + b"transfer-encoding: chunked\r\ncontent-length: 3\r\n\r\n0\r\n\r\n", 400),
        (HEAD + b"content-length: 3\r\ncontent-length: 4\r\n\r\nabcd", 400),
        (HEAD + b"content-length: -1\r\n\r\n", 400),
        (HEAD + b"transfer-encoding: gzip\r\n\r\n", 400),
        (HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n", 400),
        (HEAD + b"expect: miracles\r\ncontent-length: 1\r\n\r\n", 417),
        (b"GET / HTTP/1.1\r\nx: " + b"y" * 200_000, 431),
        (b"GET /" + b"y" * 200_000, 431),
        (b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 200 + b"\r\n", 431),
    ],
)
async def test_malformed_requests_are_refused_and_the_connection_closed(pair: Pair, data: bytes, status: int) -> None:
    prefill, decode, port = pair
    assert (await exchange(port, data))[0] == status
    assert (await get(port, "/health")).status == 200
    assert prefill.requests == decode.requests == []


@pytest.mark.parametrize("body", [b"", b"[1]", b"{", b'{"a":NaN}', b"\xff\xfe{\x00}\x00"])
async def test_a_body_that_is_no_json_object_is_a_400_and_the_connection_lives(pair: Pair, body: bytes) -> None:
    _, decode, port = pair
    async with await RawClient.open(port) as client:
        client.post("/v1/completions", body)
        answer = await client.answer()
        assert (answer.status, answer.json["error"]["type"]) == (400, "invalid_request_error")
        client.post("/v1/completions", BODY)
        assert (await client.answer()).status == 200
    assert len(decode.requests) == 1


@pytest.mark.parametrize("pipelined", [False, True])
async def test_long_bodies_follow_each_other_on_one_connection(pair: Pair, pipelined: bool) -> None:
    """Each comes in many reads, and is wrapped in nothing."""
    _, decode, port = pair
    bodies = [b'{"max_tokens":1,"prompt":"%b"}' % (letter * 600_000) for letter in (b"a", b"b", b"c")]
    async with await RawClient.open(port) as client:
        if pipelined:
            for body in bodies:
                client.post("/v1/completions", body)
        for body in bodies:
            if not pipelined:
                client.post("/v1/completions", body)
            assert (await client.answer()).status == 200
    assert [request.json["prompt"][0] for request in decode.requests] == ["a", "b", "c"]


async def test_a_body_too_large_is_a_413_before_it_is_sent(engine: Any, router: Any) -> None:
    service = await router([await engine()], [await engine()], limits=Limits(max_body_bytes=1000))
    assert (await exchange(service.port, HEAD + b"content-length: 1001\r\n\r\n"))[:2] == (413, "body_too_large")
    answer = await exchange(service.port, HEAD + b"content-length: 1001\r\nexpect: 100-continue\r\n\r\n")
    assert answer[:2] == (413, "body_too_large")


async def test_a_chunked_body_too_large_is_a_413_that_reaches_a_client_still_sending(engine: Any, router: Any) -> None:
    service = await router([await engine()], [await engine()], limits=Limits(max_body_bytes=1000))
    chunks = b"400\r\n" + b"x" * 1024 + b"\r\n"
    assert (await exchange(service.port, HEAD + b"transfer-encoding: chunked\r\n\r\n" + chunks * 500))[0] == 413


async def test_a_chunked_body_is_understood_with_extensions_and_trailers(pair: Pair) -> None:
    _, decode, port = pair
    async with await RawClient.open(port) as client:
        client.send(HEAD + b"transfer-encoding: chunked\r\n\r\n")
        for i in range(0, len(BODY), 10):
            piece = BODY[i : i + 10]
            client.send(b"%x;ext=1\r\n%b\r\n" % (len(piece), piece))
        client.send(b"0\r\nx-trailer: evil\r\n\r\n")
        assert (await client.answer()).status == 200
    assert decode.requests[0].headers["content-length"] == str(len(decode.requests[0].body))
    assert "x-trailer" not in decode.requests[0].headers


async def test_a_client_that_expects_100_continue_is_told_to_go_on(pair: Pair) -> None:
    _, decode, port = pair
    async with await RawClient.open(port) as client:
        client.send(HEAD + b"content-length: %d\r\nexpect: 100-continue\r\n\r\n" % len(BODY))
        assert (await client.head())[0] == 100
        client.send(BODY)
        assert (await client.answer()).status == 200
    assert "expect" not in decode.requests[0].headers


async def test_pipelined_requests_are_answered_in_order(pair: Pair) -> None:
    _, decode, port = pair
    async with await RawClient.open(port) as client:
        for tokens in range(1, 9):
            client.post("/v1/completions", {"prompt": "a", "max_tokens": tokens})
        for tokens in range(1, 9):
            answer = await client.answer()
            assert answer.json["usage"]["completion_tokens"] == tokens
    assert len(decode.requests) == 8


async def test_too_many_pipelined_requests_are_refused_after_the_answers_to_the_first(pair: Pair) -> None:
    _, _, port = pair
    async with await RawClient.open(port) as client:
        client.send(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n" * 100)
        statuses = [(await client.answer()).status for _ in range(18)]
        assert statuses == [200] * 17 + [429]
        assert await client.rest() == b""


async def test_a_request_that_arrives_byte_by_byte_is_understood(pair: Pair) -> None:
    _, _, port = pair
    data = HEAD + b"content-length: %d\r\n\r\n" % len(BODY) + BODY
    async with await RawClient.open(port) as client:
        for i in range(len(data)):
            client.send(data[i : i + 1])
            await asyncio.sleep(0)
        assert (await client.answer()).status == 200


async def test_http_1_0_is_answered_without_chunks_and_closed(pair: Pair) -> None:
    _, decode, port = pair
    decode.script(stream([DONE]))
    async with await RawClient.open(port) as client:
        client.send(HEAD.replace(b"HTTP/1.1", b"HTTP/1.0") + b"content-length: %d\r\n\r\n" % len(BODY) + BODY)
        status, headers = await client.head()
        assert status == 200
        assert "transfer-encoding" not in headers
        assert await client.rest() == DONE


async def test_connection_close_is_honoured(pair: Pair) -> None:
    _, _, port = pair
    async with await RawClient.open(port) as client:
        client.post("/v1/completions", BODY, headers="connection: close\r\n")
        answer = await client.answer()
        assert answer.headers["connection"] == "close"
        assert await client.rest() == b""


async def test_an_upgrade_that_is_not_offered_is_answered_as_a_plain_request(pair: Pair) -> None:
    """Java's HTTP client asks for h2c with every first request."""
    _, _, port = pair
    async with await RawClient.open(port) as client:
        client.post("/v1/completions", BODY, headers="connection: upgrade, http2-settings\r\nupgrade: h2c\r\n")
        assert (await client.answer()).status == 200


async def test_a_target_in_absolute_form_is_understood(pair: Pair) -> None:
    _, _, port = pair
    async with await RawClient.open(port) as client:
        client.send(b"GET http://x:80/v1/models?a=b HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await client.answer()).status == 200


async def test_a_head_request_gets_no_body(pair: Pair) -> None:
    _, _, port = pair
    async with await RawClient.open(port) as client:
        client.send(b"HEAD /health HTTP/1.1\r\nhost: x\r\n\r\n")
        status, headers = await client.head()
        assert status == 200
        assert int(headers["content-length"]) > 0
        client.get("/version")
        assert (await client.answer()).json == {"version": "0.32.0"}


async def test_a_client_that_says_nothing_is_closed_and_one_that_stops_half_way_is_told_why(
    engine: Any, router: Any
) -> None:
    service = await router([await engine()], [await engine()], limits=Limits(idle_s=0.5, receive_s=0.5))
    async with await RawClient.open(service.port) as silent:
        assert await silent.rest() == b""
    assert (await exchange(service.port, HEAD))[:2] == (408, "request_timeout")
    async with await RawClient.open(service.port) as drip:  # a byte now and then does not buy more time for a head
        for byte in HEAD:
            drip.send(bytes([byte]))
            await asyncio.sleep(0.01)
        assert (await drip.answer()).status == 408
    assert (await exchange(service.port, HEAD + b"content-length: 9\r\n\r\nabc"))[0] == 408


async def test_a_long_answer_outlives_the_limits_on_receiving(engine: Any, router: Any) -> None:
    """1. The idle and receiving limits pass while the engine works. 2. The answer comes all the same."""
    prefill, decode = await engine(), await engine()
    gate = asyncio.Semaphore(0)
    decode.script(stream([b"data: 1\n\n"], gate=gate))
    service = await router([prefill], [decode], limits=Limits(idle_s=0.5, receive_s=0.5))
    async with await RawClient.open(service.port) as client, await RawClient.open(service.port) as idle:
        client.post("/v1/completions", BODY)
        await decode.asked(1)
        assert await idle.rest() == b""  # the limit has passed
        gate.release()
        await client.head()
        assert await client.chunk() == b"data: 1\n\n"


async def test_a_slow_client_holds_the_engine_back_and_fills_no_memory(engine: Any, router: Any) -> None:
    """1. The engine would send 64 MiB. 2. The client takes nothing: no more is taken from the engine than buffers hold.
    3. The client reads: all of it comes.
    """
    prefill, decode = await engine(), await engine()
    piece, count = b"x" * (64 << 10), 1024
    pour = Pour(piece, count, last=None)
    decode.script(pour)
    service = await router([prefill], [decode])
    async with await RawClient.open(service.port, receive_buffer=64 << 10) as client:
        client.post("/v1/completions", BODY)
        assert await pour.held_back() < 16 << 20
        answer = await client.answer()
        assert len(answer.body) == len(piece) * count


async def test_a_client_that_never_takes_its_answer_is_dropped(engine: Any, router: Any) -> None:
    prefill, decode = await engine(), await engine()
    body = b"x" * (32 << 20)

    async def pour(exchange: Any) -> None:
        exchange.answer(200, body)
        await hang()(exchange)

    decode.script(pour)
    service = await router([prefill], [decode], limits=Limits(stall_s=0.1))
    async with await RawClient.open(service.port, receive_buffer=64 << 10) as client:
        client.post("/v1/completions", BODY)
        await decode.left_by(1)


async def test_a_client_that_vanishes_while_its_answer_is_on_its_way_is_noticed(engine: Any, router: Any) -> None:
    """1. A stream has begun. 2. The client's machine loses its network: no FIN, no reset. 3. The engine says more.
    4. Nobody acknowledges it: the engine is let go of, long before the limit for a client that takes nothing.
    """
    prefill, decode = await engine(), await engine()
    gate = asyncio.Semaphore(0)
    decode.script(stream([b"data: 1\n\n", b"data: 2\n\n", b"data: 3\n\n"], gate=gate))
    service = await router([prefill], [decode], limits=Limits(gone_s=0.5, stall_s=600))
    async with await RawClient.open(service.port) as client:
        client.post("/v1/completions", BODY)
        gate.release()
        await client.head()
        assert await client.chunk() == b"data: 1\n\n"
        client.vanish()
        gate.release()
        await decode.left_by(1)


async def test_administration_of_engines_is_out_of_reach(pair: Pair) -> None:
    prefill, decode, port = pair
    for path in ("/sleep", "/reset_prefix_cache", "/collective_rpc", "/pause"):
        answer = await post(port, path, {})
        assert answer.status == 404
        assert answer.json["error"]["code"] == "unknown_path"
    assert prefill.requests == decode.requests == []
