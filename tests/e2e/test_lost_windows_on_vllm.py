"""KV of a Gemma, in two groups, that is gone or damaged between the legs: every policy, as with one dense group."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from asking import Answer, Question, ask, assert_nothing_held, assert_same, completion, engines_idle, eventually, tokens
from damage import vandal

from kvrelay.testing.architectures import TinyGemma, build_tiny_gemma
from kvrelay.testing.stack import Counters

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from pathlib import Path

    from kvrelay.testing.stack import RunningStack

    StartStacks = Callable[..., AbstractContextManager[tuple[RunningStack, RunningStack]]]

LENGTH, CHUNK = 900, 64
"""Tokens. P takes four steps for them; the last chunk is short, so that objects are told apart by their size."""
RECIPE = TinyGemma(seed=7)


def object_bytes(kind: str, tokens: int) -> int:
    return RECIPE.kinds.count(kind) * RECIPE.kv_heads * 2 * tokens * RECIPE.head_size * 4


FULL = object_bytes("full_attention", CHUNK)
"""A chunk's, of which the whole prompt is needed."""
WINDOW = object_bytes("sliding_attention", LENGTH % CHUNK)
"""The last chunk's: of the earlier ones most are out of reach."""


def wishes(policy: str) -> dict[str, str]:
    return {"x-kvrelay-on-lost-kv": policy, "x-kvrelay-proof": "yes"}


def staged(stack: RunningStack) -> float:
    return Counters(stack.decode_urls[0]).total("kvrelay:staged_bytes_total")


@pytest.mark.matrix
@pytest.mark.timeout(900)
def test_what_is_lost_of_either_group_is_found_before_it_is_claimed(tmp_path: Path, start_stacks: StartStacks) -> None:
    """Reprefill has P compute it again, fail and strict answer 503; D computes nothing of what it cannot have."""
    model = build_tiny_gemma(tmp_path / "gemma", seed=RECIPE.seed)
    with start_stacks(model) as (stack, plain):

        def asked(policy: str, *seed: object, damage: bool, size: int) -> tuple[Question, Answer]:
            question = completion(stack.model_name, tokens(LENGTH, "windows", policy, *seed), stream=damage)
            with vandal(stack, 1, damage=damage, size=size) as hit:
                answer = ask(stack, question, headers=wishes(policy))
            assert len(hit) == 1
            return question, answer

        for size in (FULL, WINDOW):
            for damage in (False, True):
                question, answer = asked("reprefill", size, damage, damage=damage, size=size)
                assert_same(answer, ask(plain, question), ("reprefill", size, damage))
                told = answer.proof
                assert (told["prefills"], told["recomputed_tokens"]) == (["P0", "P0"], 1), told
                assert told["losses"] in ([["corrupt"]] if damage else [["miss"], ["partial"]]), told
                assert told["handed_over_tokens"] == LENGTH - 1, told
            for policy in ("fail", "strict"):
                eventually(lambda: engines_idle([*stack.prefill_urls, *stack.decode_urls]), bool, "idle engines")
                before = Counters(stack.decode_urls[0]).total("vllm:prompt_tokens_total")
                _, answer = asked(policy, size, damage=True, size=size)
                assert answer.status == 503, answer
                error = json.loads(answer.error)["error"]
                assert error["code"] == "kv_lost"
                assert f"(reason: corrupt), and on-lost-kv is {policy}" in error["message"]
                eventually(lambda: engines_idle([*stack.prefill_urls, *stack.decode_urls]), bool, "idle engines")
                assert Counters(stack.decode_urls[0]).total("vllm:prompt_tokens_total") == before
        assert_staged_and_whole(stack, plain)
        assert_nothing_held(stack)


def assert_staged_and_whole(stack: RunningStack, plain: RunningStack) -> None:
    """Nothing is lost: D stages what it claims, also beyond a beginning that it has itself."""
    shared = tokens(300, "windows", "shared")
    for more in (1, 60, 97, 400):
        question = completion(stack.model_name, shared + tokens(more, "windows", more))
        before = staged(stack)
        answer = ask(stack, question, headers=wishes("strict"))
        assert_same(answer, ask(plain, question), ("strict", more))
        assert answer.proof["recomputed_tokens"] <= 1, answer.proof
        assert_more_staged(stack, before)


def assert_more_staged(stack: RunningStack, before: float) -> None:
    eventually(lambda: staged(stack), lambda seen: seen > before, f"more than {before} staged bytes")
