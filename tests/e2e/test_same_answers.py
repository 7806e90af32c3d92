"""Whatever is asked through P, pool and D: the same tokens as from one plain vLLM, and proof of the hand-over."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from asking import (
    ask,
    ask_all,
    assert_each_handed_over,
    assert_handed_over_whole,
    assert_nothing_held,
    assert_same,
    chat,
    completion,
    eventually,
    proof,
    proofs,
    tokens,
)

from kvrelay.testing.stack import Counters

if TYPE_CHECKING:
    from kvrelay.testing.stack import RunningStack

BLOCK, CHUNK, STEP, LONGEST = 32, 64, 256, 2048
LENGTHS = [
    1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 48, CHUNK - 1, CHUNK, CHUNK + 1, CHUNK + BLOCK - 1, CHUNK + BLOCK,
    CHUNK + BLOCK + 1, 2 * CHUNK - 1, 2 * CHUNK, 2 * CHUNK + 1, 150, 3 * CHUNK - 1, 3 * CHUNK, 3 * CHUNK + 1,
    STEP - 1, STEP, STEP + 1, STEP + BLOCK - 1, STEP + BLOCK, STEP + BLOCK + 1, 300, STEP + CHUNK - 1, STEP + CHUNK,
    STEP + CHUNK + 1, 400, 2 * STEP - 1, 2 * STEP, 2 * STEP + 1, 640, 700, 3 * STEP - 1, 3 * STEP, 3 * STEP + 1,
    1000, 4 * STEP - 1, 4 * STEP, 4 * STEP + 1, 1500, LONGEST - 16,
]  # fmt: skip
SENTENCE = "The quick brown fox of section {} jumps over the lazy dog while return values are passed by reference. "


def conversations() -> list[list[dict[str, str]]]:
    return [
        [{"role": "system", "content": SENTENCE.format(n) * n}, {"role": "user", "content": f"What about {n}?"}]
        for n in (1, 2, 3, 5, 8, 13, 21, 34)
    ]


def test_every_prompt_length_gives_the_same_tokens_handed_over_whole(
    stack: RunningStack, reference: RunningStack
) -> None:
    assert len(LENGTHS) >= 40
    questions = [
        completion(stack.model_name, tokens(length, "every-prompt", length), stream=bool(n % 2))
        for n, length in enumerate(LENGTHS)
    ]
    theirs = ask_all(reference, questions, at_once=4)
    ask(stack, completion(stack.model_name, [5]))  # what an earlier test left to be counted is counted with it
    before, all_told = counted(stack), []
    for length, question, expected in zip(LENGTHS, questions, theirs, strict=True):
        answer, told = assert_handed_over_whole(stack, question, expected, length, f"{length} tokens")
        assert told["reason"] == "", told
        assert (answer.prefill, answer.decode) == ("P0", "D0")
        all_told.append(told)
    all_told += [proof(stack, ask(stack, question)) for question in questions[-2:]]  # of these D has most itself
    assert_nothing_held(stack)
    proven = {name: sum(told[part] for told in all_told) * unit for name, (part, unit) in COUNTED.items()}
    assert proven["local_tokens"] > 0
    assert proven["load_wait_seconds"] >= proven["load_transfer_seconds"] > 0
    grown = {name: pytest.approx(before[name] + value, rel=1e-6) for name, value in proven.items()}
    eventually(lambda: counted(stack), lambda now: now == grown, f"counters as the proofs have it: {grown}")


COUNTED = {
    "prompt_tokens": ("prompt_tokens", 1.0),
    "handed_over_tokens": ("handed_over_tokens", 1.0),
    "local_tokens": ("local_tokens", 1.0),
    "loaded_bytes": ("bytes", 1.0),
    "load_wait_seconds": ("wait_ms", 1e-3),
    "load_transfer_seconds": ("transfer_ms", 1e-3),
}
"""Counters of D, and the part of a proof, in other units, that each is the sum of."""


def counted(stack: RunningStack) -> dict[str, float]:
    """What D has counted of these."""
    (decode,) = stack.decode_urls
    counters = Counters(decode)
    return {name: counters.total(f"kvrelay:{name}_total") for name in COUNTED}


@pytest.mark.parametrize("stream", [False, True])
def test_chats_give_the_same_tokens(stack: RunningStack, reference: RunningStack, stream: bool) -> None:
    questions = [chat(stack.model_name, messages, stream=stream) for messages in conversations()]
    theirs = ask_all(reference, questions, at_once=4)
    for question, expected in zip(questions, theirs, strict=True):
        answer = ask(stack, question)
        assert_same(answer, expected, question.body["messages"][1]["content"])
        assert proof(stack, answer)["recomputed_tokens"] <= 1


def test_the_longest_prompt_allowed_is_handed_over_and_one_more_token_is_refused_as_by_one_vllm(
    stack: RunningStack, reference: RunningStack
) -> None:
    longest = completion(stack.model_name, tokens(LONGEST - 1, "the-longest", 77), max_tokens=1)
    answer = ask(stack, longest)
    assert_same(answer, ask(reference, longest), "longest")
    assert proof(stack, answer)["recomputed_tokens"] <= 1
    for length in (LONGEST, LONGEST + 1, LONGEST + 500):
        too_long = completion(stack.model_name, tokens(length, "the-longest", 78), max_tokens=1)
        ours, theirs = ask(stack, too_long), ask(reference, too_long)
        assert (ours.status, ours.error) == (theirs.status, theirs.error)
        assert ours.status == 400
    assert_nothing_held(stack)


def test_eight_at_once_are_answered_as_one_by_one(stack: RunningStack, reference: RunningStack) -> None:
    questions = [
        completion(stack.model_name, tokens(100 + 97 * n, "eight-at", 1000 + n), stream=bool(n % 2)) for n in range(16)
    ]
    theirs = ask_all(reference, questions, at_once=4)
    answers = ask_all(stack, questions, at_once=8)
    for n, (ours, expected) in enumerate(zip(answers, theirs, strict=True)):
        assert_same(ours, expected, n)
    # Engines wait for a late pool a bounded moment only, then compute: on busy cores not every hand-over is whole.
    told = [one for answer in answers for one in proofs(stack, answer)]
    assert sum(one["recomputed_tokens"] <= 1 for one in told) >= len(questions) / 2, told
    assert_nothing_held(stack)


def test_the_same_prompt_again_and_shared_prefixes_give_the_same_tokens(
    stack: RunningStack, reference: RunningStack
) -> None:
    shared = tokens(200, "the-same", 5)
    continued = [shared + tokens(50, "the-same", 6), shared + tokens(300, "the-same", 7)]
    prompts = [shared, shared, *continued, shared[:100], shared[:64]]
    questions = [completion(stack.model_name, prompt, stream=bool(n % 2)) for n, prompt in enumerate(prompts)]
    for n, question in enumerate(questions):
        answer = ask(stack, question)
        assert_same(answer, ask(reference, question), n)
        told = proof(stack, answer)
        assert told["recomputed_tokens"] <= 32, told  # a local hit ends at a block bound
        if n == 1:
            assert told["local_tokens"] > 0


def test_prompts_of_different_salts_share_no_kv_and_those_of_one_salt_do(
    stack: RunningStack, reference: RunningStack
) -> None:
    prompt = tokens(300, "salted")
    told = {}
    for turn, salt in enumerate(("a", "b", "a")):
        question = completion(stack.model_name, prompt, cache_salt=salt)
        answer = ask(stack, question)
        assert_same(answer, ask(reference, question), (turn, salt))
        told[turn] = proof(stack, answer)
    for turn in (0, 1):
        assert (told[turn]["earlier_tokens"], told[turn]["local_tokens"]) == (0, 0), told
        assert told[turn]["handed_over_tokens"] == 299, told
    assert told[2]["handed_over_tokens"] == 0, told
    assert told[2]["local_tokens"] >= 256, told
    assert told[2]["local_tokens"] + told[2]["earlier_tokens"] == 299, told


def test_what_the_client_asks_for_reaches_d_and_does_not_disturb_p(
    stack: RunningStack, reference: RunningStack
) -> None:
    """min_tokens, stop strings, ignore_eos, max_tokens=1, seeds, n, prompt batches, echo, logit_bias."""
    prompt = tokens(130, "what-the", 9)
    variations: list[dict[str, Any]] = [
        {"min_tokens": 12},
        {"max_tokens": 1},
        {"max_tokens": None},
        {"ignore_eos": True, "max_tokens": 20},
        {"stop": ["e", "a"]},
        {"temperature": 0.8, "seed": 42},
        {"logit_bias": {"100": 5.0}},
        {"echo": True, "max_tokens": 3},
        {"presence_penalty": 0.5, "frequency_penalty": 0.5},
    ]
    for variation in variations:
        question = completion(stack.model_name, prompt, **variation)
        if variation.get("max_tokens", 1) is None:
            question.body["prompt"] = tokens(LONGEST - 40, "what-the", 9)
        ours, theirs = ask(stack, question), ask(reference, question)
        assert (ours.status, ours.error, ours.token_ids, ours.text, ours.finish_reason) == (
            theirs.status, theirs.error, theirs.token_ids, theirs.text, theirs.finish_reason,
        ), variation  # fmt: skip
        assert ours.status == 200
    limited = chat(stack.model_name, [{"role": "user", "content": "Hello there, how long is this?"}])
    del limited.body["max_tokens"]
    limited.body |= {"max_completion_tokens": 5, "min_tokens": 5}
    assert_same(ask(stack, limited), ask(reference, limited), "max_completion_tokens")
    assert_nothing_held(stack)


def test_several_choices_and_prompt_batches_are_answered_as_by_one_vllm(
    stack: RunningStack, reference: RunningStack
) -> None:
    several = completion(stack.model_name, tokens(140, "several-choices", 11), n=3, temperature=0.7, seed=3)
    batch = completion(stack.model_name, [1], max_tokens=6)
    batch.body["prompt"] = [tokens(length, "several-choices", length + 31) for length in (5, 70, 300)]
    assert_each_handed_over(stack, reference, several, prompts=1)
    assert_each_handed_over(stack, reference, batch, prompts=3)
    assert_nothing_held(stack)


def test_the_official_client_sees_a_plain_openai_server(stack: RunningStack) -> None:
    from openai import BadRequestError, OpenAI

    with OpenAI(base_url=f"{stack.base_url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        assert [model.id for model in client.models.list()] == [stack.model_name]
        whole = client.chat.completions.create(
            model=stack.model_name, messages=[{"role": "user", "content": "Hi"}], max_tokens=8, temperature=0
        )
        pieces = client.chat.completions.create(
            model=stack.model_name,
            messages=[{"role": "user", "content": "Hi"}],
            max_tokens=8,
            temperature=0,
            stream=True,
        )
        streamed = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
        assert streamed == whole.choices[0].message.content
        with pytest.raises(BadRequestError):
            client.completions.create(model=stack.model_name, prompt="x", max_tokens=100_000)
