"""When the decode side cannot have the KV: recompute, prefill again, fail, strict; and the proof in the answer."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from kvrelay.router import proof_delivery, tickets
from kvrelay.testing.fake_engine import Behaviour, Exchange, FakeEngine, fail, hang, stream
from kvrelay.testing.fake_tickets import PROMPT_TOKENS, FakePool, a_loss, a_proof
from kvrelay.testing.raw_http import Answer, RawClient, get, post
from kvrelay.types import Reason

PATH = "/v1/completions"
ASK = {"prompt": "a", "max_tokens": 2}
STREAM = {**ASK, "stream": True}
WISH = "x-kvrelay-on-lost-kv: {}\r\n"
PROOF = "x-kvrelay-proof: yes\r\n"


def told(exchange: Exchange) -> dict[str, Any]:
    """What the router told the decode side."""
    said: dict[str, Any] = exchange.request.json["kv_transfer_params"]["kvrelay"]
    return said


def loses(pool: FakePool, reason: Reason = Reason.PARTIAL, *, head: bool = False, times: int = 1) -> Behaviour:
    """Tell that the KV is lost and wait to be broken off. ``head``: as vLLM does for a stream."""

    async def behave(exchange: Exchange) -> None:
        if head:
            exchange.head(200, "text/event-stream")
        for _ in range(times):
            pool.post(a_loss(told(exchange), reason=reason))
        await exchange.gone.wait()

    return behave


def proves(pool: FakePool, *, recomputed: int = 1, earlier: int = 0, times: int = 1) -> Behaviour:
    """Tell what was found, then answer."""

    async def behave(exchange: Exchange) -> None:
        for _ in range(times):
            pool.post(a_proof(told(exchange), recomputed=recomputed, earlier=earlier))
        await exchange.engine.answer_well(exchange)

    return behave


class Stack:
    """Two P, one D, a pool and a router of one policy."""

    def __init__(self, prefills: list[FakeEngine], decode: FakeEngine, pool: FakePool, port: int) -> None:
        self.prefills, self.decode, self.pool, self.port = prefills, decode, pool, port

    async def ask(self, body: dict[str, Any] = ASK, headers: str = "") -> Answer:
        return await post(self.port, PATH, body, headers=headers)

    async def record(self, answer: Answer) -> dict[str, Any]:
        return (await get(self.port, f"/kvrelay/handovers/{answer.headers['x-kvrelay-handover']}")).json

    async def metric(self, line: str) -> bool:
        return line in (await get(self.port, "/metrics")).body.decode()

    @property
    def legs(self) -> list[tuple[str, int]]:
        """Policy and number of each decode leg."""
        said = [leg.json["kv_transfer_params"]["kvrelay"] for leg in self.decode.requests]
        return [(leg["policy"], leg["attempt"]) for leg in said]


@pytest.fixture
async def start(engine: Any, router: Any) -> Any:
    async def begin(policy: str, **settings: Any) -> Stack:
        prefills, decode, pool = [await engine(), await engine()], await engine(), FakePool()
        service = await router(prefills, [decode], pool=pool.connect, on_lost_kv=policy, **settings)
        return Stack(prefills, decode, pool, service.port)

    return begin


# --- prefill again ---


@pytest.mark.parametrize("body", [ASK, STREAM], ids=["whole", "stream"])
async def test_lost_kv_is_prefilled_again_by_another_p_and_the_answer_is_ds_second(start: Any, body: Any) -> None:
    """1. D's head is there, its first token is not. 2. D tells that the KV is lost. 3. D is broken off, P1 prefills."""
    stack: Stack = await start("reprefill")
    stack.decode.script(loses(stack.pool, head="stream" in body), proves(stack.pool))
    answer = await stack.ask(body)
    assert answer.status == 200
    assert b" t0" in answer.body
    assert [len(prefill.requests) for prefill in stack.prefills] == [1, 1]
    assert stack.legs == [("reprefill", 1), ("recompute", 2)]
    assert len(stack.decode.gone) == 1
    record = await stack.record(answer)
    assert record["prefills"] == ["P0", "P1"]
    assert [lost["lost"] for lost in record["losses"]] == ["partial"]
    assert [proof["attempt"] for proof in record["proofs"]] == [2]
    assert [detour["reason"] for detour in record["detours"]] == ["kv_lost", "reprefill"]
    assert await stack.metric('kv_lost_total{action="reprefill",reason="partial"} 1.0')
    await stack.pool.all_ended()


