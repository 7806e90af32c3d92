"""Two engines of each role, with too few blocks for what they are asked: each serves its share, and a pair alone loses
blocks and loads what was saved.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

import httpx
import pytest
from asking import ask_all, assert_nothing_held, assert_same, completion, eventually, proof, tokens
from fronts import front

from kvrelay.testing.architectures import build_tiny_gemma
from kvrelay.testing.stack import Counters

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from pathlib import Path

    from kvrelay.testing.stack import RunningStack

    StartStacks = Callable[..., AbstractContextManager[tuple[RunningStack, RunningStack]]]

LONG = 120
"""Generated tokens: with them a request needs four blocks more than its prompt."""
ROUNDS = 4
"""Whether enough requests are on D at a time depends on how fast P is beside it."""


def test_every_prefill_and_decode_engine_serves_its_share(wide: RunningStack, reference: RunningStack) -> None:
    questions = [
        completion(wide.model_name, tokens(90 + 10 * n, "every-prefill", n), stream=bool(n % 2)) for n in range(8)
    ]
    theirs = ask_all(reference, questions, at_once=4)
    before = {url: Counters(url) for url in (*wide.prefill_urls, *wide.decode_urls)}
    for ours, expected in zip(ask_all(wide, questions), theirs, strict=True):
        assert_same(ours, expected, ours.handover)
        assert proof(wide, ours)["recomputed_tokens"] <= 1
    for url, earlier in before.items():
        served = Counters(url).total("vllm:request_success_total") - earlier.total("vllm:request_success_total")
        assert served == 4, url
    assert_nothing_held(wide)


def test_requests_that_lose_their_blocks_are_answered_rightly(wide: RunningStack, reference: RunningStack) -> None:
    blocks_are_lost_and_nothing_else(wide, reference)


@pytest.mark.matrix
def test_requests_that_lose_blocks_of_windows_are_answered_rightly(tmp_path: Path, start_stacks: StartStacks) -> None:
    model = build_tiny_gemma(tmp_path / "gemma", seed=7)
    few_blocks = ["--kv-cache-memory", "4MiB", "--decode-max-num-batched-tokens", "256"]
    with start_stacks(model, ours=few_blocks) as (stack, plain):
        blocks_are_lost_and_nothing_else(stack, plain)


def blocks_are_lost_and_nothing_else(stack: RunningStack, reference: RunningStack) -> None:
    decode, prefill = stack.decode_urls[0], stack.prefill_urls[0]
    with front(stack) as router:
        for round_ in range(ROUNDS):
            shared = tokens(200, "short", round_)
            prompts = [shared[: 40 * (n % 6)] + tokens(420 + 9 * n, "short", round_, n) for n in range(14)]
            questions = [completion(stack.model_name, prompt, max_tokens=LONG, stream=True) for prompt in prompts]
            theirs = ask_all(reference, questions, at_once=4)
            with ThreadPoolExecutor(14) as threads:
                answers = list(threads.map(router.ask, questions))
            for n, (ours, expected) in enumerate(zip(answers, theirs, strict=True)):
                assert_same(ours, expected, f"through the router, {round_}, {n}")
                router.proof(ours)
            if Counters(decode).total("vllm:num_preemptions_total"):
                break
        else:
            pytest.fail("D was not short of blocks")
        assert_nothing_held(stack)

    # P alone saves, loads and loses its blocks, all at once.
    fresh = [completion(stack.model_name, [*prompt, 11], max_tokens=LONG) for prompt in prompts]
    theirs = ask_all(reference, fresh, at_once=4)
    with ThreadPoolExecutor(14) as threads:
        ask = partial(httpx.post, f"{prefill}/v1/completions", timeout=300)
        replies = list(threads.map(lambda question: ask(json=question.body), fresh))
    for reply, expected in zip(replies, theirs, strict=True):
        assert reply.json()["choices"][0]["token_ids"] == expected.token_ids
    assert Counters(prefill).total("vllm:num_preemptions_total") > 0, "P was not short of blocks"
    assert Counters(prefill).total("kvrelay:loaded_tokens_total") > 0
    eventually(lambda: Counters(prefill).idle, bool, "idle P")
    assert_nothing_held(stack)
