"""The straight way: prefill on P, decode on D, the answer to the client."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import openai
import pytest

from kvrelay.testing.fake_engine import DONE, FakeEngine, stream
from kvrelay.testing.raw_http import RawClient, get, post

if TYPE_CHECKING:
    from kvrelay.router.service import RouterService

Pair = tuple[FakeEngine, FakeEngine, int]
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_p_is_asked_for_one_token_and_d_for_what_the_client_asked(pair: Pair, path: str) -> None:
    prefill, decode, port = pair
    sent = {**CHAT, "prompt": "hello", "max_tokens": 5, "temperature": 0.5, "stop": ["x"], "min_tokens": 2}
    answer = await post(port, path, sent)
    assert answer.status == 200
    (p_leg,), (d_leg,) = prefill.requests, decode.requests
    assert p_leg.target == d_leg.target == path
    assert p_leg.json["max_tokens"] == 1
    assert p_leg.json["stream"] is False
    assert "min_tokens" not in p_leg.json
    params = d_leg.json["kv_transfer_params"]
    assert d_leg.json == {**sent, "kv_transfer_params": params}
    handover = answer.headers["x-kvrelay-handover"]
    told = {"handover": handover, "leg": "decode", "prefill": "P0", "worker": "D0"}
    assert params["kvrelay"] == {**told, "policy": "recompute", "attempt": 1}
    assert p_leg.json["kv_transfer_params"]["kvrelay"] == {"handover": handover, "leg": "prefill", "worker": "P0"}
    assert answer.headers["x-kvrelay-prefill"] == "p0"
    assert answer.headers["x-kvrelay-decode"] == "d0"


async def test_both_legs_carry_the_clients_authorization_and_request_id(pair: Pair) -> None:
    prefill, decode, port = pair
    headers = "authorization: Bearer k\r\nx-request-id: mine\r\nconnection: x-hop\r\nx-hop: 1\r\nte: trailers\r\n"
    answer = await post(port, "/v1/completions", {"prompt": "a"}, headers=headers)
    for leg in (prefill.requests[0], decode.requests[0]):
        assert leg.headers["authorization"] == "Bearer k"
        assert leg.headers["x-request-id"] == "mine"
        assert "x-hop" not in leg.headers
        assert "te" not in leg.headers
    assert prefill.requests[0].headers["host"] == f"127.0.0.1:{prefill.port}"
    assert answer.headers["x-request-id"] == "mine"


async def test_a_request_without_an_id_gets_the_handovers(pair: Pair) -> None:
    prefill, decode, port = pair
    answer = await post(port, "/v1/completions", {"prompt": "a"})
    ids = {leg.headers["x-request-id"] for leg in (prefill.requests[0], decode.requests[0])}
    assert ids == {answer.headers["x-kvrelay-handover"]}


async def test_a_clients_own_transfer_parameters_reach_no_engine(pair: Pair) -> None:
    prefill, decode, port = pair
    own = {"prompt": "a", "kv_transfer_params": {"evil": 1}, "vllm_xargs": {"kv_transfer_params": "evil"}}
    await post(port, "/v1/completions", own)
    await post(port, "/v1/responses", {**own, "input": "x"})
    for leg in prefill.requests + decode.requests:
        assert b"evil" not in leg.body


async def test_each_streamed_chunk_is_passed_on_before_the_next_is_there(pair: Pair) -> None:
    """1. D sends a chunk and waits. 2. The client has it. 3. Only then may D send the next."""
    _, decode, port = pair
    gate = asyncio.Semaphore(0)
    events = [*(f"data: {i}\n\n".encode() for i in range(5)), DONE]
    decode.script(stream(events, gate=gate))
    async with await RawClient.open(port) as client:
        client.post("/v1/completions", {"prompt": "a", "stream": True})
        gate.release()
        status, headers = await client.head()
        assert status == 200
        assert headers["content-type"].startswith("text/event-stream")
        for event in events:
            assert await client.chunk() == event
            gate.release()
        assert await client.chunk() == b""


async def test_rotation_over_two_p_and_two_d_is_exactly_even(engine: Any, router: Any) -> None:
    prefills, decodes = [await engine(), await engine()], [await engine(), await engine()]
    service: RouterService = await router(prefills, decodes)
    async with await RawClient.open(service.port) as client:
        for _ in range(10):
            client.post("/v1/completions", {"prompt": "a"})
            await client.answer()
    assert [len(fake.requests) for fake in prefills + decodes] == [5, 5, 5, 5]


async def test_connections_to_engines_are_kept_and_used_again(pair: Pair) -> None:
    prefill, decode, port = pair
    async with await RawClient.open(port) as client:
        for stream_it in (False, True) * 5:
            client.post("/v1/completions", {"prompt": "a", "stream": stream_it})
            assert (await client.answer()).status == 200
    assert prefill.num_accepted == 1
    assert decode.num_accepted == 1


async def test_nixl_parameters_go_from_p_to_d_opaquely(engine: Any, router: Any) -> None:
    prefill, decode = await engine(), await engine()
    prefill.carried = {"remote_block_ids": [[1, 2, 3]], "remote_engine_id": "e", "unheard": {"of": None}}
    service: RouterService = await router([prefill], [decode], connector="nixl")
    await post(service.port, "/v1/completions", {"prompt": "a"})
    assert prefill.requests[0].json["kv_transfer_params"]["do_remote_decode"] is True
    assert decode.requests[0].json["kv_transfer_params"] == prefill.carried


async def test_nixl_sends_a_batch_to_d_alone(engine: Any, router: Any) -> None:
    prefill, decode = await engine(), await engine()
    service: RouterService = await router([prefill], [decode], connector="nixl")
    answer = await post(service.port, "/v1/completions", {"prompt": ["a", "b"]})
    assert answer.status == 200
    assert prefill.requests == []
    assert "kv_transfer_params" not in decode.requests[0].json
    record = (await get(service.port, f"/kvrelay/handovers/{answer.headers['x-kvrelay-handover']}")).json
    assert record["detours"] == [{"reason": "several_engine_requests", "worker": ""}]


async def test_prompt_logprobs_are_not_prefilled_twice(pair: Pair) -> None:
    prefill, decode, port = pair
    answer = await post(port, "/v1/completions", {"prompt": "a", "prompt_logprobs": 1})
    assert prefill.requests == []
    assert decode.requests[0].json["kv_transfer_params"]["kvrelay"]["prefill"] == ""
    assert "x-kvrelay-prefill" not in answer.headers


async def test_the_handovers_record_has_the_seven_timestamps(pair: Pair) -> None:
    _, _, port = pair
    answer = await post(port, "/v1/completions", {"prompt": "a"})
    record = (await get(port, f"/kvrelay/handovers/{answer.headers['x-kvrelay-handover']}")).json
    assert (record["prefill"], record["decode"], record["state"]) == ("P0", "D0", "done")
    stamps = list(record["timestamps"].values())
    assert len(stamps) == 7
    assert stamps == sorted(stamps)
    assert (await get(port, "/kvrelay/handovers/ho-unknown")).status == 404


async def test_the_official_client_works_streamed_and_not(pair: Pair) -> None:
    _, _, port = pair
    async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="k", max_retries=0) as client:
        models = await client.models.list()
        assert [model.id for model in models.data] == ["fake-model"]
        whole = await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "hi"}], max_tokens=3
        )
        assert whole.choices[0].message.content == " t0 t1 t2"
        pieces = await client.completions.create(
            model="m", prompt="hi", max_tokens=4, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in pieces]
        assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == " t0 t1 t2 t3"
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 4


async def test_the_official_client_reads_a_broken_stream_as_an_error(pair: Pair) -> None:
    _, decode, port = pair
    chunk = b'data: {"id":"c","object":"text_completion","created":1,"model":"m","choices":[]}\n\n'
    decode.script(stream([chunk, b'data: {"id":"c","obj'], ending="drop"))
    async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="k", max_retries=0) as client:
        pieces = await client.completions.create(model="m", prompt="hi", stream=True)
        with pytest.raises(openai.APIError, match="connection"):
            async for _ in pieces:
                pass
