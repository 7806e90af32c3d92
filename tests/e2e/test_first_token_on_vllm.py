"""Streams that begin with P's token, on real engines: what a client sees is what one plain vLLM says."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from asking import assert_nothing_held, eventually, tokens

if TYPE_CHECKING:
    from kvrelay.testing.stack import RunningStack

BLOCK, CHUNK, STEP, LONGEST = 32, 64, 256, 2048
LENGTHS = [
    1, BLOCK - 1, BLOCK, BLOCK + 1, CHUNK - 1, CHUNK, CHUNK + 1, CHUNK + BLOCK, STEP - 1, STEP, STEP + 1,
    STEP + CHUNK - 1, STEP + CHUNK, STEP + CHUNK + 1, 1000, LONGEST - 3, LONGEST - 2,
]  # fmt: skip
FROM_P = {"x-kvrelay-first-token": "prefill"}
SENTENCE = "The quick brown fox of section {} jumps over the lazy dog while values are passed by reference. "
Events = list[dict[str, Any]]


def completion(model: str, prompt: list[int] | str, **more: Any) -> dict[str, Any]:
    asked = {"model": model, "prompt": prompt, "max_tokens": 12, "temperature": 0, "stream": True}
    return {**asked, "stream_options": {"include_usage": True}, **more}


def chat(model: str, text: str, **more: Any) -> dict[str, Any]:
    asked = {"model": model, "messages": [{"role": "user", "content": text}], "temperature": 0, "stream": True}
    return {**asked, "stream_options": {"include_usage": True}, **more}


def ask(stack: RunningStack, body: dict[str, Any], headers: dict[str, str] | None = None) -> tuple[Events, str]:
    """A stream's events, and the hand-over's id."""
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    reply = httpx.post(f"{stack.base_url}{path}", json=body, headers=headers, timeout=120)
    assert reply.status_code == 200, reply.text
    *lines, done = [line for line in reply.text.split("\n\n") if line]
    assert done == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines], reply.headers.get("x-kvrelay-handover", "")


def record(stack: RunningStack, handover: str) -> dict[str, Any]:
    reply = httpx.get(f"{stack.base_url}/kvrelay/handovers/{handover}", timeout=20)
    return reply.raise_for_status().json()  # type: ignore[no-any-return]


def said(events: Events) -> dict[str, Any]:
    """What a client makes of a stream; its id, time and model are one throughout."""
    assert len({(event["id"], event["created"], event["model"], event["object"]) for event in events}) == 1
    choices = [choice for event in events for choice in event["choices"]]
    return {
        "text": "".join(c["text"] if "text" in c else c["delta"].get("content") or "" for c in choices),
        "roles": [c["delta"]["role"] for c in choices if "role" in c.get("delta", ())],
        "finish": [(c["finish_reason"], c.get("stop_reason")) for c in choices if c["finish_reason"]],
        "usage": [{**event["usage"], "prompt_tokens_details": None} for event in events if event.get("usage")],
        "first chunks": [shape(event) for event in events[: 2 if "delta" in choices[0] else 1]],
    }


def shape(event: dict[str, Any]) -> dict[str, Any]:
    """An event without what differs each time: its id, and how many tokens are in it. A vLLM that lags joins tokens.

    So the text's length does not count, nor whether the answer's end is in this event already.
    """

    def some(text: str | None) -> str | None:
        return "some text" if text else text

    choices = [dict(choice) for choice in event["choices"]]
    for choice in choices:
        choice.update({name: None for name in ("finish_reason", "stop_reason") if name in choice})
        if "text" in choice:
            choice["text"] = some(choice["text"])
        elif "content" in choice["delta"]:
            choice["delta"] = {**choice["delta"], "content": some(choice["delta"]["content"])}
    return {**event, "id": "", "created": 0, "choices": choices}


def compare(stack: RunningStack, reference: RunningStack, body: dict[str, Any]) -> dict[str, Any]:
    """The same is said; and the record of it."""
    (ours, handover), (theirs, _) = ask(stack, body, FROM_P), ask(reference, body)
    right = said(theirs)
    for chunk in right["first chunks"]:
        chunk["model"] = ours[0]["model"]
    assert said(ours) == right
    return record(stack, handover)


@pytest.fixture
def early(stack: RunningStack) -> RunningStack:
    """The stack, when its router knows what the engines add to requests."""

    def seen() -> str:
        _, handover = ask(stack, completion(stack.model_name, "Once upon a time", max_tokens=2), FROM_P)
        return str(record(stack, handover)["first_token"])

    eventually(seen, lambda outcome: outcome != "unknown_model", "what the engines add", within_s=120.0)
    return stack


def proof(stack: RunningStack, told: dict[str, Any]) -> dict[str, Any]:
    (only,) = eventually(
        lambda: record(stack, told["handover"])["proofs"], lambda found: len(found) == 1, "a proof of the hand-over"
    )
    return only  # type: ignore[no-any-return]


def test_every_prompt_length_gives_one_vllms_stream_handed_over_whole(
    early: RunningStack, reference: RunningStack
) -> None:
    came: list[str] = []
    for length in LENGTHS:
        told = compare(early, reference, completion(early.model_name, tokens(length, "first-token", length)))
        came.append(told["first_token"])
        only = proof(early, told)
        if told["first_token"] == "prefill":
            assert only["prompt_tokens"] == length + 1
            assert only["handed_over_tokens"] == length, only
        assert only["recomputed_tokens"] == 1, only
    assert came[-1] == "prefill"
    assert set(came) <= {"prefill", "partial_text", "ended"}
    assert came.count("prefill") >= len(LENGTHS) / 2, came
    assert_nothing_held(early)


def test_the_end_of_the_context_is_where_one_vllm_ends(early: RunningStack, reference: RunningStack) -> None:
    told = compare(early, reference, completion(early.model_name, tokens(LONGEST - 1, "first-token-last", 1)))
    assert told["first_token"] in {"length", "partial_text"}


def test_chats_and_texts_give_one_vllms_stream(early: RunningStack, reference: RunningStack) -> None:
    came: list[str] = []
    for n in (1, 5, 13):
        text = SENTENCE.format(n) * n
        bodies = (
            chat(early.model_name, text, max_tokens=12),
            chat(early.model_name, text, max_completion_tokens=9, stream_options=None),
            completion(early.model_name, text, ignore_eos=True, top_p=0.5),
        )
        came += [compare(early, reference, body)["first_token"] for body in bodies]
    unlimited = chat(early.model_name, SENTENCE.format(1) * 60)  # ends with the context at the latest
    came.append(compare(early, reference, unlimited)["first_token"])
    assert set(came) <= {"prefill", "partial_text", "ended"}
    assert came.count("prefill") >= len(came) / 2, came
    assert_nothing_held(early)


@pytest.mark.parametrize(
    ("more", "why"),
    [({"temperature": 0.7, "seed": 5}, "sampling"), ({"max_tokens": 1}, "max_tokens"), ({"stop": ["e"]}, "stop")],
)
def test_what_could_differ_is_left_to_d(
    early: RunningStack, reference: RunningStack, more: dict[str, Any], why: str
) -> None:
    body = completion(early.model_name, tokens(100, "first-token-left"), **more)
    assert compare(early, reference, body)["first_token"] == why
