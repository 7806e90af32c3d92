"""Overlapped dispatch: the decode leg is sent while the prefill leg is under way; every way either of them can end."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from kvrelay.router import prefilling
from kvrelay.testing.fake_engine import DONE, FakeEngine, drop, fail, hang, stream
from kvrelay.testing.fake_tickets import FakePool, a_proof
from kvrelay.testing.raw_http import RawClient, get, post
from kvrelay.wire.messages import Engine

if TYPE_CHECKING:
    from kvrelay.testing.fake_engine import Behaviour, Exchange

ASK = {"prompt": "a", "stream": True}


class Stage:
    """Engines, a pool and a router; P's answers and D's wait for a word."""

    def __init__(self, prefills: list[FakeEngine], decodes: list[FakeEngine], pool: FakePool, port: int) -> None:
        self.prefills = prefills
        self.decodes = decodes
        self.pool = pool
        self.port = port
        self.p_may, self.d_may = asyncio.Event(), asyncio.Event()

    @property
    def p(self) -> FakeEngine:
        return self.prefills[0]

    @property
    def d(self) -> FakeEngine:
        return self.decodes[0]

    def when(self, word: asyncio.Event, then: Behaviour | None = None) -> Behaviour:
        """Answer, well or as told, when the word is given."""

        async def behave(exchange: Exchange) -> None:
            await word.wait()
            await (then or exchange.engine.answer_well)(exchange)

        return behave

    async def record(self, handover: str) -> dict[str, Any]:
        """What the router remembers."""
        return msgspec.json.decode((await get(self.port, f"/kvrelay/handovers/{handover}")).body, type=dict)

    async def sealed(self) -> None:
        """The router has said that no more will come."""
        async with asyncio.timeout(5.0):
            while not self.pool.sealed:
                self.pool.changed.clear()
                await self.pool.changed.wait()


@pytest.fixture
async def stage(engine: Any, router: Any) -> Stage:
    return await make(engine, router)


async def make(
    engine: Any, router: Any, *, prefills: int = 1, decodes: int = 1, groups: str = "full_attention", **settings: Any
) -> Stage:
    ps, ds = [await engine() for _ in range(prefills)], [await engine() for _ in range(decodes)]
    pool = FakePool()
    pool.registered = [Engine(name, "kv_both", "ns", {"kv_groups": groups}) for name in ("P0", "D0")]
    service = await router(ps, ds, pool=pool.connect, dispatch="overlapped", **settings)
    return Stage(ps, ds, pool, service.port)


def told(engine: FakeEngine, request: int = 0) -> dict[str, Any]:
    return engine.requests[request].json["kv_transfer_params"]["kvrelay"]  # type: ignore[no-any-return]


async def test_d_is_asked_while_p_computes_and_told_so(stage: Stage) -> None:
    """1. P is asked. 2. D is asked. 3. P answers. 4. D answers."""
    stage.p.script(stage.when(stage.p_may))
    stage.d.script(stage.when(stage.d_may))
    async with await RawClient.open(stage.port) as client:
        client.post("/v1/completions", {"prompt": "a"})
        await stage.p.asked(1)
        await stage.d.asked(1)
        assert stage.pool.sealed == []
        stage.p_may.set()
        await stage.sealed()
        stage.pool.post(a_proof(told(stage.d)))
        stage.d_may.set()
        answer = await client.answer()
    assert answer.status == 200
    assert answer.headers["x-kvrelay-prefill"] == "p0"
    assert told(stage.d)["overlapped"] is True
    assert told(stage.d)["handover"] == told(stage.p)["handover"]
    assert stage.d.requests[0].json["kv_transfer_params"]["do_remote_prefill"] is True
    await stage.pool.all_ended()
    record = await stage.record(told(stage.d)["handover"])
    stamps = record["timestamps"]
    assert stamps["prefill_begin"] <= stamps["migration_begin"] < stamps["prefill_end"] <= stamps["migration_end"]
    assert (record["state"], record["prefill"], record["detours"], record["num_proofs"]) == ("done", "P0", [], 1)


@pytest.mark.parametrize(("status", "detour"), [(400, "prefill_refused"), (500, "prefill_status_5xx")])
async def test_when_p_refuses_or_fails_d_is_told_at_once_and_answers(stage: Stage, status: int, detour: str) -> None:
    stage.p.script(stage.when(stage.p_may, fail(status)))
    stage.d.script(stage.when(stage.d_may))
    async with await RawClient.open(stage.port) as client:
        client.post("/v1/completions", {"prompt": "a"})
        await stage.d.asked(1)
        stage.p_may.set()
        await stage.sealed()
        stage.d_may.set()
        answer = await client.answer()
    assert answer.status == 200
    assert "x-kvrelay-prefill" not in answer.headers
    record = await stage.record(told(stage.d)["handover"])
    assert [one["reason"] for one in record["detours"]] == [detour]
    assert record["prefill"] is None


async def test_when_p_dies_d_is_told_at_once(stage: Stage) -> None:
    stage.p.script(stage.when(stage.p_may, drop()))
    stage.d.script(stage.when(stage.d_may))
    async with await RawClient.open(stage.port) as client:
        client.post("/v1/completions", {"prompt": "a"})
        await stage.d.asked(1)
        stage.p_may.set()
        await stage.sealed()
        stage.d_may.set()
        assert (await client.answer()).status == 200


async def test_when_p_dies_another_p_takes_over_and_d_is_not_told_otherwise(engine: Any, router: Any) -> None:
    """1. P0 and D are asked. 2. P0 dies. 3. P1 is asked; D waits on. 4. P1 answers: only now is the ticket sealed."""
    stage = await make(engine, router, prefills=2)
    other = asyncio.Event()
    stage.prefills[0].script(stage.when(stage.p_may, drop()))
    stage.prefills[1].script(stage.when(other))
    stage.d.script(stage.when(stage.d_may))
    async with await RawClient.open(stage.port) as client:
        client.post("/v1/completions", {"prompt": "a"})
        await stage.d.asked(1)
        stage.p_may.set()
        await stage.prefills[1].asked(1)
        assert stage.pool.sealed == []
        other.set()
        await stage.sealed()
        stage.d_may.set()
        answer = await client.answer()
    assert answer.headers["x-kvrelay-prefill"] == "p1"
    assert len(stage.d.requests) == 1


async def test_when_no_p_can_be_reached_d_is_asked_alone(engine: Any, router: Any) -> None:
    decode, pool = await engine(), FakePool()
    service = await router(["http://127.0.0.1:1"], [decode], pool=pool.connect, dispatch="overlapped")
    answer = await post(service.port, "/v1/completions", {"prompt": "a"})
    assert answer.status == 200
    assert "overlapped" not in told(decode)
    assert decode.requests[0].json["kv_transfer_params"]["do_remote_prefill"] is False


async def test_when_d_has_all_it_needs_p_is_broken_off(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """1. Both are asked. 2. D, which has the prompt, begins to answer. 3. P's leg is closed; D's goes on."""
    monkeypatch.setattr(prefilling, "PREFILL_GRACE_S", 0.0)
    gate = asyncio.Semaphore(1)
    stage.p.script(hang())
    stage.d.script(stream([b"data: 1\n\n", DONE], gate=gate))
    async with await RawClient.open(stage.port) as client:
        client.post("/v1/completions", ASK)
        assert (await client.head())[0] == 200
        assert await client.chunk() == b"data: 1\n\n"
        await stage.p.left_by(1)
        gate.release()
        assert await client.chunk() == DONE
        assert await client.chunk() == b""


async def test_an_answer_that_ends_before_p_does_ends_p(stage: Stage) -> None:
    stage.p.script(hang())
    assert (await post(stage.port, "/v1/completions", {"prompt": "a"})).status == 200
    await stage.p.left_by(1)


async def test_a_request_that_d_refuses_is_refused_and_p_is_let_go(stage: Stage) -> None:
    stage.p.script(hang())
    stage.d.script(fail(400, "no such thing"))
    answer = await post(stage.port, "/v1/completions", {"prompt": "a"})
    assert (answer.status, answer.json["error"]["message"]) == (400, "no such thing")
    await stage.p.left_by(1)
    await stage.pool.all_ended()


async def test_when_d_fails_another_d_is_asked_while_p_goes_on(engine: Any, router: Any) -> None:
    stage = await make(engine, router, decodes=2)
    stage.p.script(stage.when(stage.p_may))
    stage.decodes[0].script(fail(503))
    stage.decodes[1].script(stage.when(stage.d_may))
    async with await RawClient.open(stage.port) as client:
        client.post("/v1/completions", {"prompt": "a"})
        await stage.decodes[1].asked(1)
        assert told(stage.decodes[1])["overlapped"] is True
        stage.p_may.set()
        await stage.sealed()
        stage.d_may.set()
        answer = await client.answer()
    assert (answer.status, answer.headers["x-kvrelay-decode"]) == (200, "d1")
    assert len(stage.p.requests) == 1


async def test_when_d_fails_after_p_has_answered_the_next_d_is_not_told_to_follow(engine: Any, router: Any) -> None:
    stage = await make(engine, router, decodes=2)
    stage.decodes[0].script(stage.when(stage.d_may, fail(503)))
    async with await RawClient.open(stage.port) as client:
        client.post("/v1/completions", {"prompt": "a"})
        await stage.decodes[0].asked(1)
        await stage.sealed()
        stage.d_may.set()
        assert (await client.answer()).status == 200
    assert "overlapped" not in told(stage.decodes[1])


@pytest.mark.parametrize("answered", [False, True])
async def test_a_client_that_leaves_while_both_are_under_way_frees_everything(stage: Stage, answered: bool) -> None:
    stage.p.script(stage.when(stage.p_may))
    stage.d.script(hang())
    async with await RawClient.open(stage.port) as client:
        client.post("/v1/completions", ASK)
        await stage.d.asked(1)
        if answered:
            stage.p_may.set()
            await stage.sealed()
        client.abort()
        await stage.d.left_by(1)
        if not answered:
            await stage.p.left_by(1)
    await stage.pool.all_ended()


async def test_a_client_that_leaves_during_the_answer_frees_p_too(stage: Stage) -> None:
    stage.p.script(hang())
    stage.d.script(stream([b"data: 1\n\n"], ending="hang"))
    async with await RawClient.open(stage.port) as client:
        client.post("/v1/completions", ASK)
        await client.head()
        assert await client.chunk() == b"data: 1\n\n"
        client.abort()
        await stage.d.left_by(1)
        await stage.p.left_by(1)
    await stage.pool.all_ended()


async def test_a_prefill_that_takes_too_long_is_given_up_and_d_told(engine: Any, router: Any) -> None:
    stage = await make(engine, router, prefill_timeout_s=0.1)
    stage.p.script(hang())
    stage.d.script(stage.when(stage.d_may))
    async with await RawClient.open(stage.port) as client:
        client.post("/v1/completions", {"prompt": "a"})
        await stage.d.asked(1)
        await stage.sealed()
        await stage.p.left_by(1)
        stage.d_may.set()
        assert (await client.answer()).status == 200


async def test_a_pool_that_is_lost_meanwhile_costs_the_proof_and_nothing_else(stage: Stage) -> None:
    stage.p.script(stage.when(stage.p_may))
    stage.d.script(stage.when(stage.d_may))
    async with await RawClient.open(stage.port) as client:
        client.post("/v1/completions", {"prompt": "a"})
        await stage.d.asked(1)
        await stage.pool.close()
        stage.p_may.set()
        stage.d_may.set()
        assert (await client.answer()).status == 200


@pytest.mark.parametrize("groups", ["sliding_window(96)", "full_attention:2;sliding_window(96):0-1"])
async def test_engines_that_load_all_or_nothing_are_asked_when_all_is_there(
    engine: Any, router: Any, groups: str
) -> None:
    """What P has not written when D is asked, D would compute."""
    stage = await make(engine, router, groups=groups)
    async with asyncio.timeout(5.0):
        await stage.pool.listed.wait()
    stage.p.script(stage.when(stage.p_may))
    async with await RawClient.open(stage.port) as client:
        client.post("/v1/completions", {"prompt": "a"})
        await stage.p.asked(1)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await stage.d.asked(1)
        stage.p_may.set()
        assert (await client.answer()).status == 200
    assert "overlapped" not in told(stage.d)


@pytest.mark.parametrize("why", ["no ticket", "fail", "prompt_logprobs"])
async def test_without_a_ticket_or_with_more_to_wait_for_the_legs_go_one_after_the_other(
    engine: Any, router: Any, why: str
) -> None:
    stage = await make(engine, router, ticket_timeout_s=0.01 if why == "no ticket" else 20.0)
    headers = "x-kvrelay-on-lost-kv: reprefill\r\n" if why == "fail" else ""
    if why == "no ticket":
        stage.pool.hold = asyncio.Event()  # it is slow
    stage.p.script(stage.when(stage.p_may))
    async with await RawClient.open(stage.port) as client:
        body = {"prompt": "a", **({"prompt_logprobs": 1} if why == "prompt_logprobs" else {})}
        client.post("/v1/completions", body, headers=headers)
        if why != "prompt_logprobs":
            await stage.p.asked(1)
            assert stage.d.requests == []
        stage.p_may.set()
        assert (await client.answer()).status == 200
    assert "overlapped" not in told(stage.d)
