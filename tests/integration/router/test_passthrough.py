"""What is not disaggregated goes to one engine, unchanged; and the router's own pages."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest

from kvrelay.testing.fake_engine import DONE, FakeEngine, drop, fail, raw, stream
from kvrelay.testing.raw_http import RawClient, get, post

Pair = tuple[FakeEngine, FakeEngine, int]


@pytest.mark.parametrize(
    "path", ["/v1/messages/count_tokens", "/v1/responses/render", "/v1/embeddings", "/tokenize", "/rerank"]
)
async def test_a_body_is_passed_on_byte_for_byte_with_its_query(pair: Pair, path: str) -> None:
    prefill, decode, port = pair
    body = b'{"input" : [1.50,  2]}'
    answer = await post(port, f"{path}?a=b%20c", body)
    assert answer.json == {"path": path, "echo": body.decode()}
    assert decode.requests[0].body == body
    assert decode.requests[0].target == f"{path}?a=b%20c"
    assert prefill.requests == []
    assert answer.headers["x-kvrelay-decode"] == "d0"


async def test_a_body_that_is_not_json_is_passed_on_untouched(pair: Pair) -> None:
    _, decode, port = pair
    async with await RawClient.open(port) as client:
        client.send(
            b"POST /v1/audio/transcriptions HTTP/1.1\r\nhost: x\r\ncontent-type: multipart/form-data; boundary=b\r\n"
            b"content-length: 4\r\n\r\n\x00\xff{}"
        )
        assert (await client.answer()).status == 200
    assert decode.requests[0].body == b"\x00\xff{}"


async def test_a_stream_is_passed_on_as_it_comes(pair: Pair) -> None:
    _, decode, port = pair
    decode.script(stream([b"event: a\ndata: 1\n\n", DONE]))
    answer = await post(port, "/v1/audio/translations", {"input": "a", "stream": True})
    assert answer.body == b"event: a\ndata: 1\n\n" + DONE


async def test_requests_rotate_over_d(engine: Any, router: Any) -> None:
    prefill, decodes = await engine(), [await engine(), await engine()]
    service = await router([prefill], decodes)
    for _ in range(6):
        await post(service.port, "/tokenize", {"prompt": "a"})
    assert [len(decode.requests) for decode in decodes] == [3, 3]


async def test_another_d_answers_for_one_that_fails(engine: Any, router: Any) -> None:
    prefill, bad, good = await engine(), await engine(), await engine()
    service = await router([prefill], [bad, good])
    for behaviour in (fail(500), drop()):
        bad.script(behaviour)
        assert (await post(service.port, "/v1/embeddings", {"input": "a"})).status == 200
        assert (await post(service.port, "/v1/embeddings", {"input": "a"})).status == 200
    assert len(good.requests) >= 2


async def test_an_engines_error_arrives_with_its_status_and_body(pair: Pair) -> None:
    _, decode, port = pair
    decode.script(fail(404, "no such model"), fail(500, "broken"))
    assert (await post(port, "/v1/embeddings", {})).json["error"]["message"] == "no such model"
    answer = await post(port, "/v1/embeddings", {})
    assert (answer.status, answer.json["error"]["message"]) == (500, "broken")


async def test_an_answer_that_ends_with_its_connection_is_whole(pair: Pair) -> None:
    _, decode, port = pair
    decode.script(raw(b"HTTP/1.1 200 OK\r\n\r\nno length", close=True))
    assert (await post(port, "/tokenize", {})).body == b"no length"


async def test_interim_answers_are_skipped(pair: Pair) -> None:
    _, decode, port = pair
    decode.script(raw(b"HTTP/1.1 102 Processing\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"))
    answer = await post(port, "/tokenize", {})
    assert (answer.status, answer.body) == (200, b"ok")


async def test_an_engine_that_says_more_than_it_was_asked_is_not_trusted_with_the_next_request(pair: Pair) -> None:
    _, decode, port = pair
    one = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
    decode.script(raw(one + b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nevil"))
    assert (await post(port, "/tokenize", {})).body == b"ok"
    assert "echo" in (await post(port, "/tokenize", {})).json
    assert decode.num_accepted == 2


async def test_models_are_answered_by_any_engine_that_lives(engine: Any, router: Any) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        service = await router([await engine()], [f"http://127.0.0.1:{taken.getsockname()[1]}"])
        models = (await get(service.port, "/v1/models")).json
        assert [model["id"] for model in models["data"]] == ["fake-model"]


async def test_a_preflight_request_is_passed_on(pair: Pair) -> None:
    _, _, port = pair
    async with await RawClient.open(port) as client:
        client.send(b"OPTIONS /v1/chat/completions HTTP/1.1\r\nhost: x\r\norigin: y\r\n\r\n")
        assert (await client.answer()).status == 404  # the fake's answer


async def test_a_wrong_method_is_a_405(pair: Pair) -> None:
    assert (await get(pair[2], "/v1/completions")).status == 405


async def test_health_is_200_while_a_d_lives_and_503_after(engine: Any, router: Any) -> None:
    prefill, decode = await engine(), await engine()
    service = await router([prefill], [decode])
    assert (await get(service.port, "/health")).json["status"] == "ok"
    await prefill.stop()
    answer = await get(service.port, "/health")
    assert (answer.status, answer.json["status"]) == (200, "degraded")
    states = {state["name"]: state["healthy"] for state in answer.json["engines"]}
    assert states == {"P0": False, "D0": True}
    await decode.stop()
    answer = await get(service.port, "/health")
    assert (answer.status, answer.json["status"]) == (503, "unavailable")


async def test_metrics_count_by_endpoint_engine_and_reason(pair: Pair) -> None:
    prefill, _, port = pair
    prefill.script(fail(500))
    await post(port, "/v1/completions", {"prompt": "a"})
    await post(port, "/v1/completions", {"prompt": "a"})
    await post(port, "/nowhere", {})
    answer = await get(port, "/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=")
    lines = answer.body.decode().splitlines()
    for line in (
        'kvrelay_router_requests_total{endpoint="/v1/completions",outcome="ok"} 2.0',
        'kvrelay_router_requests_total{endpoint="other",outcome="client_error"} 1.0',
        'kvrelay_router_engine_requests_total{engine="P0",role="prefill"} 2.0',
        'kvrelay_router_engine_requests_total{engine="D0",role="decode"} 2.0',
        'kvrelay_router_engine_failures_total{engine="P0",reason="status_5xx",role="prefill"} 1.0',
        'kvrelay_router_detours_total{reason="prefill_status_5xx"} 1.0',
        'kvrelay_router_in_flight{role="decode"} 0.0',
        'kvrelay_router_ttft_seconds_count{worker="D0"} 2.0',
    ):
        assert line in lines, json.dumps(lines, indent=1)
