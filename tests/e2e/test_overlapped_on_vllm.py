"""Overlapped dispatch on real engines: D is asked while P computes, and takes each layer as it is written."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from asking import (
    ask,
    ask_all,
    ask_and_kill,
    assert_everybody_at_the_pool,
    assert_nothing_held,
    assert_same,
    completion,
    tokens,
)
from fronts import front

from kvrelay.testing.stack import Counters

if TYPE_CHECKING:
    from fronts import Front

    from kvrelay.client.blocking import PoolClient
    from kvrelay.testing.stack import RunningStack

LENGTHS = [301, 601, 1000, 1537, 2000]
"""P computes 256 tokens in one step at most."""
MANY = [300 + 170 * n for n in range(8)]
KILLED = 1900


def test_d_follows_p_and_outlives_it(stack: RunningStack, reference: RunningStack) -> None:
    """One test for all, since the last part leaves no P to the others."""
    assert_everybody_at_the_pool(stack)
    with front(stack, "--dispatch", "overlapped") as router:
        prompts_of_several_steps_are_handed_over_whole_and_d_was_asked_before_p_was_done(stack, router, reference)
        more_prompts_than_may_be_early_are_answered_rightly(stack, router, reference)
        p_killed_while_d_follows_costs_a_recompute(stack, router, reference)


def prompts_of_several_steps_are_handed_over_whole_and_d_was_asked_before_p_was_done(
    stack: RunningStack, router: Front, reference: RunningStack
) -> None:
    asked = [completion(stack.model_name, tokens(n, "overlapped", n), stream=bool(n % 2)) for n in LENGTHS]
    right = ask_all(reference, asked, at_once=4)
    for length, question, expected in zip(LENGTHS, asked, right, strict=True):
        answer = router.ask(question)
        assert_same(answer, expected, length)
        told = router.proof(answer)
        assert (told["handed_over_tokens"], told["recomputed_tokens"]) == (length - 1, 1), told
        stamps = router.record(answer)["timestamps"]
        # A cold P may still be on its way to its own answer when D, having everything, has given its whole one.
        assert stamps["prefill_end"] is None or stamps["migration_begin"] < stamps["prefill_end"], stamps
    assert_nothing_held(stack)


def more_prompts_than_may_be_early_are_answered_rightly(
    stack: RunningStack, router: Front, reference: RunningStack
) -> None:
    asked = [completion(stack.model_name, tokens(n, "overlapped-many", n)) for n in MANY]
    right = ask_all(reference, asked, at_once=4)
    with ThreadPoolExecutor(len(MANY)) as threads:
        answers = list(threads.map(router.ask, asked))
    for length, ours, expected in zip(MANY, answers, right, strict=True):
        assert_same(ours, expected, length)
    whole = [router.proof(answer)["recomputed_tokens"] <= 1 for answer in answers]
    assert sum(whole) >= len(MANY) / 2, whole
    assert_nothing_held(stack)


def p_killed_while_d_follows_costs_a_recompute(stack: RunningStack, router: Front, reference: RunningStack) -> None:
    def d_follows(_: PoolClient) -> bool:
        return Counters(stack.decode_urls[0]).waiting > 0

    question, answer = ask_and_kill(stack, "P0", d_follows, "overlapped", length=KILLED, through=router.ask)
    assert_same(answer, ask(reference, question), "P killed")
    assert_nothing_held(stack)
