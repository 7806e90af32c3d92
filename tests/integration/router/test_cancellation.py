"""A client that goes away, at every point: both engines are let go, and the ticket ends."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvrelay.errors import PoolUnavailableError
from kvrelay.router import relay, tickets
from kvrelay.testing.fake_engine import DONE, Exchange, FakeEngine, hang, stream
from kvrelay.testing.fake_tickets import FakePool
from kvrelay.testing.raw_http import RawClient, get, post

ASK = {"prompt": "a", "stream": True}


async def cancelled_in(port: int) -> str:
    text = (await get(port, "/metrics")).body.decode()
    (line,) = [line for line in text.splitlines() if line.startswith("kvrelay_router_cancelled_total{")]
    assert line.endswith(" 1.0")
    return line.split('"')[1]


@pytest.fixture
async def trio(engine: Any, router: Any) -> tuple[FakeEngine, FakeEngine, FakePool, int]:
    prefill, decode, pool = await engine(), await engine(), FakePool()
    service = await router([prefill], [decode], pool=pool.connect)
    return prefill, decode, pool, service.port


Trio = tuple[FakeEngine, FakeEngine, FakePool, int]


async def test_during_the_prefill_leg(trio: Trio) -> None:
    prefill, decode, pool, port = trio
    prefill.script(hang())
    async with await RawClient.open(port) as client:
        client.post("/v1/completions", ASK)
        await prefill.asked(1)
        client.abort()
        await prefill.left_by(1)
    await pool.all_ended()
    assert decode.requests == []
    assert await cancelled_in(port) == "prefilling"


async def test_while_the_ticket_is_being_opened(trio: Trio) -> None:
    """1. The pool is asked. 2. The client goes. 3. The pool opens the ticket all the same: it must be ended."""
    prefill, _, pool, port = trio
    pool.hold = asyncio.Event()
    async with await RawClient.open(port) as client:
        client.post("/v1/completions", ASK)
        await pool.changed.wait()
        client.abort()
    await pool.all_ended()
    assert prefill.requests == []
    assert await cancelled_in(port) == "issued"


async def test_between_the_legs(trio: Trio) -> None:
    prefill, decode, pool, port = trio
    decode.script(hang())
    async with await RawClient.open(port) as client:
        client.post("/v1/completions", ASK)
        await decode.asked(1)
        client.abort()
        await decode.left_by(1)
    await pool.all_ended()
    assert len(prefill.requests) == 1
    assert prefill.gone == []
    assert await cancelled_in(port) == "migrating"


async def test_while_streaming(trio: Trio) -> None:
    _, decode, pool, port = trio
    decode.script(stream([b"data: 1\n\n"], ending="hang"))
    async with await RawClient.open(port) as client:
        client.post("/v1/completions", ASK)
        await client.head()
        assert await client.chunk() == b"data: 1\n\n"
        client.abort()
        await decode.left_by(1)
    await pool.all_ended()
    assert await cancelled_in(port) == "decoding"


# --- a client that leaves with the last event ---


async def outcomes(port: int) -> tuple[list[str], list[str]]:
    """Who was cancelled, and how requests came out, as the metrics have it."""
    lines = (await get(port, "/metrics")).body.decode().splitlines()
    asked = [line for line in lines if line.startswith("kvrelay_router_requests_total{") and "/v1/" in line]
    return [line for line in lines if line.startswith("kvrelay_router_cancelled_total{")], asked


async def until_counted(port: int) -> tuple[list[str], list[str]]:
    """The same, once a request has come out."""
    async with asyncio.timeout(10):
        while not (told := await outcomes(port))[1]:
            pass
    return told


def ok(endpoint: str) -> tuple[list[str], list[str]]:
    return [], [f'kvrelay_router_requests_total{{endpoint="{endpoint}",outcome="ok"}} 1.0']


STOPPED = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
COMPLETED = b'event: response.completed\ndata: {"type":"response.completed"}\n\n'


@pytest.mark.parametrize(
    ("endpoint", "last"),
    [
        ("/v1/completions", DONE),
        ("/v1/chat/completions", DONE),
        ("/v1/messages", STOPPED),
        ("/v1/responses", COMPLETED),
        ("/v1/audio/transcriptions", DONE),
    ],
)
async def test_after_the_last_event_it_has_had_its_answer_and_the_engine_keeps_its_connection(
    trio: Trio, endpoint: str, last: bytes
) -> None:
    """1. The last event reaches the client. 2. It leaves, as `openai` does. 3. The engine ends the stream."""
    _, decode, _, port = trio
    left = asyncio.Event()

    async def end_late(exchange: Exchange) -> None:
        exchange.head(200, "text/event-stream; charset=utf-8")
        exchange.chunk(last)
        await left.wait()
        exchange.end()

    decode.script(end_late)
    async with await RawClient.open(port) as client:
        client.post(endpoint, {**ASK, "input": "a", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2})
        await client.head()
        assert await client.chunk() == last
    for _ in range(20):  # turns of the loop: the router learns of it
        await asyncio.sleep(0)
    left.set()
    assert await until_counted(port) == ok(endpoint)
    assert decode.gone == []


@pytest.mark.parametrize("headers", ["", "x-kvrelay-proof: yes\r\n", "x-kvrelay-on-lost-kv: reprefill\r\n"])
async def test_after_the_last_event_an_engine_that_does_not_end_the_stream_is_let_go(
    trio: Trio, headers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "END_GRACE_S", 0.01)
    _, decode, pool, port = trio
    decode.script(stream([DONE], ending="hang"))
    async with await RawClient.open(port) as client:
        client.post("/v1/completions", ASK, headers=headers)
        await client.head()
        assert await client.chunk() == DONE
    await decode.left_by(1)
    assert await until_counted(port) == ok("/v1/completions")
    await pool.all_ended()


async def test_while_the_proof_is_waited_for_behind_the_last_event(trio: Trio) -> None:
    _, decode, pool, port = trio
    decode.script(stream([DONE]))
    async with await RawClient.open(port) as client:
        client.post("/v1/completions", ASK, headers="x-kvrelay-proof: yes\r\n")
        await client.head()
        assert await client.chunk() == DONE
    assert await until_counted(port) == ok("/v1/completions")
    assert decode.gone == []
    await pool.all_ended()


async def test_before_the_last_event_is_whole_it_has_not_had_its_answer(trio: Trio) -> None:
    _, decode, pool, port = trio
    decode.script(stream([b"data: 1\n\n", b"data: [DONE]"], ending="hang"))
    async with await RawClient.open(port) as client:
        client.post("/v1/completions", ASK)
        await client.head()
        assert await client.chunk() == b"data: 1\n\n"
    await decode.left_by(1)
    await pool.all_ended()
    assert await cancelled_in(port) == "decoding"


# --- the rest ---


async def test_by_closing_only_its_sending_side(trio: Trio) -> None:
    prefill, _, pool, port = trio
    prefill.script(hang())
    async with await RawClient.open(port) as client:
        client.post("/v1/completions", ASK)
        await prefill.asked(1)
        client.finish_sending()
        await prefill.left_by(1)
    await pool.all_ended()


async def test_with_another_request_pipelined_behind(trio: Trio) -> None:
    prefill, decode, pool, port = trio
    prefill.script(hang())
    async with await RawClient.open(port) as client:
        client.post("/v1/completions", ASK)
        client.post("/v1/completions", ASK)
        await prefill.asked(1)
        client.abort()
        await prefill.left_by(1)
    await pool.all_ended()
    assert len(prefill.requests) == 1
    assert decode.requests == []


async def test_a_request_passed_through_is_let_go_too(trio: Trio) -> None:
    _, decode, _, port = trio
    decode.script(hang())
    async with await RawClient.open(port) as client:
        client.post("/v1/embeddings", {"input": "a"})
        await decode.asked(1)
        client.abort()
        await decode.left_by(1)


async def test_a_stopping_router_cuts_off_what_does_not_end(engine: Any, router: Any) -> None:
    prefill, decode, pool = await engine(), await engine(), FakePool()
    decode.script(stream([b"data: 1\n\n"], ending="hang"))
    service = await router([prefill], [decode], pool=pool.connect, drain_timeout_s=0.1)
    async with await RawClient.open(service.port) as client:
        client.post("/v1/completions", ASK)
        await client.head()
        assert await service.stop() == 1
        await decode.left_by(1)
    assert pool.closed


async def test_a_stopping_router_lets_requests_end(engine: Any, router: Any) -> None:
    prefill, decode = await engine(), await engine()
    gate = asyncio.Semaphore(0)
    decode.script(stream([b"data: 1\n\n", DONE], gate=gate))
    service = await router([prefill], [decode], drain_timeout_s=10.0)
    async with await RawClient.open(service.port) as client, await RawClient.open(service.port) as idle:
        client.post("/v1/completions", ASK)
        await decode.asked(1)
        stopping = asyncio.create_task(service.stop())
        assert await idle.rest() == b""
        gate.release()
        await client.head()
        assert await client.chunk() == b"data: 1\n\n"
        gate.release()
        assert await client.chunk() == DONE
        assert await client.chunk() == b""
        assert await client.rest() == b""
        assert await stopping == 0


async def test_proofs_reach_the_record_and_the_ticket_ends(trio: Trio) -> None:
    _, decode, pool, port = trio

    async def prove(exchange: Any) -> None:
        name = exchange.request.json["kv_transfer_params"]["kvrelay"]["handover"]
        pool.notes[name] = [PROOF.replace(b"HO", name.encode()).replace(b"ID", str(i).encode()) for i in range(2)]
        await decode.answer_well(exchange)

    decode.script(prove)
    answer = await post(port, "/v1/completions", {"prompt": "a", "n": 2, "temperature": 1})
    handover = answer.headers["x-kvrelay-handover"]
    record = (await get(port, f"/kvrelay/handovers/{handover}")).json
    assert [proof["request_id"] for proof in record["proofs"]] == ["0", "1"]
    await pool.all_ended()
    assert pool.ended == [handover]
    metrics = (await get(port, "/metrics")).body.decode()
    assert 'prompt_tokens_total{source="handed_over"} 18.0' in metrics
    assert 'prompt_tokens_total{source="recomputed"} 2.0' in metrics
    assert 'recomputes_total{reason="partial"} 2.0' in metrics
    assert "tickets_open 0.0" in metrics


PROOF = (
    b'{"handover":"HO","request_id":"ID","worker":"D0","engine":"e","prompt_tokens":10,"handed_over_tokens":9,'
    b'"local_tokens":0,"recomputed_tokens":1,"bytes":5,"wait_ms":1.5,"transfer_ms":1.0,"reason":"partial"}'
)


async def test_a_refused_request_ends_its_ticket_without_waiting_for_a_proof(trio: Trio) -> None:
    _, decode, pool, port = trio
    decode.script(_refuse)
    answer = await post(port, "/v1/completions", {"prompt": "a"})
    assert answer.status == 400
    await pool.all_ended()
    assert "proofs_missing_total 0.0" in (await get(port, "/metrics")).body.decode()


async def _refuse(exchange: Any) -> None:
    exchange.answer(400, b"{}")


async def test_a_missing_proof_is_counted_and_does_not_hold_the_ticket(trio: Trio) -> None:
    _, _, pool, port = trio
    answer = await post(port, "/v1/completions", {"prompt": "a"})
    await pool.all_ended()
    record = (await get(port, f"/kvrelay/handovers/{answer.headers['x-kvrelay-handover']}")).json
    assert record["proofs"] == []
    assert "proofs_missing_total 1.0" in (await get(port, "/metrics")).body.decode()


async def test_requests_go_on_without_a_pool_and_with_it_again(engine: Any, router: Any) -> None:
    """1. No pool at the start. 2. It comes: a ticket is opened. 3. It goes: no ticket, no wait. 4. It comes back."""
    prefill, decode = await engine(), await engine()
    pools: list[FakePool] = []
    there = False
    arrived = asyncio.Event()

    async def connect() -> FakePool:
        if not there:
            raise PoolUnavailableError("nobody there")
        pools.append(FakePool())
        arrived.set()
        return pools[-1]

    async def up(port: int) -> bool:
        return "pool_up 1.0" in (await get(port, "/metrics")).body.decode()

    service = await router([prefill], [decode], pool=connect)
    port = service.port
    answer = await post(port, "/v1/completions", {"prompt": "a"})
    record = (await get(port, f"/kvrelay/handovers/{answer.headers['x-kvrelay-handover']}")).json
    assert record["detours"] == [{"reason": "pool_away", "worker": ""}]
    there = True
    await asyncio.wait_for(arrived.wait(), 10)
    arrived.clear()
    await post(port, "/v1/completions", {"prompt": "a"})
    await pools[0].all_ended()
    pools[0].closed = True
    there = False
    assert (await post(port, "/v1/completions", {"prompt": "a"})).status == 200
    assert not await up(port)
    there = True
    await asyncio.wait_for(arrived.wait(), 10)
    assert await up(port)
    await post(port, "/v1/completions", {"prompt": "a"})
    await pools[1].all_ended()


@pytest.fixture
def resting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pauses end when the test says so. Before the router is made."""
    monkeypatch.setattr(tickets, "SLOW_S", 3600.0)


