"""Ways with less than both roles: the decode engine is asked first; there is no engine of a role."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from kvrelay.router.core.health import HealthSettings
from kvrelay.testing.fake_engine import Exchange, FakeEngine, fail
from kvrelay.testing.fake_tickets import FakePool, a_loss
from kvrelay.testing.raw_http import get
from kvrelay.types import Reason

if TYPE_CHECKING:
    from kvrelay.testing.fake_engine import Behaviour

LONG = "many more words than that " * 100


def reasons(record: dict[str, Any]) -> list[str]:
    return [detour["reason"] for detour in record["detours"]]


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
    fleet_of: Any, *, stream: bool
) -> None:
    stack = await fleet_of(pool=True, settings=FIRST)
    answer = await stack.ask(LONG, stream=stream)
    assert answer.status == 200
    assert stack.asked == ([0], [1])
    assert legs(stack.decodes[0]) == [("strict", "", 1)]
    assert reasons(await stack.record(answer)) == ["full_hit"]
    assert await stack.metric('kvrelay_router_decisions_total{decision="alone",why="full_hit"} 1.0')


async def test_what_it_lacks_is_prefilled_and_the_same_engine_asked_again(fleet_of: Any) -> None:
    """1. D0 is asked and lacks something. 2. Its leg is broken off. 3. P0 prefills. 4. D0, not D1, is asked again."""
    stack = await fleet_of(1, 2, pool=True, settings=FIRST)
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


async def test_what_it_lacks_little_of_it_computes_itself(fleet_of: Any) -> None:
    stack = await fleet_of(pool=True, disaggregate_above="64", settings=FIRST)
    stack.decodes[0].script(lacks(stack.pool, missing=64))
    answer = await stack.ask(LONG)
    assert answer.status == 200
    assert stack.asked == ([0], [2])
    assert legs(stack.decodes[0]) == [("strict", "", 1), ("recompute", "", 2)]
    assert reasons(await stack.record(answer)) == ["nearly_full_hit"]


async def test_what_no_prefill_would_mend_it_computes_itself(fleet_of: Any) -> None:
    stack = await fleet_of(pool=True, settings=FIRST)
    stack.decodes[0].script(lacks(stack.pool, reason=Reason.POOL_DOWN))
    answer = await stack.ask(LONG)
    assert (answer.status, stack.asked) == (200, ([0], [2]))
    assert reasons(await stack.record(answer)) == ["kv_lost"]


async def test_a_decode_engine_that_fails_is_not_taken_for_one_that_lacks_something(fleet_of: Any) -> None:
    stack = await fleet_of(1, 2, pool=True, settings=FIRST)
    stack.decodes[0].script(fail(500))
    answer = await stack.ask(LONG)
    assert answer.status == 200
    assert stack.asked == ([0], [1, 1])
    assert legs(stack.decodes[1]) == [("strict", "", 2)]


# --- no ticket ---


@pytest.mark.parametrize("dispatch", ["sequential", "overlapped", "decode-first"])
@pytest.mark.parametrize("stream", [False, True])
async def test_while_the_pool_is_away_a_decode_engine_has_it_alone_and_nobody_prefilled(
    fleet_of: Any, dispatch: str, *, stream: bool
) -> None:
    """P could save nothing: what it computed would be for nobody."""
    stack = await fleet_of(pool=True, settings={"dispatch": dispatch})
    stack.pool.closed = True
    answer = await stack.ask(LONG, stream=stream)
    assert (answer.status, stack.asked) == (200, ([0], [1]))
    assert "x-kvrelay-prefill" not in answer.headers
    assert legs(stack.decodes[0]) == [("recompute", "", 1)]
    assert reasons(await stack.record(answer)) == ["pool_away"]
    assert await stack.metric('kvrelay_router_detours_total{reason="pool_away"} 1.0')


@pytest.mark.parametrize(("policy", "status"), [("recompute", 200), ("reprefill", 200), ("fail", 503), ("strict", 503)])
async def test_while_the_pool_is_away_the_policy_for_lost_kv_decides_whether_it_is_computed_at_all(
    fleet_of: Any, policy: str, status: int
) -> None:
    stack = await fleet_of(pool=True)
    stack.pool.closed = True
    answer = await stack.ask(LONG, headers=f"x-kvrelay-on-lost-kv: {policy}\r\n")
    assert (answer.status, stack.asked) == (status, ([0], [int(status == 200)]))


async def test_where_something_else_hands_over_a_prefill_engine_is_asked_without_the_pool_too(fleet_of: Any) -> None:
    stack = await fleet_of(pool=True, settings={"connector": "multi"})
    stack.pool.closed = True
    answer = await stack.ask(LONG)
    assert (answer.status, stack.asked) == (200, ([1], [1]))
    assert reasons(await stack.record(answer)) == ["no_ticket"]


async def test_while_the_pool_is_slow_the_prefill_engine_is_asked_first(fleet_of: Any) -> None:
    stack = await fleet_of(pool=True, settings={**FIRST, "ticket_timeout_s": 0.01})
    stack.pool.hold = asyncio.Event()
    answer = await stack.ask(LONG)
    assert stack.asked == ([1], [1])
    assert legs(stack.decodes[0]) == [("recompute", "P0", 1)]
    assert reasons(await stack.record(answer)) == ["no_ticket"]
    stack.pool.hold.set()


# --- no engine of a role ---


async def test_with_no_prefill_engine_to_ask_a_decode_engine_does_it_alone_and_that_is_counted(fleet_of: Any) -> None:
    stack = await fleet_of()
    stack.service.engines.prefills[0].draining = True
    answer = await stack.ask()
    assert (answer.status, stack.asked) == (200, ([0], [1]))
    assert reasons(await stack.record(answer)) == ["no_prefill_engine"]
    assert await stack.metric('kvrelay_router_detours_total{reason="no_prefill_engine"} 1.0')


@pytest.mark.parametrize("stream", [False, True])
async def test_with_no_live_decode_engine_the_prefill_engine_that_prefilled_answers_alone(
    fleet_of: Any, *, stream: bool
) -> None:
    stack = await fleet_of(2, 2, pool=True, colocated_fallback=True)
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


async def test_the_next_prefill_engine_answers_where_one_fails(fleet_of: Any) -> None:
    stack = await fleet_of(2, 1, colocated_fallback=True)
    await stack.decodes[0].stop()
    stack.prefills[0].script(fail(503), fail(503))
    answer = await stack.ask()
    assert answer.status == 200
    assert answer.headers["x-kvrelay-decode"] == "p1"


@pytest.mark.parametrize(("fallback", "status"), [(False, 503), (True, 200)])
async def test_the_option_says_whether_without_decode_engines_there_is_anybody(
    fleet_of: Any, *, fallback: bool, status: int
) -> None:
    stack = await fleet_of(1, 1, colocated_fallback=fallback)
    await stack.decodes[0].stop()
    assert (await stack.ask()).status == status
    assert (await get(stack.port, "/health")).status == status


async def test_a_busy_decode_engine_is_alive(fleet_of: Any) -> None:
    stack = await fleet_of(1, 1, colocated_fallback=True)
    stack.decodes[0].script(fail(429))
    assert (await stack.ask()).status == 429
    assert stack.asked == ([1], [1])


async def test_what_must_be_proven_is_not_answered_by_an_engine_that_proves_nothing(fleet_of: Any) -> None:
    stack = await fleet_of(pool=True, colocated_fallback=True, settings={"on_lost_kv": "fail"})
    await stack.decodes[0].stop()
    assert (await stack.ask()).status == 503
    assert stack.asked[0] == [1]


async def test_a_decode_engine_that_is_back_is_asked_again(fleet_of: Any) -> None:
    stack = await fleet_of(1, 1, colocated_fallback=True, settings={"health": HealthSettings(failures=1, rest_s=0.01)})
    stack.decodes[0].script(fail(500))
    assert (await stack.ask()).headers["x-kvrelay-decode"] == "p0"
    assert (await stack.ask()).headers["x-kvrelay-decode"] == "d0"
