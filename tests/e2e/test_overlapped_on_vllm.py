"""Overlapped dispatch on real engines: D is asked while P computes, and takes each layer as it is written."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from asking import Question, ask, ask_all, assert_nothing_held, assert_same, completion, eventually, proof, tokens

from kvrelay.testing.stack import Counters

if TYPE_CHECKING:
    from collections.abc import Callable

    from asking import Answer

    from kvrelay.testing.stack import RunningStack

LENGTHS = [301, 601, 1000, 1537, 2000]
"""P computes 256 tokens in one step at most."""
MANY = [300 + 170 * n for n in range(8)]
KILLED = 1900


def questions(model: str) -> dict[str, list[Question]]:
    """Everything that will be asked."""
    return {
        "one by one": [completion(model, tokens(n, "overlapped", n), stream=bool(n % 2)) for n in LENGTHS],
        "at once": [completion(model, tokens(n, "overlapped-many", n)) for n in MANY],
        "killed": [completion(model, tokens(KILLED, "overlapped-killed"))],
    }


@pytest.fixture(scope="module")
def right(start_alone: Callable[..., RunningStack]) -> dict[str, list[Answer]]:
    """What one plain vLLM answers. It is stopped before the others start: there is no room for all."""
    plain = start_alone(plain=True)
    return {name: ask_all(plain, asked, at_once=4) for name, asked in questions(plain.model_name).items()}


@pytest.fixture(scope="module")
def overlapped(start_alone: Callable[..., RunningStack], right: dict[str, list[Answer]]) -> RunningStack:
    """A P and a D that are asked at once."""
    assert right
    return start_alone("--prefill", "1", "--decode", "1", "--dispatch", "overlapped")


def record(stack: RunningStack, answer: Answer) -> dict[str, Any]:
    response = httpx.get(f"{stack.base_url}/kvrelay/handovers/{answer.handover}", timeout=30.0)
    return response.raise_for_status().json()  # type: ignore[no-any-return]


def test_d_follows_p_and_outlives_it(overlapped: RunningStack, right: dict[str, list[Answer]]) -> None:
    """One test for all, since the last part leaves no P to the others."""
    prompts_of_several_steps_are_handed_over_whole_and_d_was_asked_before_p_was_done(overlapped, right["one by one"])
    more_prompts_than_may_be_early_are_answered_rightly(overlapped, right["at once"])
    p_killed_while_d_follows_costs_a_recompute(overlapped, right["killed"])


def prompts_of_several_steps_are_handed_over_whole_and_d_was_asked_before_p_was_done(
    overlapped: RunningStack, right: list[Answer]
) -> None:
    asked = questions(overlapped.model_name)["one by one"]
    for length, question, expected in zip(LENGTHS, asked, right, strict=True):
        answer = ask(overlapped, question)
        assert_same(answer, expected, length)
        told = proof(overlapped, answer)
        assert (told["handed_over_tokens"], told["recomputed_tokens"]) == (length - 1, 1), told
        stamps = record(overlapped, answer)["timestamps"]
        # A cold P may still be on its way to its own answer when D, having everything, has given its whole one.
        assert stamps["prefill_end"] is None or stamps["migration_begin"] < stamps["prefill_end"], stamps
    assert_nothing_held(overlapped)


def more_prompts_than_may_be_early_are_answered_rightly(overlapped: RunningStack, right: list[Answer]) -> None:
    answers = ask_all(overlapped, questions(overlapped.model_name)["at once"], at_once=len(MANY))
    for length, ours, expected in zip(MANY, answers, right, strict=True):
        assert_same(ours, expected, length)
    whole = [proof(overlapped, answer)["recomputed_tokens"] <= 1 for answer in answers]
    assert sum(whole) >= len(MANY) / 2, whole
    assert_nothing_held(overlapped)


def p_killed_while_d_follows_costs_a_recompute(overlapped: RunningStack, right: list[Answer]) -> None:
    (question,) = questions(overlapped.model_name)["killed"]
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(ask, overlapped, question)
        eventually(lambda: Counters(overlapped.decode_urls[0]).waiting, bool, "D to follow", within_s=30.0)
        os.kill(overlapped.process("P0"), signal.SIGKILL)
        answer = asked.result(90.0)
    assert_same(answer, right[0], "P killed")
    assert_nothing_held(overlapped)
