"""The harness itself: a stack that answers."""

from __future__ import annotations

import json
import urllib.request
from typing import TYPE_CHECKING, Any

from asking import engines_idle, eventually

from kvrelay.testing.stack import Counters

if TYPE_CHECKING:
    from kvrelay.testing.stack import RunningStack


def complete(stack: RunningStack, prompt: str) -> str:
    body = {"model": stack.model_name, "prompt": prompt, "max_tokens": 8, "temperature": 0}
    request = urllib.request.Request(
        f"{stack.base_url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        reply: dict[str, Any] = json.load(answer)
    text: str = reply["choices"][0]["text"]
    return text


def test_the_stack_answers_as_the_plain_engine_does(stack: RunningStack, reference: RunningStack) -> None:
    prompt = "The yield statement is semantically equivalent to a yield expression. " * 30
    assert complete(stack, prompt) == complete(reference, prompt)
    assert Counters(stack.prefill_urls[0]).total("vllm:prompt_tokens_total") > 0
    eventually(lambda: engines_idle([*stack.prefill_urls, *stack.decode_urls]), bool, "idle engines")
