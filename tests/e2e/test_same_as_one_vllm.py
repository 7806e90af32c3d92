"""The differential suite: what one plain vLLM says and what comes through the router, field by field.

A slice of it on the stack that stands anyway; all of it, with the features that need flags, by the marker ``matrix``.
"""

from __future__ import annotations

import base64
import io
import itertools
import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import anthropic
import httpx
import openai
import pytest
from asking import assert_nothing_held, eventually
from differing import faults

from kvrelay.testing.differential.api_page import SPECS
from kvrelay.testing.differential.cases import OMIT, Spec, cases, slice_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

    from kvrelay.testing.stack import RunningStack

    Pair = tuple[RunningStack, RunningStack]

FEATURES = "--enable-auto-tool-choice --tool-call-parser hermes --trust-request-chat-template --enable-prompt-embeds"
STORING = "VLLM_ENABLE_RESPONSES_API_STORE"
SHOWN = 40
HIDDEN = 256
"""Of the tiny model."""


@pytest.fixture(scope="module")
def rich(start_stacks: Callable[..., AbstractContextManager[Pair]], tiny_model: Path) -> Iterator[Pair]:
    """A pair whose engines store responses and do what needs a flag."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(STORING, "1")
        with start_stacks(tiny_model, every=[f"--engine-args={FEATURES}"]) as started:
            yield started


def assert_same_everywhere(stack: RunningStack, reference: RunningStack, *, whole: bool) -> None:
    every = cases(SPECS, stack.model_name)
    found = faults(stack, reference, every if whole else slice_of(every))
    assert not found, "\n".join(line[:500] for line in found[:SHOWN])
    assert_nothing_held(stack)


def test_vllm_takes_every_leg_of_every_request_it_takes() -> None:
    command = [sys.executable, "-m", "kvrelay.testing.differential.accepting"]
    *refused, looked = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    assert not refused, "\n".join(refused)
    assert int(looked) > 500


def test_a_slice_of_all_requests_is_answered_as_by_one_vllm(stack: RunningStack, reference: RunningStack) -> None:
    assert_same_everywhere(stack, reference, whole=False)


@pytest.mark.matrix
@pytest.mark.timeout(1800)
def test_all_requests_are_answered_as_by_one_vllm(rich: Pair) -> None:
    assert_same_everywhere(*rich, whole=True)


@pytest.mark.matrix
def test_prompt_embeddings_are_answered_as_by_one_vllm(rich: Pair) -> None:
    one, other = embeddings(40, seed=1), embeddings(70, seed=2)
    values: list[dict[str, Any]] = [
        {"prompt_embeds": one},
        {"prompt_embeds": [one, other]},
        {"prompt_embeds": other, "n": 2, "temperature": 0.8, "seed": 4},
    ]
    spec = Spec(path="/v1/completions", name="tensors", values=tuple({"prompt": OMIT, **value} for value in values))
    stack, reference = rich
    assert not faults(stack, reference, cases([spec], stack.model_name))


def embeddings(count: int, *, seed: int) -> str:
    """As vLLM takes them; what they mean does not matter."""
    import torch

    written = io.BytesIO()
    torch.save(torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(seed)), written)
    return base64.b64encode(written.getvalue()).decode()


@pytest.mark.matrix
def test_a_stored_response_is_continued_with_what_was_said(rich: Pair) -> None:
    said = [conversation(stack) for stack in rich]
    assert said[0] == said[1]


def conversation(stack: RunningStack) -> list[str]:
    with openai.OpenAI(base_url=f"{stack.base_url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        asked: dict[str, Any] = {"model": stack.model_name, "max_output_tokens": 12, "temperature": 0}
        first = client.responses.create(input="Tell me of return values.", **asked)
        second = client.responses.create(input="And of references?", previous_response_id=first.id, **asked)
        found = client.responses.retrieve(second.id)
        assert found.id == second.id
        return [first.output_text, second.output_text, found.output_text]


def test_official_clients_hear_what_they_hear_from_one_vllm(stack: RunningStack, reference: RunningStack) -> None:
    assert heard(stack) == heard(reference)
    assert_nothing_held(stack)


def heard(stack: RunningStack) -> list[Any]:
    model = stack.model_name
    messages: list[Any] = [{"role": "user", "content": "What is a reference?"}]
    said: list[Any] = []
    with anthropic.Anthropic(base_url=stack.base_url, api_key="none", max_retries=0, timeout=60) as claude:
        ask: dict[str, Any] = {"model": model, "messages": messages, "max_tokens": 12, "extra_body": {"temperature": 0}}
        whole = claude.messages.create(**ask)
        said += [[block.text for block in whole.content], whole.stop_reason, whole.usage.output_tokens]
        with claude.messages.stream(**ask) as pieces:
            said.append(pieces.get_final_text())
        said.append(claude.messages.count_tokens(model=model, messages=messages).input_tokens)
        with pytest.raises(anthropic.APIStatusError) as refused:
            claude.messages.create(**{**ask, "max_tokens": 100_000})
        said.append((refused.value.status_code, refused.value.body))
    with openai.OpenAI(base_url=f"{stack.base_url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        response = client.responses.create(model=model, input="What is a scope?", max_output_tokens=9, temperature=0)
        said.append(response.output_text)
        chat = client.chat.completions.create(model=model, messages=messages, max_tokens=9, temperature=0)
        said.append(chat.choices[0].message.content)
        with client.responses.stream(
            model=model, input="What is a name?", max_output_tokens=9, temperature=0
        ) as events:
            said.append("".join(event.delta for event in events if event.type == "response.output_text.delta"))
    body = json.dumps({"model": model, "prompt": "A class is", "max_tokens": 9, "temperature": 0})
    command = ["curl", "-sS", f"{stack.base_url}/v1/completions", "-H", "content-type: application/json", "-d", body]
    answer = json.loads(subprocess.run(command, check=True, capture_output=True, timeout=60).stdout)
    said.append(answer["choices"])
    return said


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": "What is a scope, in a few words? " * 20, "max_output_tokens": 5}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "What is it? " * 40}], "max_tokens": 5}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_responses_and_messages_are_handed_over_whole(
    stack: RunningStack, path: str, body: dict[str, Any], stream: bool
) -> None:
    """Proven before the first byte: a stream of responses must not count as begun when it only repeats the request."""
    turns = itertools.count()

    def ask() -> httpx.Response:
        """A new prompt each time; refused where two busy cores had no ticket in time."""
        asked = {"model": stack.model_name, "temperature": 0, "stream": stream, **body}
        new = json.loads(json.dumps(asked).replace("What", f"Turn {next(turns)}, {stream}: what"))
        return httpx.post(f"{stack.base_url}{path}", json=new, timeout=60, headers={"x-kvrelay-on-lost-kv": "strict"})

    reply = eventually(ask, lambda answer: answer.status_code == 200, "proven answer", within_s=90)
    assert reply.headers["x-kvrelay-prefill"] == "P0"
    handover = httpx.get(f"{stack.base_url}/kvrelay/handovers/{reply.headers['x-kvrelay-handover']}", timeout=20)
    (told,) = handover.json()["proofs"]
    assert told["recomputed_tokens"] <= 1, told
    assert told["handed_over_tokens"] > 64, told
