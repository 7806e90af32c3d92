"""`/v1/responses` and `/v1/messages`: disaggregated, in their own dialects, with their official clients."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import anthropic
import openai
import pytest

from kvrelay.testing.fake_engine import drop, fail, hang, stream
from kvrelay.testing.raw_http import RawClient, get, post

if TYPE_CHECKING:
    from kvrelay.testing.fake_engine import FakeEngine

Pair = tuple["FakeEngine", "FakeEngine", int]
MESSAGE = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}


async def detours(port: int, answer: Any) -> list[str]:
    record = (await get(port, f"/kvrelay/handovers/{answer.headers['x-kvrelay-handover']}")).json
    return [detour["reason"] for detour in record["detours"]]


async def test_a_response_goes_to_p_for_one_token_and_to_d_named(pair: Pair) -> None:
    prefill, decode, port = pair
    answer = await post(port, "/v1/responses", {"input": "hi", "max_output_tokens": 3, "stream": False, "store": True})
    (p_leg,), (d_leg,) = prefill.requests, decode.requests
    assert (p_leg.json["max_output_tokens"], p_leg.json["store"]) == (1, False)
    assert p_leg.json["kv_transfer_params"]["kvrelay"]["leg"] == "prefill"
    assert (d_leg.json["max_output_tokens"], d_leg.json["store"]) == (3, True)
    assert d_leg.json["kv_transfer_params"]["kvrelay"]["prefill"] == "P0"
    assert answer.json["id"] == d_leg.json["request_id"]
    assert answer.headers["x-kvrelay-prefill"] == "p0"


async def test_a_message_goes_to_p_for_one_token_and_to_d_as_it_came(pair: Pair) -> None:
    prefill, decode, port = pair
    sent = {**MESSAGE, "stop_sequences": ["x"], "system": "s"}
    assert (await post(port, "/v1/messages", sent)).status == 200
    (p_leg,), (d_leg,) = prefill.requests, decode.requests
    assert {**p_leg.json, "kv_transfer_params": None} == {
        "model": "m", "messages": MESSAGE["messages"], "system": "s", "max_tokens": 1, "stream": False,
        "kv_transfer_params": None,
    }  # fmt: skip
    assert {**d_leg.json, "kv_transfer_params": None} == {**sent, "kv_transfer_params": None}


async def test_nixl_hands_responses_and_messages_over(engine: Any, router: Any) -> None:
    prefill, decode = await engine(), await engine()
    prefill.carried = {"remote_block_ids": [[1]], "remote_engine_id": "e"}
    port = (await router([prefill], [decode], connector="nixl")).port
    await post(port, "/v1/responses", {"input": "a"})
    await post(port, "/v1/messages", MESSAGE)
    assert [leg.json["kv_transfer_params"] for leg in decode.requests] == [prefill.carried] * 2


async def test_nixl_push_cannot_name_the_engine_request_of_a_response(engine: Any, router: Any) -> None:
    prefill, decode = await engine(), await engine()
    port = (await router([prefill], [decode], connector="nixl-push")).port
    answer = await post(port, "/v1/responses", {"input": "a"})
    assert (answer.status, prefill.requests) == (200, [])
    assert await detours(port, answer) == ["request_id"]


@pytest.mark.parametrize(
    ("more", "reason"),
    [({"background": True}, "background"), ({"tools": [{"type": "mcp", "server_label": "x"}]}, "builtin_tools")],
)
async def test_what_cannot_be_prefilled_goes_to_d_alone(pair: Pair, more: dict[str, Any], reason: str) -> None:
    prefill, _, port = pair
    answer = await post(port, "/v1/responses", {"input": "a", **more})
    assert (answer.status, prefill.requests) == (200, [])
    assert await detours(port, answer) == [reason]


async def test_a_stored_response_is_continued_fetched_and_cancelled_where_it_is(engine: Any, router: Any) -> None:
    """By its name, whichever engine took it; and by a router that has never seen it."""
    decodes = [await engine() for _ in range(3)]
    ports = [(await router([await engine()], decodes)).port for _ in range(2)]
    for turn in range(6):
        first = await post(ports[0], "/v1/responses", {"input": "a", "stream": bool(turn % 2)})
        holder = first.headers["x-kvrelay-decode"]
        (name,) = {leg.json["request_id"] for leg in decodes[int(holder[1:])].requests[-1:]}
        for port in ports:
            after = await post(port, "/v1/responses", {"input": "b", "previous_response_id": name})
            assert (after.status, after.headers["x-kvrelay-decode"]) == (200, holder)
            assert await detours(port, after) == ["previous_response"]
            found = await get(port, f"/v1/responses/{name}")
            assert (found.json["id"], found.headers["x-kvrelay-decode"]) == (name, holder)
            await post(port, f"/v1/responses/{name}/cancel", {})
            assert decodes[int(holder[1:])].requests[-1].target == f"/v1/responses/{name}/cancel"


async def test_a_response_the_client_has_named_is_looked_for_on_all(engine: Any, router: Any) -> None:
    decodes = [await engine() for _ in range(3)]
    port = (await router([await engine()], decodes)).port
    first = await post(port, "/v1/responses", {"input": "a", "request_id": "resp_mine"})
    for _ in range(3):
        after = await post(port, "/v1/responses", {"input": "b", "previous_response_id": "resp_mine"})
        assert (after.status, after.headers["x-kvrelay-decode"]) == (200, first.headers["x-kvrelay-decode"])
    assert (await get(port, "/v1/responses/resp_mine")).json["id"] == "resp_mine"


async def test_a_response_nobody_has_is_the_engines_own_404(engine: Any, router: Any) -> None:
    port = (await router([await engine()], [await engine(), await engine()])).port
    answer = await post(port, "/v1/responses", {"input": "b", "previous_response_id": "resp_x"})
    assert (answer.status, answer.json["error"]["message"]) == (404, "no such response")
    assert (await get(port, "/v1/responses/resp_x")).status == 404


async def test_a_response_that_may_be_on_an_engine_out_of_reach_is_not_called_unknown(engine: Any, router: Any) -> None:
    gone, here = await engine(), await engine()
    port = (await router([await engine()], [gone, here])).port
    first = await post(port, "/v1/responses", {"input": "a"})
    assert first.headers["x-kvrelay-decode"] == "d0"
    await gone.stop()
    for name in (first.json["id"], "resp_x"):
        answer = await post(port, "/v1/responses", {"input": "b", "previous_response_id": name})
        assert answer.status == 503
        assert "D0" in answer.json["error"]["message"]
        assert (await get(port, f"/v1/responses/{name}")).status == 503
    assert here.requests == []


async def test_errors_of_the_router_come_in_the_endpoints_dialect(engine: Any, router: Any) -> None:
    port = (await router([await engine()], [await engine(default=drop())])).port
    message = await post(port, "/v1/messages", MESSAGE)
    assert (message.status, message.json["type"], message.json["error"]["type"]) == (502, "error", "api_error")
    response = await post(port, "/v1/responses", {"input": "a"})
    assert (response.status, response.json["error"]["code"]) == (502, "connection_lost")


async def test_official_clients_read_answers_streams_and_errors(pair: Pair) -> None:
    prefill, decode, port = pair
    base = f"http://127.0.0.1:{port}"
    async with anthropic.AsyncAnthropic(base_url=base, api_key="k", max_retries=0) as client:
        whole = await client.messages.create(**MESSAGE)  # type: ignore[call-overload]
        assert whole.content[0].text == " t0 t1 t2"
        async with client.messages.stream(**MESSAGE) as pieces:  # type: ignore[arg-type]
            assert await pieces.get_final_text() == " t0 t1 t2"
        assert {leg.headers["authorization"] for leg in prefill.requests + decode.requests} == {"Bearer k"}
        decode.script(fail(400, "too long"))
        with pytest.raises(anthropic.BadRequestError, match="too long"):
            await client.messages.create(**MESSAGE)  # type: ignore[call-overload]
        decode.script(stream([b'event: message_start\ndata: {"type":"mess'], ending="drop"))
        with pytest.raises(anthropic.APIStatusError, match="connection"):
            async with client.messages.stream(**MESSAGE) as pieces:  # type: ignore[arg-type]
                await pieces.get_final_text()
    async with openai.AsyncOpenAI(base_url=f"{base}/v1", api_key="k", max_retries=0) as other:
        said = await other.responses.create(model="m", input="hi", max_output_tokens=3)
        assert said.output_text == " t0 t1 t2"
        events = await other.responses.create(model="m", input="hi", max_output_tokens=3, stream=True)
        kinds = [event.type async for event in events]
        assert kinds == ["response.created", "response.in_progress", "response.output_item.added",
                         "response.content_part.added", *["response.output_text.delta"] * 3,
                         "response.completed"]  # fmt: skip
        decode.script(stream([b'event: response.created\ndata: {"type":"res'], ending="drop"))
        with pytest.raises(openai.APIError, match="connection"):
            _ = [event async for event in await other.responses.create(model="m", input="hi", stream=True)]


async def test_a_streamed_response_begins_with_its_first_event_that_is_not_a_repetition(pair: Pair) -> None:
    """1. D repeats the request; the client has that at once. 2. Only D's next event counts as the first byte."""
    _, decode, port = pair
    gate = asyncio.Semaphore(0)
    pieces = [b"event: response.created\ndata: {}\n\n", b"event: response.output_item.added\ndata: {}\n\n"]
    decode.script(stream(pieces, gate=gate))
    async with await RawClient.open(port) as client:
        client.post("/v1/responses", {"input": "a", "stream": True})
        gate.release()
        _, headers = await client.head()
        assert await client.chunk() == pieces[0]
        record = f"/kvrelay/handovers/{headers['x-kvrelay-handover']}"
        assert (await get(port, record)).json["timestamps"]["decode_begin"] is None
        gate.release()
        assert await client.chunk() == pieces[1]
        assert (await get(port, record)).json["timestamps"]["decode_begin"] is not None


async def test_a_response_passed_to_d_is_let_go_when_its_client_leaves(pair: Pair) -> None:
    _, decode, port = pair
    decode.script(hang())
    async with await RawClient.open(port) as client:
        client.post("/v1/responses", {"input": "a"})
        await decode.asked(1)
        client.abort()
        await decode.left_by(1)
