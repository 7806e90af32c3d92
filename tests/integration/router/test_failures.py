"""What becomes of a request when an engine does not do its part."""

from __future__ import annotations

import logging
import socket
from typing import TYPE_CHECKING, Any

import pytest

from kvrelay.router.core.health import HealthSettings
from kvrelay.testing.fake_engine import FakeEngine, drop, fail, hang, raw, stream
from kvrelay.testing.raw_http import Answer, RawClient, get, post

if TYPE_CHECKING:
    from collections.abc import Iterator

Pair = tuple[FakeEngine, FakeEngine, int]
ASK = {"prompt": "a", "max_tokens": 2}


@pytest.fixture
def refusing() -> Iterator[str]:
    """The URL of a port that nobody listens on, and nobody can take meanwhile."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


async def detours(port: int, answer: Answer) -> list[tuple[str, str]]:
    record = (await get(port, f"/kvrelay/handovers/{answer.headers['x-kvrelay-handover']}")).json
    return [(detour["reason"], detour["worker"]) for detour in record["detours"]]


# --- the prefill leg ---


async def test_when_p_refuses_d_has_the_last_word(pair: Pair) -> None:
    prefill, decode, port = pair
    prefill.script(fail(400, "from P"))
    decode.script(fail(400, "from D"))
    answer = await post(port, "/v1/completions", ASK)
    assert answer.status == 400
    assert answer.json["error"]["message"] == "from D"
    assert await detours(port, answer) == [("prefill_refused", "P0")]


async def test_when_p_refuses_what_d_takes_the_client_gets_its_answer(pair: Pair) -> None:
    prefill, decode, port = pair
    prefill.script(fail(400))
    answer = await post(port, "/v1/completions", ASK)
    assert answer.status == 200
    assert decode.requests[0].json["kv_transfer_params"]["do_remote_prefill"] is False


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        (fail(500), "prefill_status_5xx"),
        (fail(503), "prefill_status_5xx"),
        (drop(), "prefill_connection_lost"),
        (hang(), "prefill_timeout"),
        (raw(b"nonsense\r\n\r\n"), "prefill_connection_lost"),
        (raw(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\ncut", close=True), "prefill_connection_lost"),
        (raw(b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\n\r\n"), "prefill_connection_lost"),
    ],
    ids=["500", "503", "dropped", "hangs", "not-http", "cut", "upgrade"],
)
async def test_when_a_p_fails_another_p_prefills(engine: Any, router: Any, behaviour: Any, reason: str) -> None:
    bad, good, decode = await engine(), await engine(), await engine()
    bad.script(behaviour)
    timeout_s = 3.0 if reason == "prefill_timeout" else 20.0
    service = await router([bad, good], [decode], prefill_timeout_s=timeout_s)
    answer = await post(service.port, "/v1/completions", ASK)
    assert answer.status == 200
    assert answer.headers["x-kvrelay-prefill"] == "p1"
    assert await detours(service.port, answer) == [(reason, "P0")]


async def test_when_every_p_is_unreachable_d_does_it_alone(engine: Any, router: Any, refusing: str) -> None:
    decode = await engine()
    service = await router([refusing], [decode])
    answer = await post(service.port, "/v1/completions", ASK)
    assert answer.status == 200
    assert "x-kvrelay-prefill" not in answer.headers
    assert await detours(service.port, answer) == [("prefill_unreachable", "P0")]
    assert decode.requests[0].json["kv_transfer_params"]["kvrelay"]["prefill"] == ""


async def test_a_p_that_keeps_failing_is_left_alone_and_one_that_refuses_is_not(engine: Any, router: Any) -> None:
    bad, refusing, decode = await engine(default=fail(500)), await engine(default=fail(422)), await engine()
    service = await router([bad, refusing], [decode], health=HealthSettings(failures=2, rest_s=60.0))
    for _ in range(10):
        assert (await post(service.port, "/v1/completions", ASK)).status == 200
    assert len(bad.requests) == 2
    assert len(refusing.requests) == 10
    states = {state["name"]: state["resting"] for state in (await get(service.port, "/health")).json["engines"]}
    assert states == {"P0": True, "P1": False, "D0": False}


# --- the decode leg ---


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        (fail(500), "decode_status_5xx"),
        (drop(), "decode_connection_lost"),
        (raw(b"?\r\n\r\n"), "decode_connection_lost"),
    ],
    ids=["500", "dropped", "not-http"],
)
async def test_when_a_d_fails_before_it_answers_another_d_answers(
    engine: Any, router: Any, behaviour: Any, reason: str
) -> None:
    prefill, bad, good = await engine(), await engine(), await engine()
    bad.script(behaviour)
    service = await router([prefill], [bad, good])
    answer = await post(service.port, "/v1/completions", ASK)
    assert answer.status == 200
    assert answer.headers["x-kvrelay-decode"] == "d1"
    assert await detours(service.port, answer) == [(reason, "D0")]
    assert good.requests[0].json["kv_transfer_params"]["do_remote_prefill"] is True


async def test_nixl_blocks_that_a_d_may_have_begun_to_read_are_not_given_to_another(engine: Any, router: Any) -> None:
    prefill, bad, good = await engine(), await engine(), await engine()
    prefill.carried = {"remote_block_ids": [[1]]}
    bad.script(drop())
    service = await router([prefill], [bad, good], connector="nixl")
    answer = await post(service.port, "/v1/completions", ASK)
    assert answer.status == 200
    assert "kv_transfer_params" not in good.requests[0].json
    assert "x-kvrelay-prefill" not in answer.headers


async def test_nixl_blocks_that_no_d_has_seen_go_to_the_next(engine: Any, router: Any, refusing: str) -> None:
    prefill, good = await engine(), await engine()
    prefill.carried = {"remote_block_ids": [[1]]}
    service = await router([prefill], [refusing, good], connector="nixl")
    await post(service.port, "/v1/completions", ASK)
    assert good.requests[0].json["kv_transfer_params"] == prefill.carried


async def test_the_only_ds_5xx_reaches_the_client_with_its_body(pair: Pair) -> None:
    _, decode, port = pair
    decode.script(fail(503, "overloaded"))
    answer = await post(port, "/v1/completions", ASK)
    assert answer.status == 503
    assert answer.json["error"]["message"] == "overloaded"
    assert answer.headers["x-kvrelay-decode"] == "d0"


@pytest.mark.parametrize("status", [400, 401, 404, 501])
async def test_what_is_not_the_engines_fault_is_passed_on_at_once(engine: Any, router: Any, status: int) -> None:
    prefill, first, second = await engine(), await engine(), await engine()
    first.script(fail(status, "no"))
    service = await router([prefill], [first, second])
    answer = await post(service.port, "/v1/completions", ASK)
    assert answer.status == status
    assert answer.json["error"]["message"] == "no"
    assert second.requests == []


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings"])
async def test_no_d_at_all_is_a_503_in_openais_form_that_tells_no_addresses_and_a_line_in_the_log_that_does(
    engine: Any, router: Any, refusing: str, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvrelay.router")
    prefill = await engine()
    service = await router([prefill], [refusing])
    answer = await post(service.port, path, ASK)
    assert answer.status == 503
    assert answer.json["error"]["code"] == "unreachable"
    assert answer.json["error"]["message"] == "D0: there is no connection to it"
    told = [record.getMessage() for record in caplog.records if "D0 has failed" in record.getMessage()]
    assert len(told) == 1
    assert told[0].startswith(f"D0 has failed: no connection to {refusing}: ")


async def test_a_d_that_drops_every_connection_is_a_502(pair: Pair) -> None:
    _, decode, port = pair
    decode.script(drop(), drop())
    answer = await post(port, "/v1/completions", ASK)
    assert answer.status == 502
    assert answer.json["error"]["code"] == "connection_lost"


async def test_a_silent_d_is_a_504_and_no_other_d_is_tried(engine: Any, router: Any) -> None:
    prefill, silent, other = await engine(), await engine(), await engine()
    silent.script(hang())
    service = await router([prefill], [silent, other], decode_timeout_s=0.2)
    answer = await post(service.port, "/v1/completions", ASK)
    assert answer.status == 504
    assert answer.json["error"]["code"] == "timeout"
    await silent.left_by(1)
    assert other.requests == []


async def test_a_stream_that_dies_ends_in_an_error_event_and_no_done(pair: Pair) -> None:
    _, decode, port = pair
    decode.script(stream([b"data: 1\n\n", b"data: half of an ev"], ending="drop"))
    answer = await post(port, "/v1/completions", {**ASK, "stream": True})
    assert answer.status == 200
    first, second, rest = answer.body.split(b"\n\n")
    assert first == b"data: 1"
    assert second.startswith(b'data: {"error":{"message":')
    assert rest == b""
    assert await detours(port, answer) == [("decode_connection_lost", "D0")]


async def test_a_stream_that_falls_silent_ends_in_an_error_event(engine: Any, router: Any) -> None:
    prefill, decode = await engine(), await engine()
    decode.script(stream([b"data: 1\n\n"], ending="hang"))
    service = await router([prefill], [decode], decode_timeout_s=3.0)
    answer = await post(service.port, "/v1/completions", {**ASK, "stream": True})
    assert b'"code":"timeout"' in answer.body
    await decode.left_by(1)


async def test_an_answer_that_breaks_off_is_visibly_cut(pair: Pair) -> None:
    _, decode, port = pair
    decode.script(raw(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{", close=True))
    async with await RawClient.open(port) as client:
        client.post("/v1/completions", ASK)
        _, headers = await client.head()
        assert headers["content-length"] == "100"
        assert await client.rest() == b"{"


async def test_a_kept_connection_that_the_engine_closed_is_replaced_once(pair: Pair) -> None:
    """1. A connection is kept. 2. The engine closes it on the next request. 3. It gets it again on a new one."""
    prefill, decode, port = pair
    await post(port, "/v1/completions", ASK)
    prefill.script(drop())
    decode.script(drop())
    answer = await post(port, "/v1/completions", ASK)
    assert answer.status == 200
    assert await detours(port, answer) == []
    assert (prefill.num_accepted, decode.num_accepted) == (2, 2)


async def test_a_restarted_engine_is_found_again(engine: Any, router: Any) -> None:
    prefill, decode = await engine(), await engine()
    service = await router([prefill], [decode])
    await post(service.port, "/v1/completions", ASK)
    port = decode.port
    await decode.stop()
    assert (await post(service.port, "/v1/completions", ASK)).status == 503
    await engine(port=port)
    assert (await post(service.port, "/v1/completions", ASK)).status == 200
