"""Drafters with KV of their own: it is handed over with the model's, and D guesses as well as a plain engine.

What is right is told by one plain vLLM with the same drafter. Guesses are mostly right as long as the drafter's KV is
that of the tokens before, which D has not computed: so what D's drafter had shows in how many of its guesses were
accepted. P guesses one token at a time: how many is no part of what KV is.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from asking import ask, ask_all, assert_handed_over_whole, assert_nothing_held, assert_same, completion, proof, tokens

from kvrelay.connector.compat import WITHOUT_ROTARY_KERNEL
from kvrelay.testing.drafts import build_draft, build_eagle, build_tiny_mtp
from kvrelay.testing.models import build_tiny_llama
from kvrelay.testing.stack import Counters

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from pathlib import Path

    from kvrelay.testing.stack import RunningStack

    StartStacks = Callable[..., AbstractContextManager[tuple[RunningStack, RunningStack]]]

CHUNK, BLOCK, STEP, SAID, GUESSED = 64, 32, 256, 48, 3
LENGTHS = [2, CHUNK - 1, CHUNK, CHUNK + 1, 200, STEP, STEP + 1, 2 * STEP + 1, 900]


def build_draft_model(folder: Path) -> tuple[Path, dict[str, Any]]:
    model = build_tiny_llama(folder / "model", seed=1)
    return model, {"method": "draft_model", "model": str(build_draft(folder / "draft", model))}


def build_eagle_head(folder: Path) -> tuple[Path, dict[str, Any]]:
    model = build_tiny_llama(folder / "model", seed=1, layers=1)
    return model, {"method": "eagle", "model": str(build_eagle(folder / "eagle", model))}


def build_mtp(folder: Path) -> tuple[Path, dict[str, Any]]:
    return build_tiny_mtp(folder / "model", seed=7), {"method": "mtp"}


def guesses(url: str) -> tuple[float, float]:
    """(made, accepted)."""
    counters = Counters(url)
    return tuple(counters.total(f"vllm:spec_decode_num_{what}_tokens_total") for what in ("draft", "accepted"))  # type: ignore[return-value]


@pytest.mark.matrix
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("build", "flags", "ours"),
    [
        pytest.param(build_draft_model, [], [], id="draft-model"),
        pytest.param(build_eagle_head, [], ["--prefill-tensor-parallel-size", "2"], id="eagle-tp2-tp1"),
        pytest.param(
            build_mtp,
            [f"--engine-args={WITHOUT_ROTARY_KERNEL}"],
            ["--prefill-max-num-batched-tokens", "2048"],
            id="mtp",
        ),
    ],
)
def test_a_drafter_guesses_as_well_after_a_hand_over(
    build: Callable[[Path], tuple[Path, dict[str, Any]]],
    flags: list[str],
    ours: list[str],
    tmp_path: Path,
    start_stacks: StartStacks,
) -> None:
    model, drafter = build(tmp_path)

    def guessing(flag: str, count: int) -> str:
        return f"--{flag}-args=--speculative-config '{json.dumps({**drafter, 'num_speculative_tokens': count})}'"

    every = [*flags, guessing("decode", GUESSED), guessing("prefill", GUESSED)]
    with start_stacks(model, every=every, ours=[*ours, guessing("prefill", 1)]) as (stack, plain):
        (decode,), (prefill,) = stack.decode_urls, stack.prefill_urls
        (alone,) = plain.prefill_urls or plain.decode_urls
        questions = [
            completion("model", tokens(length, "drafters", length), max_tokens=SAID, ignore_eos=True)
            for length in LENGTHS
        ]
        right = ask_all(plain, questions)
        for length, question, theirs in zip(LENGTHS, questions, right, strict=True):
            assert_handed_over_whole(stack, question, theirs, length, length)
        compare(decode, alone)

        prompt, known, said = tokens(150, "drafters", "turns"), 0, 0
        for turn in range(3):
            question = completion("model", prompt, max_tokens=2 * CHUNK, ignore_eos=True)
            before = Counters(prefill).total("kvrelay:loaded_tokens_total")
            answer = ask(stack, question)
            assert_same(answer, ask(plain, question), f"turn {turn}")
            assert proof(stack, answer)["recomputed_tokens"] <= 1
            loaded = Counters(prefill).total("kvrelay:loaded_tokens_total") - before
            if turn:
                assert loaded >= said // CHUNK * CHUNK - known // BLOCK * BLOCK > 0, "P computed what D had said"
            assert_nothing_held(stack)
            known = len(prompt)
            prompt = [*prompt, *answer.token_ids, *tokens(20, "drafters", turn)]
            said = known + len(answer.token_ids) - 1
        compare(decode, alone)
        for url in (prefill, decode):
            assert Counters(url).total("kvrelay:not_saved_total", reason="interrupted") == 0


def compare(decode: str, alone: str) -> None:
    """As many of D's guesses are accepted as of an engine that has computed all KV itself.

    It makes more: vLLM has a request whose prompt lacks one token guess in that step already, always wrongly.
    """
    made, right = guesses(alone)
    assert right > made / 4, "a drafter that is hardly ever right shows nothing"
    assert guesses(decode)[1] == pytest.approx(right, rel=0.02)
