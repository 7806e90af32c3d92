"""KV that is gone, or damaged, between the legs: every policy, on a real stack, with right answers or clear errors."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from asking import (
    ask,
    assert_everybody_at_the_pool,
    assert_nothing_held,
    assert_same,
    completion,
    engines_idle,
    eventually,
    tokens,
)
from damage import vandal

from kvrelay.testing.stack import Counters

if TYPE_CHECKING:
    from collections.abc import Callable

    from asking import Answer

    from kvrelay.testing.stack import RunningStack

LENGTH = 900
"""P takes four steps for it."""
FIRST_STEP = 4
"""Objects that it saves: 256 tokens, 64 in each."""


@pytest.fixture(autouse=True)
def _whole(stack: RunningStack) -> None:
    """Start with everything connected, whatever an earlier test did."""
    assert_everybody_at_the_pool(stack)


def wishes(policy: str) -> dict[str, str]:
    return {"x-kvrelay-on-lost-kv": policy, "x-kvrelay-proof": "yes"}


def record(stack: RunningStack, answer: Answer) -> dict[str, Any]:
    assert answer.handover
    found: dict[str, Any] = httpx.get(f"{stack.base_url}/kvrelay/handovers/{answer.handover}", timeout=20).json()
    return found


def assert_idle(stack: RunningStack) -> None:
    assert_nothing_held(stack)
    eventually(lambda: engines_idle([*stack.prefill_urls, *stack.decode_urls]), bool, "idle engines")


@pytest.mark.parametrize("stream", [False, True])
def test_recompute_answers_rightly_and_says_what_it_cost(
    stack: RunningStack, reference: RunningStack, *, stream: bool
) -> None:
    question = completion(stack.model_name, tokens(LENGTH, "lost", 1, stream), stream=stream)
    with vandal(stack, FIRST_STEP):
        answer = ask(stack, question, headers=wishes("recompute"))
    assert_same(answer, ask(reference, question), "recompute")
    assert answer.proof["prefills"] == ["P0"]
    assert answer.proof["recomputed_tokens"] > 256
    assert sum(answer.proof["reasons"].values()) == answer.proof["recomputed_tokens"]


@pytest.mark.parametrize("stream", [False, True])
def test_reprefill_has_p_compute_it_again_and_d_take_it(
    stack: RunningStack, reference: RunningStack, *, stream: bool
) -> None:
    question = completion(stack.model_name, tokens(LENGTH, "lost", 2, stream), stream=stream)
    with vandal(stack, FIRST_STEP):
        answer = ask(stack, question, headers=wishes("reprefill"))
    assert_same(answer, ask(reference, question), "reprefill")
    told = answer.proof
    assert (told["prefills"], told["losses"], told["recomputed_tokens"]) == (["P0", "P0"], ["miss"], 1), told
    assert told["handed_over_tokens"] == LENGTH - 1, told
    (one,) = record(stack, answer)["proofs"]
    assert one["attempt"] == 2
    assert_idle(stack)


def test_reprefill_mends_damage_that_is_found_before_it_is_loaded(stack: RunningStack, reference: RunningStack) -> None:
    question = completion(stack.model_name, tokens(LENGTH, "lost", 3))
    with vandal(stack, 1, damage=True) as hit:
        answer = ask(stack, question, headers=wishes("reprefill"))
    assert len(hit) == 1
    assert_same(answer, ask(reference, question), "damage")
    assert (answer.proof["losses"], answer.proof["recomputed_tokens"]) == (["corrupt"], 1), answer.proof


@pytest.mark.parametrize("policy", ["fail", "strict"])
@pytest.mark.parametrize("stream", [False, True])
def test_fail_and_strict_answer_503_with_the_reason_and_compute_nothing(
    stack: RunningStack, policy: str, *, stream: bool
) -> None:
    question = completion(stack.model_name, tokens(LENGTH, "lost", 4, policy, stream), stream=stream)
    before = Counters(stack.decode_urls[0]).total("vllm:prompt_tokens_total")
    with vandal(stack, FIRST_STEP):
        answer = ask(stack, question, headers=wishes(policy))
    assert answer.status == 503, answer
    error = json.loads(answer.error)["error"]
    assert error["code"] == "kv_lost"
    assert f"900 of {LENGTH} prompt tokens again (reason: miss), and on-lost-kv is {policy}" in error["message"]
    assert record(stack, answer)["state"] == "failed"
    assert_idle(stack)
    assert Counters(stack.decode_urls[0]).total("vllm:prompt_tokens_total") == before


@pytest.mark.parametrize("stream", [False, True])
def test_strict_passes_what_was_handed_over_and_tells_it_from_what_was_there_before(
    stack: RunningStack, reference: RunningStack, *, stream: bool
) -> None:
    prompt = tokens(LENGTH, "lost", 5, stream)
    before = completion(stack.model_name, prompt[:500])
    assert httpx.post(f"{stack.prefill_urls[0]}/v1/completions", json=before.body, timeout=60).status_code == 200
    assert_nothing_held(stack)  # all that P saved is sealed
    question = completion(stack.model_name, prompt, stream=stream)
    answer = ask(stack, question, headers=wishes("strict"))
    assert_same(answer, ask(reference, question), "strict")
    told = answer.proof
    assert told["recomputed_tokens"] == 1, told
    assert (told["earlier_tokens"], told["handed_over_tokens"]) == (448, LENGTH - 1 - 448), told
    assert sum(told[f"{part}_tokens"] for part in ("handed_over", "earlier", "local", "recomputed")) == LENGTH
    assert (told["bytes"] > 0, told["wait_ms"] >= told["transfer_ms"] > 0) == (True, True), told
    assert_idle(stack)


@pytest.mark.matrix
def test_what_the_deployment_says_counts_where_a_request_says_nothing(
    start_stack: Callable[..., RunningStack], reference: RunningStack
) -> None:
    strict = start_stack("--prefill", "1", "--decode", "1", "--on-lost-kv", "strict")
    question = completion(strict.model_name, tokens(LENGTH, "lost", 6))
    with vandal(strict, FIRST_STEP):
        answer = ask(strict, question)
    assert answer.status == 503, answer
    error = json.loads(answer.error)["error"]
    assert error["code"] == "kv_lost"
    assert "on-lost-kv is strict" in error["message"]
    assert record(strict, answer)["policy"] == "strict"
    again = completion(strict.model_name, tokens(LENGTH, "lost", 7))
    with vandal(strict, FIRST_STEP):
        answer = ask(strict, again, headers=wishes("recompute"))
    assert_same(answer, ask(reference, again), "its own wish")
    assert answer.proof["recomputed_tokens"] > 256
    assert_idle(strict)