async def test_the_budget_bounds_how_often_and_then_d_computes(start: Any) -> None:
    stack: Stack = await start("reprefill", max_reprefills=2)
    stack.decode.script(loses(stack.pool), loses(stack.pool), proves(stack.pool, recomputed=36))
    answer = await stack.ask()
    assert answer.status == 200
    assert stack.legs == [("reprefill", 1), ("reprefill", 2), ("recompute", 3)]
    assert (await stack.record(answer))["prefills"] == ["P0", "P1", "P0"]


@pytest.mark.parametrize("reason", [Reason.TIMEOUT, Reason.POOL_DOWN])
async def test_what_another_prefill_cannot_mend_is_computed_by_d_at_once(start: Any, reason: Reason) -> None:
    stack: Stack = await start("reprefill", max_reprefills=2)
    stack.decode.script(loses(stack.pool, reason), proves(stack.pool, recomputed=36))
    assert (await stack.ask()).status == 200
    assert stack.legs == [("reprefill", 1), ("recompute", 2)]
    assert sum(len(prefill.requests) for prefill in stack.prefills) == 1


async def test_when_no_p_is_left_to_prefill_again_d_computes(start: Any) -> None:
    stack: Stack = await start("reprefill")

    async def lose_all(exchange: Exchange) -> None:
        for prefill in stack.prefills:
            await prefill.stop()
        await loses(stack.pool)(exchange)

    stack.decode.script(lose_all, proves(stack.pool, recomputed=PROMPT_TOKENS))
    answer = await stack.ask()
    assert answer.status == 200
    assert "x-kvrelay-prefill" not in answer.headers
    assert stack.legs == [("reprefill", 1), ("recompute", 2)]


async def test_a_loss_told_of_after_the_answer_began_changes_nothing(start: Any) -> None:
    """1. D's first bytes are with the client. 2. A loss is told of. 3. The stream goes on to its end."""
    stack: Stack = await start("reprefill")
    begun = asyncio.Event()

    async def behave(exchange: Exchange) -> None:
        exchange.head(200, "text/event-stream")
        exchange.chunk(b"data: 1\n\n")
        await begun.wait()
        await stack.pool.taken(a_loss(told(exchange)))
        exchange.chunk(b"data: [DONE]\n\n")
        exchange.end()

    stack.decode.script(behave)
    async with await RawClient.open(stack.port) as client:
        client.post(PATH, STREAM)
        assert (await client.head())[0] == 200
        assert await client.chunk() == b"data: 1\n\n"
        begun.set()
        assert await client.chunk() == b"data: [DONE]\n\n"
    assert len(stack.decode.requests) == 1


async def test_an_error_after_a_proof_leaves_no_ticket_behind(start: Any) -> None:
    """1. D proves what it took. 2. It answers with an error all the same. 3. Nothing waits for more of it."""
    stack: Stack = await start("reprefill")

    async def behave(exchange: Exchange) -> None:
        await stack.pool.taken(a_proof(told(exchange)))
        await fail(400)(exchange)

    stack.decode.script(behave)
    assert (await stack.ask()).status == 400
    await stack.pool.all_ended()
    assert await stack.metric("kvrelay_router_tickets_open 0.0")


async def test_what_an_earlier_leg_tells_late_does_not_break_off_a_later_one(start: Any) -> None:
    """1. Two continuations lose their KV; one tells. 2. Its note breaks the leg off. 3. The other's comes late."""
    stack: Stack = await start("reprefill", max_reprefills=3)

    async def late(exchange: Exchange) -> None:
        await stack.pool.taken(a_loss({**told(exchange), "attempt": 1}))
        await proves(stack.pool, times=2)(exchange)

    stack.decode.script(loses(stack.pool), late)
    assert (await stack.ask({**ASK, "n": 2})).status == 200
    assert stack.legs == [("reprefill", 1), ("reprefill", 2)]


async def test_a_client_that_leaves_while_d_waits_to_be_broken_off_leaves_nothing(start: Any) -> None:
    stack: Stack = await start("reprefill")
    stack.decode.script(hang())
    async with await RawClient.open(stack.port) as client:
        client.post(PATH, STREAM)
        await stack.decode.asked(1)
        client.abort()
        await stack.decode.left_by(1)
    await stack.pool.all_ended()


# --- fail and strict ---


