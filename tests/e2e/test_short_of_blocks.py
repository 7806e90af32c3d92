"""Engines with too few blocks for what they are asked: requests lose theirs, come back, and load what was saved."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

import httpx
import pytest
from asking import ask_all, assert_nothing_held, assert_same, completion, eventually, proof, tokens

from kvrelay.testing.stack import Counters

if TYPE_CHECKING:
    from kvrelay.testing.stack import RunningStack

LONG = 120
"""Generated tokens: with them a request needs four blocks more than its prompt."""
ROUNDS = 4
"""Whether enough requests are on D at a time depends on how fast P is beside it."""


def test_requests_that_lose_their_blocks_are_answered_rightly(start_stack, reference: RunningStack) -> None:  # type: ignore[no-untyped-def]
    small: RunningStack = start_stack("--prefill", "1", "--decode", "1", "--kv-cache-memory", "5MiB")
    (decode,), (prefill,) = small.decode_urls, small.prefill_urls
    for round_ in range(ROUNDS):
        shared = tokens(200, "short", round_)
        prompts = [shared[: 40 * (n % 6)] + tokens(420 + 9 * n, "short", round_, n) for n in range(14)]
        questions = [completion(small.model_name, prompt, max_tokens=LONG, stream=True) for prompt in prompts]
        theirs = ask_all(reference, questions, at_once=4)
        for n, (ours, expected) in enumerate(zip(ask_all(small, questions, at_once=14), theirs, strict=True)):
            assert_same(ours, expected, f"through the router, {round_}, {n}")
            proof(small, ours)
        if Counters(decode).total("vllm:num_preemptions_total"):
            break
    else:
        pytest.fail("D was not short of blocks")
    assert_nothing_held(small)

    # P alone saves, loads and loses its blocks, all at once.
    fresh = [completion(small.model_name, [*prompt, 11], max_tokens=LONG) for prompt in prompts]
    theirs = ask_all(reference, fresh, at_once=4)
    with ThreadPoolExecutor(14) as threads:
        ask = partial(httpx.post, f"{prefill}/v1/completions", timeout=300)
        replies = list(threads.map(lambda question: ask(json=question.body), fresh))
    for reply, expected in zip(replies, theirs, strict=True):
        assert reply.json()["choices"][0]["token_ids"] == expected.token_ids
    assert Counters(prefill).total("vllm:num_preemptions_total") > 0, "P was not short of blocks"
    assert Counters(prefill).total("kvrelay:loaded_tokens_total") > 0
    eventually(lambda: Counters(prefill).idle, bool, "idle P")
    assert_nothing_held(small)
