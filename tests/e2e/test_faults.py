"""Processes killed at the worst moment: requests are answered rightly or with a clear error, nothing is left over."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import TYPE_CHECKING

import httpx
import pytest
from asking import (
    ask,
    ask_all,
    ask_and_kill,
    assert_everybody_at_the_pool,
    assert_nothing_held,
    assert_same,
    completion,
    engines_idle,
    eventually,
    held,
    leased,
    proof,
    tokens,
    unsealed,
)

from kvrelay.testing.stack import Counters

if TYPE_CHECKING:
    from collections.abc import Callable

    from asking import Answer, Question

    from kvrelay.client.blocking import PoolClient
    from kvrelay.testing.stack import RunningStack

REVIVE_S = 300.0


@pytest.fixture(autouse=True)
def _whole(stack: RunningStack) -> None:
    """Start with everything connected, whatever an earlier test did."""
    assert_everybody_at_the_pool(stack)


def handed_over_again(stack: RunningStack, reference: RunningStack, seed: int) -> None:
    """The stack is whole again: a new prompt is handed over, and nothing of the past is held."""
    assert_everybody_at_the_pool(stack)
    question = completion(stack.model_name, tokens(333, "fault", seed))
    answer = ask(stack, question)
    assert_same(answer, ask(reference, question), "after recovery")
    assert proof(stack, answer)["recomputed_tokens"] <= 1
    assert_nothing_held(stack)
    eventually(lambda: engines_idle([*stack.prefill_urls, *stack.decode_urls]), bool, "idle engines")


def test_the_pool_killed_during_a_prefill_costs_a_recompute(stack: RunningStack, reference: RunningStack) -> None:
    def p_runs(_: PoolClient) -> bool:
        return Counters(stack.prefill_urls[0]).running > 0

    question, answer = ask_and_kill(stack, "pool", p_runs, 31, length=2000)
    assert_same(answer, ask(reference, question), "pool killed")
    undelayed = [completion(stack.model_name, tokens(200, "fault", 700 + n)) for n in range(6)]
    theirs = ask_all(reference, undelayed)
    answers = ask_all(stack, undelayed)
    for n, (ours, wanted) in enumerate(zip(answers, theirs, strict=True)):
        assert_same(ours, wanted, f"without a pool, {n}")
    took, usual = ([answer.seconds for answer in asked] for asked in (answers, theirs))
    assert median(took) < 2 * median(usual) + 3.0, f"a pool that is down delays requests: {took}, not {usual}"
    stack.revive(REVIVE_S)
    handed_over_again(stack, reference, seed=32)


def policy(name: str) -> dict[str, str]:
    """A request's own wish."""
    return {"x-kvrelay-on-lost-kv": name}


def assert_refused(answer: Answer, *, status: int = 503) -> None:
    """A clear error, and nothing generated."""
    assert answer.status == status, answer
    assert json.loads(answer.error)["error"]["message"]
    assert not answer.token_ids


@pytest.mark.parametrize("name", ["fail", "strict"])
def test_the_pool_killed_while_p_saves_refuses_what_must_not_be_computed_again(
    stack: RunningStack, reference: RunningStack, name: str
) -> None:
    _, answer = ask_and_kill(stack, "pool", unsealed, 41, name, length=2000, headers=policy(name))
    assert_refused(answer)
    stack.revive(REVIVE_S)
    handed_over_again(stack, reference, seed=42 + len(name))


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["recompute", "reprefill"])
def test_the_pool_killed_while_p_saves_costs_a_recompute_where_one_is_allowed(
    stack: RunningStack, reference: RunningStack, name: str
) -> None:
    """Another prefill would change nothing without a pool: under ``reprefill`` D computes, too."""
    question, answer = ask_and_kill(stack, "pool", unsealed, 55, name, length=2000, headers=policy(name))
    assert_same(answer, ask(reference, question), "pool killed")
    stack.revive(REVIVE_S)
    handed_over_again(stack, reference, seed=60 + len(name))


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["reprefill", "fail", "strict"])
def test_d_killed_while_it_loads_is_a_clear_error_under_every_policy_and_frees_everything(
    stack: RunningStack, reference: RunningStack, name: str
) -> None:
    _, answer = ask_and_kill(stack, "D0", leased, 51, name, length=1900, headers=policy(name))
    assert answer.status in (200, 502, 503), answer
    assert json.loads(answer.error)["error"]["message"]
    if answer.status == 200 and name != "reprefill":  # it had begun, so it was proven
        assert proof(stack, answer)["recomputed_tokens"] <= 1
    assert_nothing_held(stack)
    stack.revive(REVIVE_S)
    handed_over_again(stack, reference, seed=70 + len(name))


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["reprefill", "fail"])
def test_the_only_p_killed_while_it_saves_leaves_the_work_to_d_where_nothing_was_promised(
    stack: RunningStack, reference: RunningStack, name: str
) -> None:
    """Nobody answered the prefill leg, and no other P is there. If P had answered before, ``fail`` refuses."""
    question, answer = ask_and_kill(stack, "P0", unsealed, 56, name, length=1900, headers=policy(name))
    if answer.prefill is None or name == "reprefill":
        assert_same(answer, ask(reference, question), "P killed")
    elif answer.status == 200:
        assert proof(stack, answer)["recomputed_tokens"] <= 1
    else:
        assert_refused(answer)
    assert_nothing_held(stack)
    stack.revive(REVIVE_S)
    handed_over_again(stack, reference, seed=80 + len(name))


