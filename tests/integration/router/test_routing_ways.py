"""Which engines a request goes to: policies, conditional disaggregation."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from kvrelay.router.core.conditional import Conditional, FixedThreshold
from kvrelay.router.core.health import HealthSettings
from kvrelay.testing.fake_engine import Exchange, fail
from kvrelay.testing.fake_tickets import a_proof
from kvrelay.testing.raw_http import RawClient

PATH = "/v1/completions"
CHAT = "/v1/chat/completions"
SHORT, LONG = "ten words " * 4, "many more words than that " * 100


def reasons(record: dict[str, Any]) -> list[str]:
    return [detour["reason"] for detour in record["detours"]]


# --- policies ---


@pytest.mark.parametrize(
    "told",
    [
        lambda name: ({}, f"x-session-id: {name}\r\n"),
        lambda name: ({"user": name}, ""),
        lambda name: ({"prompt_cache_key": name, "user": "all the same"}, ""),
    ],
    ids=["header", "user", "key"],
)
async def test_a_session_keeps_its_engines(fleet_of: Any, told: Any) -> None:
    stack = await fleet_of(3, 3, policy="consistent-hash")
    homes: dict[str, set[str]] = {}
    for _ in range(3):
        for number in range(6):
            more, headers = told(f"session {number}")
            answer = await stack.ask(headers=headers, **more)
            ways = f"{answer.headers['x-kvrelay-prefill']} {answer.headers['x-kvrelay-decode']}"
            homes.setdefault(f"session {number}", set()).add(ways)
    assert all(len(ways) == 1 for ways in homes.values())
    assert len(set.union(*homes.values())) > 1
    assert await stack.metric('picks_total{policy="consistent-hash",role="decode",why="session"} 18.0')


async def test_the_header_that_names_a_session_can_be_chosen(fleet_of: Any) -> None:
    stack = await fleet_of(1, 4, policy="consistent-hash", session_header="X-Chat")
    answers = [await stack.ask(headers="x-chat: 1\r\n", user=f"{number}") for number in range(6)]
    assert len({answer.headers["x-kvrelay-decode"] for answer in answers}) == 1


async def test_each_role_has_a_policy_of_its_own(fleet_of: Any) -> None:
    stack = await fleet_of(2, 2, prefill_policy="prefix-aware")
    for number in range(4):
        await stack.ask(LONG + f"{number}")
    prefills, decodes = stack.asked
    assert sorted(prefills) == [0, 4]
    assert decodes == [2, 2]


async def test_prompts_of_other_models_and_salts_have_nothing_in_common(fleet_of: Any) -> None:
    stack = await fleet_of(4, 1, prefill_policy="prefix-aware")
    for model, salt in (("m", "a"), ("m", "b"), ("n", "a"), ("n", "b")):
        await stack.ask(LONG, model=model, cache_salt=salt)
    assert stack.asked[0] == [1, 1, 1, 1]


async def test_the_least_loaded_engine_is_the_one_that_is_not_working(fleet_of: Any) -> None:
    stack = await fleet_of(1, 2, policy="least-loaded")
    working = asyncio.Event()

    async def hang_once(exchange: Exchange) -> None:
        if working.is_set():
            await exchange.engine.answer_well(exchange)
        else:
            working.set()
            await exchange.gone.wait()

    for decode in stack.decodes:
        decode.script(hang_once)
    async with await RawClient.open(stack.port) as client:
        client.post(PATH, {"prompt": "a"})
        async with asyncio.timeout(20):
            await working.wait()
        busy = stack.asked[1].index(1)
        for _ in range(5):
            await stack.ask()
    assert stack.asked[1][1 - busy] == 5


async def test_latencies_are_measured_where_a_policy_wants_them(fleet_of: Any) -> None:
    stack = await fleet_of(1, 1, policy="latency")
    await stack.ask(stream=True, max_tokens=8)
    (prefill,), (decode,) = stack.service.engines.prefills, stack.service.engines.decodes
    assert prefill.load.ttft.count == decode.load.ttft.count == decode.load.itl.count == 1
    assert (decode.load.in_flight, decode.load.in_flight_tokens) == (0, 0)


# --- conditional disaggregation ---


@pytest.mark.parametrize("dispatch", ["sequential", "overlapped", "decode-first"])
async def test_a_short_prompt_goes_to_a_decode_engine_alone(fleet_of: Any, dispatch: str) -> None:
    stack = await fleet_of(pool=True, disaggregate_above="50", settings={"dispatch": dispatch})
    answer = await stack.ask(SHORT)
    assert answer.status == 200
    assert stack.asked == ([0], [1])
    assert "x-kvrelay-prefill" not in answer.headers
    told = stack.decodes[0].requests[0].json["kv_transfer_params"]["kvrelay"]
    assert (told["prefill"], told["policy"]) == ("", "recompute")
    record = await stack.record(answer)
    assert reasons(record) == ["short"]
    expected = {"alone": True, "why": "short", "cached": 0, "above": 50, "decode": ""}
    assert expected.items() <= record["verdict"].items()
    assert 5 <= record["verdict"]["tokens"] <= 20
    assert await stack.metric('kvrelay_router_decisions_total{decision="alone",why="short"} 1.0')
    assert await stack.metric("kvrelay_router_disaggregate_above_tokens 50.0")


async def test_a_long_prompt_is_disaggregated(fleet_of: Any) -> None:
    stack = await fleet_of(disaggregate_above="50")
    answer = await stack.ask(LONG)
    assert stack.asked == ([1], [1])
    record = await stack.record(answer)
    assert (reasons(record), record["verdict"]["why"]) == ([], "long")


@pytest.mark.parametrize(("count", "alone"), [(50, True), (51, False)])
async def test_token_ids_are_counted_exactly(fleet_of: Any, count: int, *, alone: bool) -> None:
    stack = await fleet_of(disaggregate_above="50")
    answer = await stack.ask(list(range(1_000, 1_000 + count)))
    assert (await stack.record(answer))["verdict"]["tokens"] == count
    assert stack.asked[0] == [0 if alone else 1]


async def test_how_many_bytes_make_a_token_is_learnt_from_what_engines_count(fleet_of: Any) -> None:
    stack = await fleet_of(disaggregate_above="200")
    text = "x" * 1_000

    def counts(exchange: Exchange) -> Any:
        usage = {"prompt_tokens": 1_000, "completion_tokens": 1, "total_tokens": 1_001}
        exchange.answer(200, msgspec.json.encode({"choices": [], "usage": usage}))
        return asyncio.sleep(0)

    before = await stack.ask(text)
    assert (await stack.record(before))["verdict"]["tokens"] == pytest.approx(250, abs=2)
    stack.prefills[0].script(*[counts] * 8)
    for number in range(8):
        await stack.ask(text * 2, cache_salt=f"{number}")
    after = await stack.ask(text)
    assert 470 <= (await stack.record(after))["verdict"]["tokens"] <= 505


async def test_images_have_no_size_and_words_do(fleet_of: Any) -> None:
    stack = await fleet_of(disaggregate_above="500")
    image = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]
    answer = await stack.ask(path=CHAT, prompt=None, messages=[{"role": "user", "content": image}])
    assert (await stack.record(answer))["verdict"]["why"] == "unsized"
    assert stack.asked[0] == [1]
    await stack.ask(path=CHAT, prompt=None, messages=[{"role": "user", "content": "hello"}])
    assert stack.asked[0] == [1]


async def test_a_prompt_whose_beginning_a_decode_engine_has_goes_there_alone(fleet_of: Any) -> None:
    stack = await fleet_of(1, 3, disaggregate_above="100")
    first = await stack.ask(LONG)
    assert stack.asked[0] == [1]
    for turn in range(1, 4):
        answer = await stack.ask(LONG + " and so on" * turn)
        assert answer.headers["x-kvrelay-decode"] == first.headers["x-kvrelay-decode"]
        record = await stack.record(answer)
        assert reasons(record) == ["cached"]
        assert record["verdict"]["decode"].lower() == first.headers["x-kvrelay-decode"]
        assert 0 < record["verdict"]["tokens"] - record["verdict"]["cached"] <= 100
    assert stack.asked[0] == [1]
    await stack.ask(LONG, cache_salt="other")
    assert stack.asked[0] == [2]


async def test_proofs_that_the_cache_had_less_make_the_router_count_on_less(fleet_of: Any) -> None:
    """1. D0 is thought to have the prompt. 2. It proves that it had nothing of it. 3. The prompt goes to P again."""
    stack = await fleet_of(pool=True, disaggregate_above="100")

    async def had_nothing(exchange: Exchange) -> None:
        stack.pool.post(a_proof(exchange.request.json["kv_transfer_params"]["kvrelay"], recomputed=100))
        await exchange.engine.answer_well(exchange)

    stack.decodes[0].script(had_nothing, had_nothing, had_nothing)
    await stack.ask(LONG)
    await stack.pool.all_ended()
    cached = await stack.ask(LONG)
    await stack.pool.all_ended()
    assert reasons(await stack.record(cached)) == ["cached"]
    assert reasons(await stack.record(await stack.ask(LONG))) == []
    assert stack.asked[0] == [2]


async def test_an_engine_that_was_away_is_not_thought_to_have_what_it_had(fleet_of: Any, engine: Any) -> None:
    stack = await fleet_of(1, 1, disaggregate_above="100", settings={"health": HealthSettings(failures=1)})
    await stack.ask(LONG)
    port = stack.decodes[0].port
    await stack.decodes[0].stop()
    assert (await stack.ask(LONG)).status == 503
    await engine(port=port)
    answer = await stack.ask(LONG)
    assert answer.status == 200
    assert reasons(await stack.record(answer)) == []
    assert stack.asked[0] == [2]


async def test_a_request_that_may_recompute_nothing_is_always_disaggregated(fleet_of: Any) -> None:
    stack = await fleet_of(pool=True, disaggregate_above="1000", settings={"on_lost_kv": "strict"})

    async def proves(exchange: Exchange) -> None:
        stack.pool.post(a_proof(exchange.request.json["kv_transfer_params"]["kvrelay"]))
        await exchange.engine.answer_well(exchange)

    stack.decodes[0].script(proves)
    assert (await stack.ask()).status == 200
    assert stack.asked == ([1], [1])


class Noting(FixedThreshold):
    """A threshold that keeps what was measured."""

    def __init__(self, above: int) -> None:
        super().__init__(above)
        self.notes: list[tuple[int, bool]] = []

    def measured(self, rest: int, ttft_s: float, now: float, *, alone: bool) -> None:  # noqa: ARG002
        assert ttft_s > 0
        self.notes.append((rest, alone))


async def test_streams_are_measured_both_ways_and_what_went_wrong_is_not(fleet_of: Any) -> None:
    stack = await fleet_of(2, 1, disaggregate_above="auto")
    stack.routing.conditional = Conditional(noting := Noting(50))
    await stack.ask([1] * 20, stream=True)
    await stack.ask([1] * 200, stream=True)
    await stack.ask([1] * 20)
    stack.prefills[0].script(fail(500))
    stack.prefills[1].script(fail(500))
    await stack.ask([1] * 300, stream=True)
    assert noting.notes == [(20, True), (200, False)]


async def test_a_threshold_that_was_learnt_decides(fleet_of: Any) -> None:
    stack = await fleet_of(disaggregate_above="auto")
    assert await stack.metric("kvrelay_router_disaggregate_above_tokens 0.0")
    threshold = stack.routing.conditional.threshold
    for now in range(8):
        threshold.measured(100, 0.01, float(now), alone=True)
        threshold.measured(100, 1.0, float(now), alone=False)
    answers = [await stack.ask([1] * 100) for _ in range(20)]
    whys = [(await stack.record(answer))["verdict"]["why"] for answer in answers]
    assert set(whys) <= {"short", "explored"}
    assert whys.count("short") >= 10