@pytest.mark.parametrize("policy", ["fail", "strict"])
@pytest.mark.parametrize("body", [ASK, STREAM], ids=["whole", "stream"])
async def test_lost_kv_fails_the_request_with_the_reason(start: Any, policy: str, body: Any) -> None:
    stack: Stack = await start(policy)
    stack.decode.script(loses(stack.pool, Reason.CORRUPT, head="stream" in body))
    answer = await stack.ask(body)
    assert answer.status == 503
    error = answer.json["error"]
    assert error["code"] == "kv_lost"
    assert "36 of 100 prompt tokens" in error["message"]
    assert "corrupt" in error["message"]
    assert f"on-lost-kv is {policy}" in error["message"]
    assert ("recomputed silently" in error["message"]) == (policy == "strict")
    assert len(stack.decode.gone) == 1
    assert (await stack.record(answer))["state"] == "failed"
    await stack.pool.all_ended()


@pytest.mark.parametrize("policy", ["fail", "strict"])
@pytest.mark.parametrize("body", [ASK, STREAM], ids=["whole", "stream"])
async def test_an_answer_of_recomputed_tokens_is_held_back_and_refused(start: Any, policy: str, body: Any) -> None:
    stack: Stack = await start(policy)
    stack.decode.script(proves(stack.pool, recomputed=2))
    answer = await stack.ask(body)
    assert answer.status == 503
    assert "computed 2 of 100 prompt tokens again (reason: miss)" in answer.json["error"]["message"]


@pytest.mark.parametrize("policy", ["fail", "strict"])
async def test_an_answer_that_is_not_proven_is_refused(start: Any, policy: str, monkeypatch: Any) -> None:
    for module in (tickets, proof_delivery):
        monkeypatch.setattr(module, "PROOF_TIMEOUT_S", 0.05)
    stack: Stack = await start(policy)
    answer = await stack.ask()
    assert answer.status == 503
    assert "0 of 1 proofs" in answer.json["error"]["message"]


@pytest.mark.parametrize("policy", ["fail", "strict"])
@pytest.mark.parametrize("at", ["prefill", "decode"])
@pytest.mark.parametrize("body", [ASK, STREAM], ids=["whole", "stream"])
async def test_where_the_pool_ends_before_the_proof_came_the_answer_is_refused(
    start: Any, policy: str, at: str, body: Any
) -> None:
    stack: Stack = await start(policy)

    async def answers_without_a_pool(exchange: Exchange) -> None:
        stack.pool.die()
        await exchange.engine.answer_well(exchange)

    engine = stack.decode if at == "decode" else stack.prefills[0]
    engine.script(answers_without_a_pool)
    answer = await stack.ask(body)
    assert answer.status == 503
    assert "0 of 1 proofs" in answer.json["error"]["message"]
    assert (await stack.ask(body)).status == 503
    assert len(stack.decode.requests) == 1


@pytest.mark.parametrize("policy", ["fail", "strict"])
async def test_what_was_handed_over_passes(start: Any, policy: str) -> None:
    stack: Stack = await start(policy)
    stack.decode.script(proves(stack.pool), proves(stack.pool, times=3))
    assert (await stack.ask(STREAM)).body.endswith(b"data: [DONE]\n\n")
    assert (await stack.ask({**ASK, "n": 3})).status == 200


@pytest.mark.parametrize(("ending", "status"), [("drop", 502), ("hang", 503)])
async def test_a_d_that_breaks_off_or_falls_silent_while_its_answer_is_held_back_is_not_waited_for(
    start: Any, monkeypatch: Any, ending: str, status: int
) -> None:
    """1. Of two continuations one is proven and begins. 2. Nothing is heard of the other."""
    for module in (tickets, proof_delivery):
        monkeypatch.setattr(module, "PROOF_TIMEOUT_S", 0.05)
    stack: Stack = await start("strict", decode_timeout_s=3.0)

    async def behave(exchange: Exchange) -> None:
        stack.pool.post(a_proof(told(exchange)))
        await stream([b"data: 1\n\n"], ending=ending)(exchange)

    stack.decode.script(behave)
    assert (await stack.ask({**STREAM, "n": 2})).status == status
    await stack.pool.all_ended()


@pytest.mark.parametrize(("policy", "told_policy", "status"), [("fail", "recompute", 200), ("strict", "strict", 503)])
async def test_without_a_prefill_only_strict_fails(start: Any, policy: str, told_policy: str, status: int) -> None:
    """Nobody promised anything: every P was lost."""
    stack: Stack = await start(policy)
    for prefill in stack.prefills:
        await prefill.stop()
    stack.decode.script(proves(stack.pool, recomputed=PROMPT_TOKENS))
    assert (await stack.ask()).status == status
    assert stack.legs == [(told_policy, 1)]