@pytest.mark.usefixtures("resting")
async def test_a_slow_pool_is_told_of_once_waited_for_once_and_probed_by_one(
    engine: Any, router: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """1. Many ask for tickets at once; the pool gives none in time. 2. Later ones do not ask. 3. One probes: in vain.

    4. The pool is well again: the next probe closes the circuit.
    """
    prefill, decode, pool = await engine(), await engine(), FakePool()
    service = await router([prefill], [decode], pool=pool.connect, ticket_timeout_s=1.5)
    port, circuit = service.port, service._tickets._circuit
    pool.hold = asyncio.Event()

    async def crowd() -> int:
        before = pool.num_asked
        answers = await asyncio.gather(*(post(port, "/v1/completions", {"prompt": "a"}) for _ in range(10)))
        assert {answer.status for answer in answers} == {200}
        return pool.num_asked - before

    async def crowd_after_the_pause() -> int:
        circuit._until = 0.0
        return await crowd()

    assert (await crowd(), await crowd()) == (10, 0)
    assert (await crowd_after_the_pause(), await crowd()) == (1, 0)
    assert "circuit_open 1.0" in (await get(port, "/metrics")).body.decode()
    pool.hold.set()
    assert await crowd_after_the_pause() >= 1
    assert await crowd() == 10
    assert "circuit_open 0.0" in (await get(port, "/metrics")).body.decode()
    said = [record.getMessage() for record in caplog.records]
    assert sum("to open a ticket" in line for line in said) == 1


async def test_a_crowd_that_leaves_at_any_moment_leaves_nothing_behind(engine: Any, router: Any) -> None:
    """Each of 150 clients goes away after its own number of turns of the event loop; the rest get their answers."""
    engines = [await engine() for _ in range(4)]
    for fake in engines:
        fake.spread = True
    pool = FakePool()
    service = await router(engines[:2], engines[2:], pool=pool.connect)
    bodies: list[bytes] = []

    async def visit(patience: int) -> None:
        async with await RawClient.open(service.port) as client:
            client.post("/v1/completions", {**ASK, "max_tokens": 20})
            if patience % 5 == 0:
                bodies.append((await client.answer()).body)
                return
            for _ in range(patience):
                await asyncio.sleep(0)

    await asyncio.gather(*(visit(patience) for patience in range(150)))
    assert len(bodies) == 30
    assert all(body.endswith(b"data: [DONE]\n\n") for body in bodies)
    async with asyncio.timeout(10):
        while pool.open:
            pool.changed.clear()
            await pool.changed.wait()
    text = (await get(service.port, "/metrics")).body.decode()
    assert 'in_flight{role="prefill"} 0.0' in text
    assert 'in_flight{role="decode"} 0.0' in text
    assert "tickets_open 0.0" in text
