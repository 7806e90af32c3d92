"""``--tokenise once`` and first tokens from P on engines with a tool parser: as one plain vLLM, or off by itself."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from asking import assert_nothing_held, eventually
from differing import faults
from prometheus_client.parser import text_string_to_metric_families
from test_first_token_on_vllm import FROM_P, ask, chat, compare, completion, record, said

from kvrelay.testing.differential.api_page import SPECS
from kvrelay.testing.differential.cases import cases

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

    from kvrelay.testing.stack import RunningStack

    Pair = tuple[RunningStack, RunningStack]

pytestmark = [pytest.mark.matrix, pytest.mark.timeout(1800)]
FEATURES = (
    "--enable-scale-out --enable-auto-tool-choice --tool-call-parser hermes --trust-request-chat-template "
    "--enable-prompt-embeds"
)
SHOWN = 40
TOOL = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}},
}
NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def pair(start_stacks: Callable[..., AbstractContextManager[Pair]], tiny_model: Path) -> Iterator[Pair]:
    with start_stacks(tiny_model, every=[f"--engine-args={FEATURES}"], ours=["--tokenise", "once"]) as started:
        yield started


def reused(stack: RunningStack) -> float:
    text = httpx.get(f"{stack.base_url}/metrics", timeout=20).text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    return float(families["kvrelay_router_prompts_reused"].samples[0].value)


def known(stack: RunningStack) -> None:
    """Wait until the router knows what the engines add to requests, of both kinds."""

    def once() -> tuple[bool, bool]:
        found = []
        for make in (completion, chat):
            before = reused(stack)
            ask(stack, make(stack.model_name, f"Once upon a time, {next(NUMBERS)}", max_tokens=2))
            found.append(reused(stack) > before)
        return found[0], found[1]

    def early() -> str:
        _, handover = ask(stack, completion(stack.model_name, "Once upon a time", max_tokens=2), FROM_P)
        return str(record(stack, handover)["first_token"])

    eventually(once, all, "prompts that are tokenised once", within_s=120.0)
    eventually(early, lambda outcome: outcome != "unknown_model", "what the engines add", within_s=120.0)


def test_completions_and_chats_tokenised_once_are_answered_as_by_one_vllm(pair: Pair) -> None:
    stack, reference = pair
    known(stack)
    before = reused(stack)
    specs = [spec for spec in SPECS if spec.path in {"/v1/completions", "/v1/chat/completions"}]
    found = faults(stack, reference, cases(specs, stack.model_name))
    assert not found, "\n".join(line[:500] for line in found[:SHOWN])
    assert reused(stack) > before + 50
    assert_nothing_held(stack)


def test_prompts_of_all_lengths_tokenised_once_are_answered_as_by_one_vllm(pair: Pair) -> None:
    stack, reference = pair
    known(stack)
    for words in (1, 7, 40, 61, 62, 63, 64, 65, 130, 400):
        text = " ".join(f"value{number}" for number in range(words))
        for body in (completion(stack.model_name, text), chat(stack.model_name, text, max_tokens=9, tools=[TOOL])):
            before = reused(stack)
            assert (said(ask(stack, body)[0])["text"], words) == (said(ask(reference, body)[0])["text"], words)
            assert reused(stack) == before + 1, body


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"tools": [TOOL], "tool_choice": "auto"}, {"guided"}),
        ({"tools": [TOOL], "tool_choice": "none"}, {"guided"}),
        ({}, {"model"}),
        ({"presence_penalty": 0.9}, {"sampling"}),
        ({"frequency_penalty": 0.9}, {"sampling"}),
        ({"repetition_penalty": 1.3}, {"sampling"}),
        ({"max_tokens": 1}, {"max_tokens"}),
        ({"min_tokens": 2}, {"max_tokens"}),
    ],
)
def test_a_chat_of_engines_with_a_tool_parser_begins_with_ds_token(
    pair: Pair, more: dict[str, Any], why: set[str]
) -> None:
    stack, reference = pair
    known(stack)
    body = chat(stack.model_name, f"Say something of scopes. {sorted(more)}", **{"max_tokens": 9, **more})
    assert compare(stack, reference, body)["first_token"] in why


def test_an_answer_that_its_first_token_ends_is_one_vllms(pair: Pair) -> None:
    """By its id, by its text, and by the end of the answer."""
    stack, reference = pair
    known(stack)
    ended = set()
    for number in range(12):
        body = completion(stack.model_name, f"Chapter {number} of the tale is about the")
        events, _ = ask(reference, {**body, "return_token_ids": True, "max_tokens": 1})
        ids = [one for event in events for choice in event["choices"] for one in choice.get("token_ids") or ()]
        text = said(events)["text"]
        for more in ({"stop_token_ids": ids[:1]}, {"stop": [text or "x"]}, {"stop": [text[:1] or "x"]}):
            told = compare(stack, reference, {**body, **more})
            assert told["first_token"] == "stop"
        ended.add(compare(stack, reference, body)["first_token"])
    assert ended <= {"prefill", "partial_text", "ended"}
    assert "prefill" in ended


def test_what_is_tokenised_once_and_begins_with_ps_token_is_counted_once(pair: Pair) -> None:
    stack, _ = pair
    known(stack)
    before = reused(stack)
    _, handover = ask(stack, completion(stack.model_name, "A reference to a value is"), FROM_P)
    assert record(stack, handover)["first_token"] in {"prefill", "partial_text", "ended"}
    assert reused(stack) <= before + 1
