"""The router's other ways on real engines, each with right answers: decode-first, short prompts to D alone, P alone.

A second router stands in front of the engines of the standing stack.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import httpx
import pytest
from asking import ANSWER_S, assert_nothing_held, assert_same, completion, tokens
from fronts import front

if TYPE_CHECKING:
    from pathlib import Path

    from kvrelay.testing.stack import RunningStack

NOBODY = "http://127.0.0.1:9"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_prompt_that_d_lacks_is_prefilled_and_the_second_time_d_has_it(
    stack: RunningStack, tiny_model: Path, right_answers: Any, *, stream: bool
) -> None:
    question = completion(stack.model_name, tokens(901, "ways-twice", stream), stream=stream)
    (expected,) = right_answers(tiny_model, [question])
    with front(stack, "--dispatch", "decode-first") as router:
        first, second = router.ask(question), router.ask(question)
        for answer in (first, second):
            assert_same(answer, expected, "decode-first")
        assert (first.prefill, second.prefill) == ("P0", None)
        told = router.proof(first)
        assert (told["recomputed_tokens"], told["attempt"]) == (1, 2), told
        assert router.proof(second)["local_tokens"] > 800
        assert (router.reasons(first), router.reasons(second)) == ([], ["full_hit"])
    assert_nothing_held(stack)


def test_what_the_pool_has_whole_is_a_full_hit_too(stack: RunningStack, tiny_model: Path, right_answers: Any) -> None:
    question = completion(stack.model_name, tokens(700, "ways-pooled"))
    (expected,) = right_answers(tiny_model, [question])
    prefilled = httpx.post(
        f"{stack.prefill_urls[0]}{question.path}", json={**question.body, "max_tokens": 1}, timeout=ANSWER_S
    )
    assert prefilled.status_code == 200
    assert_nothing_held(stack)  # all that P saved is sealed
    with front(stack, "--dispatch", "decode-first") as router:
        answer = router.ask(question)
        assert_same(answer, expected, "from the pool")
        assert answer.prefill is None
        told = router.proof(answer)
        assert (told["earlier_tokens"], told["recomputed_tokens"]) == (699, 1), told
    assert_nothing_held(stack)


def test_a_short_prompt_is_computed_by_d_alone_and_a_long_one_is_handed_over(
    stack: RunningStack, tiny_model: Path, right_answers: Any
) -> None:
    lengths = [100, 101]
    asking = [completion(stack.model_name, tokens(length, "ways-short", length)) for length in lengths]
    expected = right_answers(tiny_model, asking)
    with front(stack, "--disaggregate-above", "100") as router:
        answers = [router.ask(question) for question in asking]
        for length, answer, right in zip(lengths, answers, expected, strict=True):
            assert_same(answer, right, length)
        assert [answer.prefill for answer in answers] == [None, "P0"]
        assert [router.proof(answer)["recomputed_tokens"] for answer in answers] == [100, 1]
        assert [router.reasons(answer) for answer in answers] == [["short"], []]
    assert_nothing_held(stack)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_without_a_decode_engine_p_answers_alone(
    stack: RunningStack, tiny_model: Path, right_answers: Any, *, stream: bool
) -> None:
    question = completion(stack.model_name, tokens(400, "ways-colocated", stream), stream=stream)
    (expected,) = right_answers(tiny_model, [question])
    with front(stack, "--colocated-fallback", decode=NOBODY) as router:
        answer = router.ask(question)
        assert_same(answer, expected, "colocated")
        assert (answer.prefill, answer.decode) == ("P0", "P0")
        assert router.reasons(answer) == ["decode_unreachable", "colocated"]
    assert_nothing_held(stack)