async def test_a_request_that_can_prove_nothing_is_refused_before_anybody_is_asked(start: Any) -> None:
    stack: Stack = await start("strict")
    for fields in ({"prompt_logprobs": 1}, {"use_beam_search": True, "n": 2}):
        answer = await stack.ask({**ASK, **fields})
        assert (answer.status, answer.json["error"]["code"]) == (400, "kv_unprovable")
        assert next(iter(fields)).removeprefix("use_") in answer.json["error"]["message"]
    stack.pool.closed = True
    answer = await stack.ask()
    assert (answer.status, answer.json["error"]["code"]) == (503, "kv_lost")
    assert stack.decode.requests == []
    assert stack.prefills[0].requests == []


async def test_ds_own_refusal_is_passed_on_unproven(start: Any) -> None:
    stack: Stack = await start("strict")

    async def refuse(exchange: Exchange) -> None:
        exchange.answer(400, b'{"error":{"message":"too long"}}')

    stack.decode.script(refuse)
    answer = await stack.ask()
    assert (answer.status, answer.json["error"]["message"]) == (400, "too long")


# --- per request ---


async def test_a_request_may_ask_for_another_policy_and_no_engine_sees_the_headers(start: Any) -> None:
    stack: Stack = await start("recompute")
    stack.decode.script(loses(stack.pool))
    assert (await stack.ask(headers=WISH.format("Fail") + PROOF)).status == 503
    stack.decode.script(proves(stack.pool))
    assert (await stack.ask()).status == 200
    assert stack.legs == [("fail", 1), ("recompute", 1)]
    for leg in stack.decode.requests + stack.prefills[0].requests:
        assert not [name for name in leg.headers if name.startswith("x-kvrelay")]


async def test_an_illegal_wish_is_refused_and_the_legal_ones_named(start: Any, pair: Any) -> None:
    stack: Stack = await start("recompute")
    answer = await stack.ask(headers=WISH.format("pray"))
    assert answer.status == 400
    assert "'pray' is not known; legal: recompute, reprefill, fail, strict" in answer.json["error"]["message"]
    assert (await stack.ask(headers="x-kvrelay-proof: maybe\r\n")).status == 400
    prefill, _, port = pair
    answer = await post(port, PATH, ASK, headers=WISH.format("strict"))
    assert answer.status == 400
    assert "needs a pool" in answer.json["error"]["message"]
    assert prefill.requests == []


# --- the proof in the answer ---


async def test_a_stream_ends_with_the_proof_as_a_comment_if_asked_for(start: Any) -> None:
    stack: Stack = await start("recompute")
    stack.decode.script(proves(stack.pool, earlier=64), proves(stack.pool))
    answer = await stack.ask(STREAM, PROOF)
    _, _, comment = answer.body.rpartition(b"data: [DONE]\n\n")
    assert comment.startswith(b": kvrelay {")
    assert comment.endswith(b"}\n\n")
    said = msgspec.json.decode(comment.removeprefix(b": kvrelay "))
    assert (said["handed_over_tokens"], said["earlier_tokens"], said["recomputed_tokens"]) == (35, 64, 1)
    assert (said["prefills"], said["decode"], said["proofs"], said["expected"]) == (["P0"], "D0", 1, 1)
    assert (said["bytes"], said["wait_ms"], said["transfer_ms"], said["reasons"]) == (4_000, 2.5, 1.25, {})
    assert "x-kvrelay-proof" not in answer.headers
    for line in (
        'prompt_tokens_total{source="earlier"} 64.0',
        "transfer_bytes_total 4000.0",
        "kv_wait_seconds_sum 0.0025",
        "kv_transfer_seconds_sum 0.00125",
    ):
        assert await stack.metric(line), line
    assert (await stack.ask(STREAM)).body.endswith(b"data: [DONE]\n\n")


async def test_another_answer_has_the_proof_in_a_header(start: Any) -> None:
    stack: Stack = await start("recompute")
    stack.decode.script(proves(stack.pool, recomputed=36, times=2))
    answer = await stack.ask({**ASK, "n": 2}, PROOF)
    said = msgspec.json.decode(answer.headers["x-kvrelay-proof"])
    assert (said["proofs"], said["recomputed_tokens"], said["reasons"]) == (2, 72, {"miss": 72})


async def test_a_proof_that_does_not_come_costs_its_time_and_no_answer(start: Any, monkeypatch: Any) -> None:
    for module in (tickets, proof_delivery):
        monkeypatch.setattr(module, "PROOF_TIMEOUT_S", 0.05)
    stack: Stack = await start("recompute")
    said = msgspec.json.decode((await stack.ask(ASK, PROOF)).headers["x-kvrelay-proof"])
    assert (said["proofs"], said["expected"]) == (0, 1)
    assert (await stack.ask(STREAM, PROOF)).body.endswith(b'"losses":[]}\n\n')
