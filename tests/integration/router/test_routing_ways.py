"""Which engines a request goes to: policies, conditional disaggregation, decode-first, colocated fallback."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from kvrelay.router.core.conditional import Conditional, FixedThreshold
from kvrelay.router.core.health import HealthSettings
from kvrelay.router.core.routing import RoutingSettings
from kvrelay.testing.fake_engine import Exchange, FakeEngine, fail
from kvrelay.testing.fake_tickets import FakePool, a_loss, a_proof
from kvrelay.testing.raw_http import Answer, RawClient, get, post
from kvrelay.types import Reason

if TYPE_CHECKING:
    from kvrelay.router.service import RouterService
    from kvrelay.testing.fake_engine import Behaviour

PATH = "/v1/completions"
CHAT = "/v1/chat/completions"
SHORT, LONG = "ten words " * 4, "many more words than that " * 100


class Stack:
    """Engines of both roles, a pool and a router."""

    def __init__(
        self, prefills: list[FakeEngine], decodes: list[FakeEngine], pool: FakePool, service: RouterService
    ) -> None:
        self.prefills, self.decodes, self.pool, self.service = prefills, decodes, pool, service

    @property
    def port(self) -> int:
        return self.service.port

    @property
    def routing(self) -> Any:
        return self.service._disaggregator.routing

    async def ask(self, prompt: object = SHORT, headers: str = "", path: str = PATH, **more: Any) -> Answer:
        return await post(self.port, path, {"prompt": prompt, "model": "m", "max_tokens": 2, **more}, headers=headers)

    async def record(self, answer: Answer) -> dict[str, Any]:
        return (await get(self.port, f"/kvrelay/handovers/{answer.headers['x-kvrelay-handover']}")).json

    async def metric(self, line: str) -> bool:
        return line in (await get(self.port, "/metrics")).body.decode()

    @property
    def asked(self) -> tuple[list[int], list[int]]:
        """How many requests each engine got."""
        prefills = [len(engine.requests) for engine in self.prefills]
        return prefills, [len(engine.requests) for engine in self.decodes]


@pytest.fixture
async def start(engine: Any, router: Any) -> Any:
    async def begin(
        prefills: int = 1, decodes: int = 1, *, pool: bool = False, settings: Any = None, **routing: Any
    ) -> Stack:
        p, d, fake = [await engine() for _ in range(prefills)], [await engine() for _ in range(decodes)], FakePool()
        given = {"pool": fake.connect} if pool else {}
        service = await router(p, d, routing=RoutingSettings(**routing), **given, **(settings or {}))
        return Stack(p, d, fake, service)

    return begin


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
async def test_a_session_keeps_its_engines(start: Any, told: Any) -> None:
    stack: Stack = await start(3, 3, policy="consistent-hash")
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


async def test_the_header_that_names_a_session_can_be_chosen(start: Any) -> None:
    stack: Stack = await start(1, 4, policy="consistent-hash", session_header="X-Chat")
    answers = [await stack.ask(headers="x-chat: 1\r\n", user=f"{number}") for number in range(6)]
    assert len({answer.headers["x-kvrelay-decode"] for answer in answers}) == 1


async def test_each_role_has_a_policy_of_its_own(start: Any) -> None:
    stack: Stack = await start(2, 2, prefill_policy="prefix-aware")
    for number in range(4):
        await stack.ask(LONG + f"{number}")
    prefills, decodes = stack.asked
    assert sorted(prefills) == [0, 4]
    assert decodes == [2, 2]


async def test_prompts_of_other_models_and_salts_have_nothing_in_common(start: Any) -> None:
    stack: Stack = await start(4, 1, prefill_policy="prefix-aware")
    for model, salt in (("m", "a"), ("m", "b"), ("n", "a"), ("n", "b")):
        await stack.ask(LONG, model=model, cache_salt=salt)
    assert stack.asked[0] == [1, 1, 1, 1]


async def test_the_least_loaded_engine_is_the_one_that_is_not_working(start: Any) -> None:
    stack: Stack = await start(1, 2, policy="least-loaded")
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


async def test_latencies_are_measured_where_a_policy_wants_them(start: Any) -> None:
    stack: Stack = await start(1, 1, policy="latency")
    await stack.ask(stream=True, max_tokens=8)
    (prefill,), (decode,) = stack.service.engines.prefills, stack.service.engines.decodes
    assert prefill.load.ttft.count == decode.load.ttft.count == decode.load.itl.count == 1
    assert (decode.load.in_flight, decode.load.in_flight_tokens) == (0, 0)


# --- conditional disaggregation ---


@pytest.mark.parametrize("dispatch", ["sequential", "overlapped", "decode-first"])
async def test_a_short_prompt_goes_to_a_decode_engine_alone(start: Any, dispatch: str) -> None:
    stack: Stack = await start(pool=True, disaggregate_above="50", settings={"dispatch": dispatch})
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


async def test_a_long_prompt_is_disaggregated(start: Any) -> None:
    stack: Stack = await start(disaggregate_above="50")
    answer = await stack.ask(LONG)
    assert stack.asked == ([1], [1])
    record = await stack.record(answer)
    assert (reasons(record), record["verdict"]["why"]) == ([], "long")


@pytest.mark.parametrize(("count", "alone"), [(50, True), (51, False)])
async def test_token_ids_are_counted_exactly(start: Any, count: int, *, alone: bool) -> None:
    stack: Stack = await start(disaggregate_above="50")
    answer = await stack.ask(list(range(1_000, 1_000 + count)))
    assert (await stack.record(answer))["verdict"]["tokens"] == count
    assert stack.asked[0] == [0 if alone else 1]


async def test_how_many_bytes_make_a_token_is_learnt_from_what_engines_count(start: Any) -> None:
    stack: Stack = await start(disaggregate_above="200")
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


async def test_images_have_no_size_and_words_do(start: Any) -> None:
    stack: Stack = await start(disaggregate_above="500")
    image = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]
    answer = await stack.ask(path=CHAT, prompt=None, messages=[{"role": "user", "content": image}])
    assert (await stack.record(answer))["verdict"]["why"] == "unsized"
    assert stack.asked[0] == [1]
    await stack.ask(path=CHAT, prompt=None, messages=[{"role": "user", "content": "hello"}])
    assert stack.asked[0] == [1]


async def test_a_prompt_whose_beginning_a_decode_engine_has_goes_there_alone(start: Any) -> None:
    stack: Stack = await start(1, 3, disaggregate_above="100")
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


async def test_proofs_that_the_cache_had_less_make_the_router_count_on_less(start: Any) -> None:
    """1. D0 is thought to have the prompt. 2. It proves that it had nothing of it. 3. The prompt goes to P again."""
    stack: Stack = await start(pool=True, disaggregate_above="100")

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


async def test_an_engine_that_was_away_is_not_thought_to_have_what_it_had(start: Any, engine: Any) -> None:
    stack: Stack = await start(1, 1, disaggregate_above="100", settings={"health": HealthSettings(failures=1)})
    await stack.ask(LONG)
    port = stack.decodes[0].port
    await stack.decodes[0].stop()
    assert (await stack.ask(LONG)).status == 503
    await engine(port=port)
    answer = await stack.ask(LONG)
    assert answer.status == 200
    assert reasons(await stack.record(answer)) == []
    assert stack.asked[0] == [2]


async def test_a_request_that_may_recompute_nothing_is_always_disaggregated(start: Any) -> None:
    stack: Stack = await start(pool=True, disaggregate_above="1000", settings={"on_lost_kv": "strict"})

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


async def test_streams_are_measured_both_ways_and_what_went_wrong_is_not(start: Any) -> None:
    stack: Stack = await start(2, 1, disaggregate_above="auto")
    stack.routing.conditional = Conditional(noting := Noting(50))
    await stack.ask([1] * 20, stream=True)
    await stack.ask([1] * 200, stream=True)
    await stack.ask([1] * 20)
    stack.prefills[0].script(fail(500))
    stack.prefills[1].script(fail(500))
    await stack.ask([1] * 300, stream=True)
    assert noting.notes == [(20, True), (200, False)]


async def test_a_threshold_that_was_learnt_decides(start: Any) -> None:
    stack: Stack = await start(disaggregate_above="auto")
    assert await stack.metric("kvrelay_router_disaggregate_above_tokens 0.0")
    threshold = stack.routing.conditional.threshold
    for now in range(8):
        threshold.measured(100, 0.01, float(now), alone=True)
        threshold.measured(100, 1.0, float(now), alone=False)
    answers = [await stack.ask([1] * 100) for _ in range(20)]
    whys = [(await stack.record(answer))["verdict"]["why"] for answer in answers]
    assert set(whys) <= {"short", "explored"}
    assert whys.count("short") >= 10


# --- decode first ---


def lacks(pool: FakePool, missing: int = 60, reason: Reason = Reason.MISS) -> Behaviour:
    """Tell that the KV is not all there and wait to be broken off."""

    async def behave(exchange: Exchange) -> None:
        told = exchange.request.json["kv_transfer_params"]["kvrelay"]
        pool.post(a_loss(told, reason=reason, missing=missing))
        await exchange.gone.wait()

    return behave


FIRST = {"dispatch": "decode-first"}


def legs(engine: FakeEngine) -> list[tuple[str, str, int]]:
    said = [leg.json["kv_transfer_params"]["kvrelay"] for leg in engine.requests]
    return [(leg["policy"], leg["prefill"], leg["attempt"]) for leg in said]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_decode_engine_that_has_everything_answers_and_no_prefill_engine_is_asked(
    start: Any, *, stream: bool
) -> None:
    stack: Stack = await start(pool=True, settings=FIRST)
    answer = await stack.ask(LONG, stream=stream)
    assert answer.status == 200
    assert stack.asked == ([0], [1])
    assert legs(stack.decodes[0]) == [("strict", "", 1)]
    assert reasons(await stack.record(answer)) == ["full_hit"]
    assert await stack.metric('kvrelay_router_decisions_total{decision="alone",why="full_hit"} 1.0')


async def test_what_it_lacks_is_prefilled_and_the_same_engine_asked_again(start: Any) -> None:
    """1. D0 is asked and lacks something. 2. Its leg is broken off. 3. P0 prefills. 4. D0, not D1, is asked again."""
    stack: Stack = await start(1, 2, pool=True, settings=FIRST)
    stack.decodes[0].script(lacks(stack.pool))
    answer = await stack.ask(LONG, stream=True)
    assert answer.status == 200
    assert stack.asked == ([1], [2, 0])
    assert legs(stack.decodes[0]) == [("strict", "", 1), ("recompute", "P0", 2)]
    assert len(stack.decodes[0].gone) == 1
    record = await stack.record(answer)
    assert reasons(record) == []
    assert [loss["missing_tokens"] for loss in record["losses"]] == [60]
    assert await stack.metric('kvrelay_router_decisions_total{decision="disaggregated",why="miss"} 1.0')
    assert await stack.metric('kv_lost_total{action="prefill",reason="miss"} 1.0')
    await stack.pool.all_ended()


async def test_what_it_lacks_little_of_it_computes_itself(start: Any) -> None:
    stack: Stack = await start(pool=True, disaggregate_above="64", settings=FIRST)
    stack.decodes[0].script(lacks(stack.pool, missing=64))
    answer = await stack.ask(LONG)
    assert answer.status == 200
    assert stack.asked == ([0], [2])
    assert legs(stack.decodes[0]) == [("strict", "", 1), ("recompute", "", 2)]
    assert reasons(await stack.record(answer)) == ["nearly_full_hit"]


async def test_what_no_prefill_would_mend_it_computes_itself(start: Any) -> None:
    stack: Stack = await start(pool=True, settings=FIRST)
    stack.decodes[0].script(lacks(stack.pool, reason=Reason.POOL_DOWN))
    answer = await stack.ask(LONG)
    assert (answer.status, stack.asked) == (200, ([0], [2]))
    assert reasons(await stack.record(answer)) == ["kv_lost"]


async def test_a_decode_engine_that_fails_is_not_taken_for_one_that_lacks_something(start: Any) -> None:
    stack: Stack = await start(1, 2, pool=True, settings=FIRST)
    stack.decodes[0].script(fail(500))
    answer = await stack.ask(LONG)
    assert answer.status == 200
    assert stack.asked == ([0], [1, 1])
    assert legs(stack.decodes[1]) == [("strict", "", 2)]


async def test_while_the_pool_is_away_the_prefill_engine_is_asked_first(start: Any) -> None:
    stack: Stack = await start(pool=True, settings=FIRST)
    stack.pool.closed = True
    answer = await stack.ask(LONG)
    assert stack.asked == ([1], [1])
    assert legs(stack.decodes[0]) == [("recompute", "P0", 1)]
    assert reasons(await stack.record(answer)) == ["no_ticket"]


# --- no engine of a role ---


async def test_with_no_prefill_engine_to_ask_a_decode_engine_does_it_alone_and_that_is_counted(start: Any) -> None:
    stack: Stack = await start()
    stack.service.engines.prefills[0].draining = True
    answer = await stack.ask()
    assert (answer.status, stack.asked) == (200, ([0], [1]))
    assert reasons(await stack.record(answer)) == ["no_prefill_engine"]
    assert await stack.metric('kvrelay_router_detours_total{reason="no_prefill_engine"} 1.0')


@pytest.mark.parametrize("stream", [False, True])
async def test_with_no_live_decode_engine_the_prefill_engine_that_prefilled_answers_alone(
    start: Any, *, stream: bool
) -> None:
    stack: Stack = await start(2, 2, pool=True, colocated_fallback=True)
    for decode in stack.decodes:
        await decode.stop()
    answer = await stack.ask(max_tokens=3, stream=stream)
    assert answer.status == 200
    assert b" t2" in answer.body
    assert stack.asked == ([2, 0], [0, 0])
    alone = stack.prefills[0].requests[1].json
    assert alone["max_tokens"] == 3
    assert "kv_transfer_params" not in alone
    assert answer.headers["x-kvrelay-decode"] == "p0"
    record = await stack.record(answer)
    assert reasons(record)[-1] == "colocated"
    await stack.pool.all_ended()


async def test_the_next_prefill_engine_answers_where_one_fails(start: Any) -> None:
    stack: Stack = await start(2, 1, colocated_fallback=True)
    await stack.decodes[0].stop()
    stack.prefills[0].script(fail(503), fail(503))
    answer = await stack.ask()
    assert answer.status == 200
    assert answer.headers["x-kvrelay-decode"] == "p1"


@pytest.mark.parametrize(("fallback", "status"), [(False, 503), (True, 200)])
async def test_the_option_says_whether_without_decode_engines_there_is_anybody(
    start: Any, *, fallback: bool, status: int
) -> None:
    stack: Stack = await start(1, 1, colocated_fallback=fallback)
    await stack.decodes[0].stop()
    assert (await stack.ask()).status == status
    assert (await get(stack.port, "/health")).status == status


async def test_a_busy_decode_engine_is_alive(start: Any) -> None:
    stack: Stack = await start(1, 1, colocated_fallback=True)
    stack.decodes[0].script(fail(429))
    assert (await stack.ask()).status == 429
    assert stack.asked == ([1], [1])


async def test_what_must_be_proven_is_not_answered_by_an_engine_that_proves_nothing(start: Any) -> None:
    stack: Stack = await start(pool=True, colocated_fallback=True, settings={"on_lost_kv": "fail"})
    await stack.decodes[0].stop()
    assert (await stack.ask()).status == 503
    assert stack.asked[0] == [1]


async def test_a_decode_engine_that_is_back_is_asked_again(start: Any) -> None:
    stack: Stack = await start(
        1, 1, colocated_fallback=True, settings={"health": HealthSettings(failures=1, rest_s=0.01)}
    )
    stack.decodes[0].script(fail(500))
    assert (await stack.ask()).headers["x-kvrelay-decode"] == "p0"
    assert (await stack.ask()).headers["x-kvrelay-decode"] == "d0"
