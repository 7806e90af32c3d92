"""Every way an engine can fail on a connection, as P and as D, streamed and not: the client gets the right thing,
nothing hangs, nothing is left behind.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

from kvrelay.router import tickets
from kvrelay.router.core.health import HealthSettings
from kvrelay.router.core.resilience import Resilience
from kvrelay.testing.fake_engine import DONE
from kvrelay.testing.fake_tickets import FakePool
from kvrelay.testing.raw_http import get, post
from kvrelay.testing.scripted_upstream import EVENT, FAILURES, ODDITIES, WHOLE, Failure, black_hole, refusing

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvrelay.testing.raw_http import Answer

STREAMED = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
FAILING = pytest.mark.parametrize("name", FAILURES)
CHAT, LEGACY = "/v1/chat/completions", "/v1/completions"
SHORT_S = 0.5
"""For what is noticed by a deadline only."""
LONG_S = 60.0


def ask(*, stream: bool) -> dict[str, Any]:
    return {"prompt": "a", "max_tokens": 2, "stream": stream}


def is_whole(answer: Answer, *, stream: bool) -> bool:
    return answer.status == 200 and (answer.body.endswith(DONE) if stream else b'"choices"' in answer.body)


@pytest.fixture(autouse=True)
def no_proofs_to_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tickets, "PROOF_TIMEOUT_S", 0.01)


def expected(failure: Failure, *, stream: bool) -> set[int]:
    """What comes with the beginning of a stream, in one piece, is found out before it is passed on."""
    return {failure.status, failure.streamed or failure.status} if stream else {failure.status}


async def nothing_is_left(port: int, pool: FakePool) -> None:
    if pool.num_asked:
        await pool.all_ended()
    text = (await get(port, "/metrics")).body.decode()
    gauges = re.findall(r"^kvrelay_router_(in_flight\{.*\}|tickets_open) (.+)$", text, re.MULTILINE)
    assert {name: value for name, value in gauges if float(value)} == {}
    assert len(gauges) == 3


@pytest.fixture(params=["refused", "black hole"])
def nowhere(request: pytest.FixtureRequest) -> Iterator[str]:
    with refusing() if request.param == "refused" else black_hole() as url:
        yield url


@STREAMED
@FAILING
async def test_whatever_p_does_the_client_gets_ds_answer(engine: Any, router: Any, name: str, stream: bool) -> None:
    failure = FAILURES[name]
    prefill, decode, pool = await engine(), await engine(), FakePool()
    prefill.script(failure.behave, failure.behave)
    patience_s = SHORT_S if failure.silent else LONG_S
    service = await router([prefill], [decode], pool=pool.connect, prefill_timeout_s=patience_s)
    assert is_whole(await post(service.port, LEGACY, ask(stream=stream)), stream=stream)
    await nothing_is_left(service.port, pool)


@STREAMED
@FAILING
async def test_whatever_the_only_d_does_the_client_gets_an_error_that_is_one(
    engine: Any, router: Any, name: str, stream: bool
) -> None:
    failure = FAILURES[name]
    prefill, decode, pool = await engine(), await engine(), FakePool()
    decode.script(failure.behave)
    patience_s = SHORT_S if failure.silent else LONG_S
    service = await router([prefill], [decode], pool=pool.connect, decode_timeout_s=patience_s)
    answer = await post(service.port, LEGACY, ask(stream=stream))
    assert answer.status in expected(failure, stream=stream)
    if answer.status == 200:
        assert answer.body.startswith(EVENT)
        last = answer.body.removeprefix(EVENT)
        assert re.fullmatch(rb'data: \{"error":\{"message":".+,"code":"\w+"\}\}\n\n', last), last
    else:
        assert answer.headers["x-kvrelay-decode"] == "d0"
        assert "500-without" in name or answer.json["error"]["message"]
    await nothing_is_left(service.port, pool)


@STREAMED
@FAILING
async def test_while_nothing_was_sent_another_d_answers(engine: Any, router: Any, name: str, stream: bool) -> None:
    failure = FAILURES[name]
    prefill, bad, good, pool = await engine(), await engine(), await engine(), FakePool()
    bad.script(failure.behave)
    patience_s = SHORT_S if failure.silent else LONG_S
    service = await router([prefill], [bad, good], pool=pool.connect, decode_timeout_s=patience_s)
    answer = await post(service.port, LEGACY, ask(stream=stream))
    if stream and failure.streamed == 200 and answer.status == 200 and not is_whole(answer, stream=True):
        assert b'"error"' in answer.body  # something was sent
    elif failure.silent:
        assert answer.status == 504  # the client has waited long enough
        assert good.requests == []
    else:
        assert is_whole(answer, stream=stream)
        assert answer.headers["x-kvrelay-decode"] == "d1"
    await nothing_is_left(service.port, pool)


@STREAMED
@FAILING
async def test_what_fails_counts_against_the_engine(engine: Any, router: Any, name: str, stream: bool) -> None:
    failure = FAILURES[name]
    prefill, decode = await engine(), await engine()
    decode.script(failure.behave)
    patience_s = SHORT_S if failure.silent else LONG_S
    service = await router(
        [prefill], [decode], decode_timeout_s=patience_s, health=HealthSettings(failures=1, rest_s=LONG_S)
    )
    await post(service.port, CHAT, ask(stream=stream))
    (state,) = [state for state in (await get(service.port, "/health")).json["engines"] if state["name"] == "D0"]
    assert state["resting"]


@STREAMED
@FAILING
async def test_whatever_an_engine_does_to_a_request_that_is_passed_on_it_is_an_error(
    engine: Any, router: Any, name: str, stream: bool
) -> None:
    failure = FAILURES[name]
    prefill, decode = await engine(), await engine()
    decode.script(failure.behave)
    patience_s = SHORT_S if failure.silent else LONG_S
    service = await router([prefill], [decode], decode_timeout_s=patience_s)
    answer = await post(service.port, "/cohere/v2/chat", ask(stream=stream))
    assert answer.status in expected(failure, stream=stream)
    assert answer.status != 200 or b'data: {"error":{"message":' in answer.body


@STREAMED
@pytest.mark.parametrize("name", ODDITIES)
@pytest.mark.parametrize("path", [LEGACY, CHAT, "/cohere/v2/chat"])
async def test_what_is_unusual_and_right_is_passed_on(
    engine: Any, router: Any, name: str, path: str, stream: bool
) -> None:
    prefill, decode, pool = await engine(), await engine(), FakePool()
    prefill.script(ODDITIES[name])
    decode.script(ODDITIES[name])
    service = await router([prefill], [decode], pool=pool.connect)
    answer = await post(service.port, path, ask(stream=stream))
    assert (answer.status, answer.body) == (200, EVENT + DONE if stream else WHOLE)
    await nothing_is_left(service.port, pool)


@STREAMED
async def test_where_no_p_is_d_answers_alone(engine: Any, router: Any, nowhere: str, stream: bool) -> None:
    decode, pool = await engine(), FakePool()
    service = await router([nowhere], [decode], pool=pool.connect, connect_timeout_s=1.0)
    assert is_whole(await post(service.port, LEGACY, ask(stream=stream)), stream=stream)
    await nothing_is_left(service.port, pool)


@STREAMED
async def test_where_no_d_is_another_answers_or_the_client_gets_a_503(
    engine: Any, router: Any, nowhere: str, stream: bool
) -> None:
    prefill, decode, pool = await engine(), await engine(), FakePool()
    alone = await router([prefill], [nowhere], pool=pool.connect, connect_timeout_s=1.0)
    answer = await post(alone.port, LEGACY, ask(stream=stream))
    assert (answer.status, answer.json["error"]["code"]) == (503, "unreachable")
    both = await router([prefill], [nowhere, decode], pool=pool.connect, connect_timeout_s=1.0)
    assert is_whole(await post(both.port, LEGACY, ask(stream=stream)), stream=stream)
    for service in (alone, both):
        await nothing_is_left(service.port, pool)


@STREAMED
async def test_a_kept_connection_that_is_reset_as_the_request_comes_is_replaced_once(
    engine: Any, router: Any, stream: bool
) -> None:
    """1. A connection is kept. 2. The engine resets it as the next request comes. 3. It gets it again on a new one."""
    prefill, decode, pool = await engine(), await engine(), FakePool()
    service = await router([prefill], [decode], pool=pool.connect)
    await post(service.port, LEGACY, ask(stream=stream))
    for fake in (prefill, decode):
        fake.script(FAILURES["resets-at-once"].behave)
    assert is_whole(await post(service.port, LEGACY, ask(stream=stream)), stream=stream)
    assert [len(fake.requests) for fake in (prefill, decode)] == [3, 3]
    await nothing_is_left(service.port, pool)


async def test_when_every_engine_fails_retries_stay_within_their_budget(engine: Any, router: Any) -> None:
    failure = FAILURES["500-without-a-body"].behave
    decodes = [await engine(default=failure) for _ in range(3)]
    service = await router([await engine()], decodes, resilience=Resilience(probe_interval_s=0.0, retry_share=0.0))
    for _ in range(10):
        assert (await post(service.port, LEGACY, ask(stream=False))).status == 500
    assert sum(len(decode.requests) for decode in decodes) == 10
    text = (await get(service.port, "/metrics")).body.decode()
    assert 'kvrelay_router_retries_total{outcome="denied",role="decode"} 10.0' in text