@pytest.mark.matrix
def test_p_killed_while_it_saves_has_another_p_compute_it_under_reprefill(
    start_stack: Callable[..., RunningStack], reference: RunningStack
) -> None:
    stack = start_stack("--prefill", "2", "--decode", "1")

    def p0_saves(pool: PoolClient) -> bool:
        return unsealed(pool) and Counters(stack.prefill_urls[0]).running > 0

    question, answer = ask_and_kill(stack, "P0", p0_saves, 53, length=1900, headers=policy("reprefill"))
    assert_same(answer, ask(reference, question), "P0 killed")
    told = proof(stack, answer)
    assert told["recomputed_tokens"] <= 1, told
    assert_nothing_held(stack)


def test_d_killed_while_it_loads_is_a_clear_error_and_frees_everything(
    stack: RunningStack, reference: RunningStack
) -> None:
    _, answer = ask_and_kill(stack, "D0", leased, 33, length=1900)
    assert answer.status in (200, 502, 503), answer  # 200 if the first token had left: then the stream ends in an error
    assert json.loads(answer.error)["error"]["message"]
    assert_nothing_held(stack)
    refused = ask(stack, completion(stack.model_name, tokens(50, "fault", 34)))
    assert refused.status in (502, 503)
    stack.revive(REVIVE_S)
    handed_over_again(stack, reference, seed=35)


def test_p_killed_while_it_saves_leaves_the_work_to_d_and_its_successor_reuses_what_was_saved(
    stack: RunningStack, reference: RunningStack
) -> None:
    first = stack.process("P0")
    question, answer = ask_and_kill(stack, "P0", unsealed, 36, length=1900)
    assert not stack.is_running("P0")
    assert_same(answer, ask(reference, question), "P killed")
    assert_nothing_held(stack)
    alone = completion(stack.model_name, tokens(300, "fault", 37))
    assert_same(ask(stack, alone), ask(reference, alone), "without P")
    stack.revive(REVIVE_S)
    assert stack.process("P0") != first
    handed_over_again(stack, reference, seed=38)
    again = completion(stack.model_name, tokens(333, "fault", 38))
    _, refused = ask_and_kill(stack, "P0", unsealed, 54, length=1900, headers=policy("strict"))
    assert refused.status in (502, 503), refused
    assert json.loads(refused.error)["error"]["message"]
    assert_nothing_held(stack)
    stack.revive(REVIVE_S)
    assert_everybody_at_the_pool(stack)
    reply = httpx.post(f"{stack.prefill_urls[0]}/v1/completions", json=again.body, timeout=120)
    assert reply.json()["choices"][0]["token_ids"] == ask(reference, again).token_ids
    loaded = eventually(
        lambda: Counters(stack.prefill_urls[0]).total("kvrelay:loaded_tokens_total"), bool, "tokens loaded by the new P"
    )
    assert loaded >= 320


def test_the_router_killed_releases_its_hand_overs(stack: RunningStack, reference: RunningStack) -> None:
    question = completion(stack.model_name, tokens(2000, "fault", 39), stream=True)
    with ThreadPoolExecutor(1) as threads:
        lost = threads.submit(lambda: _lost(stack, question))
        eventually(lambda: held(stack)["tickets"], bool, "open ticket")
        began = time.monotonic()
        stack.kill("router")
        assert lost.result(), "the client was told nothing"
    eventually(lambda: engines_idle([*stack.prefill_urls, *stack.decode_urls]), bool, "idle engines")
    assert_nothing_held(stack)
    assert time.monotonic() - began < 60.0, "as late as by a deadline"
    stack.revive(REVIVE_S)
    handed_over_again(stack, reference, seed=40)


def _lost(stack: RunningStack, question: Question) -> bool:
    try:
        ask(stack, question)
    except httpx.HTTPError:
        return True
    return False
