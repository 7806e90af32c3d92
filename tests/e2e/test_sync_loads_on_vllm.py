"""Loads in the step that needs them, on a real decode engine: used where they may be, and harmless when they fail."""

from __future__ import annotations

from typing import TYPE_CHECKING

import httpx
import pytest
from asking import ask, assert_nothing_held, assert_same, completion, eventually, proof, tokens

from kvrelay.client.blocking import PoolClient
from kvrelay.connector.core.sync_loads import REST_CLAIMS
from kvrelay.testing.stack import Counters

if TYPE_CHECKING:
    from kvrelay.testing.stack import RunningStack

LENGTHS = [33, 64, 65, 150, 257, 513, 1025]


def sync_loads(stack: RunningStack) -> float:
    return Counters(stack.decode_urls[0]).total("kvrelay:sync_loads_total")


def until_d_loads_synchronously(stack: RunningStack) -> None:
    """After a load that failed, such as another test's, so many are asynchronous."""
    before = sync_loads(stack)
    for number in range(2 * REST_CLAIMS):
        ask(stack, completion(stack.model_name, tokens(40, "rest", number)))
        if sync_loads(stack) > before:
            return
    pytest.fail(f"no load of {2 * REST_CLAIMS} was synchronous")


def test_small_sealed_prompts_are_loaded_in_the_step_that_claims_them(
    stack: RunningStack, reference: RunningStack
) -> None:
    until_d_loads_synchronously(stack)
    before = sync_loads(stack)
    for length in LENGTHS:
        question = completion(stack.model_name, tokens(length, "sync-loads", length))
        answer = ask(stack, question)
        assert_same(answer, ask(reference, question), length)
        told = proof(stack, answer)
        assert (told["handed_over_tokens"], told["recomputed_tokens"]) == (length - 1, 1), told
    assert sync_loads(stack) - before >= len(LENGTHS) / 2
    assert_nothing_held(stack)


@pytest.mark.parametrize("length", [65, 300, 1025])
def test_a_damaged_object_under_a_synchronous_load_gives_the_right_answer(
    stack: RunningStack, reference: RunningStack, length: int
) -> None:
    """1. P saves. 2. One byte of what it saved is flipped. 3. D loads it synchronously, and computes it itself."""
    prompt = tokens(length, "damaged", length)
    question = completion(stack.model_name, prompt)
    with PoolClient.connect(stack.pool_address, name="vandal") as vandal:
        known = {shown.key for shown in vandal.list_objects()}
        body = {**question.body, "max_tokens": 1}
        httpx.post(f"{stack.prefill_urls[0]}{question.path}", json=body, timeout=60.0).raise_for_status()
        chunks = -(-length // 64)
        fresh = eventually(
            lambda: [shown.key for shown in vandal.list_objects() if shown.key not in known],
            lambda keys: len(keys) == chunks and all(vandal.exists(keys)),
            "the saved prompt",
        )
        assert vandal.arena is not None
        for key in fresh:
            view = vandal.match_prefix([key], lease_s=5.0).views[0]
            vandal.arena[view.offset + view.size // 2] ^= 1
    failed = Counters(stack.decode_urls[0]).total("kvrelay:load_failed_total", reason="corrupt")
    answer = ask(stack, question)
    assert_same(answer, ask(reference, question), length)
    after = eventually(
        lambda: Counters(stack.decode_urls[0]).total("kvrelay:load_failed_total", reason="corrupt"),
        lambda count: count > failed,
        "the failed load in the metrics",
    )
    assert after == failed + 1
    again = ask(stack, question)
    assert_same(again, ask(reference, question), "again")
    assert_nothing_held(stack)
