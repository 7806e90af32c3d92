"""The same answers and the same proof on a real model, SmolLM2-135M-Instruct."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from asking import ask, ask_all, assert_nothing_held, assert_same, chat, completion, proof, tokens

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvrelay.testing.stack import RunningStack

FEW = [1, 32, 33, 63, 64, 65, 129, 256, 257, 513]
LENGTHS = [
    1, 2, 30, 31, 32, 33, 34, 62, 63, 64, 65, 66, 94, 95, 96, 97, 98, 126, 127, 128, 129, 130, 159, 160, 161,
    191, 192, 193, 223, 224, 225, 255, 256, 257, 287, 320, 383, 384, 513,
]  # fmt: skip
TOPICS = ["the capital of France", "a haiku about autumn", "why the sky is blue", "how bread is baked"]


@pytest.fixture(scope="module")
def real(start_stacks, real_model: Path) -> Iterator[tuple[RunningStack, RunningStack]]:  # type: ignore[no-untyped-def]
    with start_stacks(real_model) as stacks:
        yield stacks


@pytest.mark.parametrize(
    "lengths", [pytest.param(FEW, id="few"), pytest.param(LENGTHS, id="all", marks=pytest.mark.matrix)]
)
def test_a_real_model_gives_the_same_tokens_handed_over_whole(
    real: tuple[RunningStack, RunningStack], lengths: list[int]
) -> None:
    stack, reference = real
    model = stack.model_name
    questions = [
        completion(model, tokens(length, "real", length), stream=bool(n % 2), max_tokens=8)
        for n, length in enumerate(lengths)
    ]
    questions += [
        chat(model, [{"role": "user", "content": f"Tell me about {topic}."}], stream=bool(n % 2), max_tokens=8)
        for n, topic in enumerate(TOPICS)
    ]
    theirs = ask_all(reference, questions, at_once=4)
    for question, expected, answer in zip(questions, theirs, ask_all(stack, questions, at_once=2), strict=True):
        assert_same(answer, expected, question.body)
        told = proof(stack, answer)
        assert told["recomputed_tokens"] <= 1, json.dumps(told)
    assert_nothing_held(stack)


def test_a_real_model_answers_a_question(real: tuple[RunningStack, RunningStack]) -> None:
    stack, _ = real
    question = [{"role": "user", "content": "What is the capital of France?"}]
    assert "Paris" in ask(stack, chat(stack.model_name, question, stream=True)).text
