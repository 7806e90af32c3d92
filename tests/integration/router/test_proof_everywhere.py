"""The proof in the answer, on every endpoint that is disaggregated."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from kvrelay.router.core.legs import Endpoint
from kvrelay.testing.fake_engine import DONE, Behaviour, Exchange, stream
from kvrelay.testing.fake_tickets import FakePool, a_proof
from kvrelay.testing.raw_http import post

if TYPE_CHECKING:
    from kvrelay.router.service import RouterService

ASK = {"model": "m", "prompt": "a", "messages": [{"role": "user", "content": "a"}], "input": "a", "max_tokens": 2}
WISH = "x-kvrelay-proof: yes\r\n"
EVENTS = [b'event: x\ndata: {"type":"x","n":1}\n\n', b'event: y\ndata: {"type":"y"}\n\n']
LAST = {
    Endpoint.RESPONSES: b"event: response.completed\ndata: {}\n\n",
    Endpoint.MESSAGES: b"event: message_stop\ndata: {}\n\n",
}
WANTED = {"decode": "D0", "prefills": ["P0"], "expected": 1, "proofs": 1, "recomputed_tokens": 1, "losses": []}


def proves(pool: FakePool, then: Behaviour | None = None) -> Behaviour:
    """Tell what was found, then answer."""

    async def behave(exchange: Exchange) -> None:
        pool.post(a_proof(exchange.request.json["kv_transfer_params"]["kvrelay"]))
        await (then or exchange.engine.answer_well)(exchange)

    return behave


async def ask(engine: Any, router: Any, path: str, body: dict[str, Any], then: Behaviour | None) -> Any:
    pool = FakePool()
    prefill, decode = await engine(), await engine()
    decode.script(proves(pool, then))
    service: RouterService = await router([prefill], [decode], pool=pool.connect)
    answer = await post(service.port, path, body, headers=WISH)
    assert answer.status == 200
    return answer


@pytest.mark.parametrize("path", list(Endpoint))
async def test_a_whole_answer_has_its_proof_in_a_header(engine: Any, router: Any, path: str) -> None:
    answer = await ask(engine, router, path, ASK, None)
    proof = msgspec.json.decode(answer.headers["x-kvrelay-proof"].upper().encode())
    assert proof["HANDOVER"] == answer.headers["x-kvrelay-handover"].upper()
    assert (proof["PROOFS"], proof["EXPECTED"], proof["RECOMPUTED_TOKENS"]) == (1, 1, 1)


async def test_each_hand_overs_proof_is_a_debug_line(
    engine: Any, router: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", "kvrelay.router.tickets")
    answer = await ask(engine, router, Endpoint.COMPLETIONS, ASK, None)
    (line,) = [said for said in caplog.messages if said.startswith("hand-over: ")]
    told = msgspec.json.decode(line.removeprefix("hand-over: "))
    assert told["handover"] == answer.headers["x-kvrelay-handover"]
    assert {name: told[name] for name in WANTED} == WANTED


@pytest.mark.parametrize("path", list(Endpoint))
async def test_a_stream_ends_with_its_proof_and_is_otherwise_the_engines(engine: Any, router: Any, path: str) -> None:
    events = [*EVENTS, LAST.get(Endpoint(path), DONE)]
    answer = await ask(engine, router, path, {**ASK, "stream": True}, stream(events))
    said, comment = answer.body.split(b": kvrelay ")
    assert said == b"".join(events)
    assert comment.endswith(b"\n\n")
    proof = msgspec.json.decode(comment)
    assert {name: proof[name] for name in WANTED} == WANTED
    assert proof["handover"] == answer.headers["x-kvrelay-handover"]
