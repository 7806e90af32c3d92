"""A decode engine that guesses by suffixes, where the package that vLLM needs for it is installed."""

from __future__ import annotations

import importlib.util
import json
from typing import TYPE_CHECKING

import pytest
from asking import ask, assert_nothing_held, assert_same, completion, proof, tokens

from kvrelay.testing.stack import Counters

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvrelay.testing.stack import RunningStack

CHUNK = 64
GUESSING = json.dumps({"method": "suffix", "num_speculative_tokens": 4})


@pytest.mark.matrix
@pytest.mark.skipif(
    not importlib.util.find_spec("arctic_inference"), reason="needs pip install arctic-inference==0.1.1"
)
def test_turns_whose_answers_were_guessed_are_handed_over_and_saved(
    start_stack: Callable[..., RunningStack], reference: RunningStack
) -> None:
    stack = start_stack("--prefill", "1", "--decode", "1", f"--decode-args=--speculative-config '{GUESSING}'")
    prompt, said = (tokens(12, "suffix") * 20)[:200], 0
    for turn, new in enumerate((150, 90, 40)):
        question = completion(stack.model_name, prompt, max_tokens=new, ignore_eos=True)
        answer = ask(stack, question)
        assert_same(answer, ask(reference, question), turn)
        told = proof(stack, answer)
        assert told["recomputed_tokens"] <= 32, told
        assert told["local_tokens"] + told["earlier_tokens"] >= said // CHUNK * CHUNK, told
        said = len(prompt) + len(answer.token_ids) - 1
        prompt = [*prompt, *answer.token_ids, *tokens(20, "suffix", turn)]
        assert_nothing_held(stack)
    alone = Counters(stack.prefill_urls[0])
    assert alone.total("kvrelay:loaded_tokens_total") >= CHUNK, "P computed what D had generated"
    guessed = Counters(stack.decode_urls[0])
    assert guessed.total("vllm:spec_decode_num_accepted_tokens_total") > 0, "nothing was guessed rightly"
