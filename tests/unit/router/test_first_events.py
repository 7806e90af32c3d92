"""What P's answer is worth to a client, and what D's becomes after it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvrelay.router.core.continuation import Continuation
from kvrelay.router.core.events import EventCutter
from kvrelay.router.core.first_events import FirstEvents, read_opening
from kvrelay.router.core.first_token import SkipReason
from kvrelay.router.core.legs import Endpoint

DONE = b"data: [DONE]\n\n"
HEAD = {"id": "x-1", "object": "text_completion", "created": 7, "model": 'm"/\\'}
TRICKY = 'said: "choices":[],"usage":{"prompt_tokens":5} data: {"id":"x-1"}\n\n'


def event(choices: list[Any], *, created: int = 7, **more: Any) -> bytes:
    return b"data: %b\n\n" % msgspec.json.encode({**HEAD, "created": created, "choices": choices, **more})


def text(said: str, **more: Any) -> dict[str, Any]:
    choice = {
        "index": 0, "text": said, "logprobs": None, "finish_reason": None, "stop_reason": None,
        "prompt_token_ids": None, "token_ids": None,
    }  # fmt: skip
    return {**choice, **more}


def delta(said: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"index": 0, "delta": said, "logprobs": None, "finish_reason": None, "token_ids": None, **more}


def usage(prompt: int, completion: int, **more: Any) -> dict[str, Any]:
    return {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion, **more}


LAST = {"finish_reason": "length", "stop_reason": None, "token_ids": [9]}


def completion_answer(said: str = " a", count: dict[str, Any] | None = None, **more: Any) -> bytes:
    choice = text(said, **{**LAST, "prompt_token_ids": [1, 2], **more})
    return event([choice]) + event([], usage=count or usage(2, 1)) + DONE


def chat_answer(said: dict[str, Any] | None = None, **more: Any) -> bytes:
    role = event([delta({"role": "assistant", "content": ""})], prompt_token_ids=[1, 2], prompt_text=None)
    last = event([delta({"content": " a"} if said is None else said, **{**LAST, **more})])
    return role + last + event([], usage=usage(2, 1)) + DONE


def opened(endpoint: Endpoint, answer: bytes) -> FirstEvents:
    opening = read_opening(endpoint, answer)
    assert isinstance(opening, FirstEvents)
    return opening


def test_a_completion_begins_with_its_chunk_without_its_end() -> None:
    opening = opened(Endpoint.COMPLETIONS, completion_answer())
    assert opening.events == event([text(" a")])
    assert (opening.prompt_ids, opening.num_prompt_tokens, opening.token_id) == (b"[1,2]", 2, 9)
    assert opening.continued_ids == b"[1,2,9]"


def test_a_chat_begins_with_its_role_and_a_chunk_that_does_not_stop() -> None:
    opening = opened(Endpoint.CHAT, chat_answer())
    role = event([delta({"role": "assistant", "content": ""})], prompt_token_ids=None, prompt_text=None)
    assert opening.events == role + event([delta({"content": " a"})])


def test_text_is_moved_as_it_stands() -> None:
    answer = completion_answer("@").replace(b'"@"', rb'"\u00e9\/"')
    assert rb'"text":"\u00e9\/"' in opened(Endpoint.COMPLETIONS, answer).events


@pytest.mark.parametrize("said", ["", " ", "\ufffd", " a\ufffd"])
def test_a_token_that_is_no_whole_text_is_left_to_d(said: str) -> None:
    assert read_opening(Endpoint.COMPLETIONS, completion_answer(said)) is SkipReason.PARTIAL_TEXT
    assert read_opening(Endpoint.CHAT, chat_answer({"content": said})) is SkipReason.PARTIAL_TEXT


def test_a_token_that_ends_the_answer_is_left_to_d() -> None:
    ends: dict[str, Any] = {"finish_reason": "stop"}
    assert read_opening(Endpoint.COMPLETIONS, completion_answer("", **ends)) is SkipReason.ENDED
    assert read_opening(Endpoint.CHAT, chat_answer({"content": "x"}, **ends)) is SkipReason.ENDED


@pytest.mark.parametrize(
    "answer",
    [
        b"", b"{}", DONE, b"data: 5\n\n" + DONE,
        b'data: {"error":{"message":"m"}}\n\n' + DONE,
        completion_answer().removesuffix(DONE),
        completion_answer(count=usage(3, 1)),
        completion_answer(count=usage(2, 2)),
        completion_answer(count=usage(2, 1, completion_tokens_details={"reasoning_tokens": 0})),
        completion_answer(logprobs={"tokens": []}),
        completion_answer(unheard_of=1),
        completion_answer(index=1),
        event([text(" a", **LAST, )]) + DONE,
        event([text(" a", **LAST)], usage=usage(2, 1)) + event([], usage=usage(2, 1)) + DONE,
        event([text("a")]) + completion_answer(),
        chat_answer(),
    ],
)  # fmt: skip
def test_an_answer_with_anything_unknown_is_not_used(answer: bytes) -> None:
    assert read_opening(Endpoint.COMPLETIONS, answer) is SkipReason.ANSWER


@pytest.mark.parametrize("said", [{}, {"reasoning": "x"}, {"content": "a", "reasoning": None}, {"tool_calls": []}])
def test_a_chats_chunk_must_be_plain_content(said: dict[str, Any]) -> None:
    assert read_opening(Endpoint.CHAT, chat_answer(said)) is SkipReason.ANSWER


# --- D's stream ---


def passed_on(endpoint: Endpoint, stream: bytes, size: int) -> bytes:
    """What the client gets of a stream that arrives in pieces of ``size`` bytes."""
    answer = completion_answer() if endpoint is Endpoint.COMPLETIONS else chat_answer()
    continuation, cutter = Continuation(endpoint, opened(endpoint, answer)), EventCutter()
    pieces = [stream[at : at + size] for at in range(0, len(stream), size)]
    out = b"".join(continuation.feed(cutter.feed(piece)) for piece in pieces)
    return out + continuation.feed(cutter.rest())


SIZES = [1, 7, 100, 10_000]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("created", [7, 8])
def test_a_completion_goes_on_under_the_first_chunks_head_and_counts_its_token(size: int, created: int) -> None:
    said = [[text(TRICKY)], [text("b", finish_reason="length")]]
    counted: dict[str, Any] = {
        "usage": usage(3, 2, prompt_tokens_details={"cached_tokens": 2}),
        "system_fingerprint": "f",
    }
    stream = b"".join(event(choices, created=created) for choices in said) + event([], created=created, **counted)
    expected = b"".join(event(choices) for choices in said)
    right = {**counted, "usage": usage(2, 3, prompt_tokens_details={"cached_tokens": 2})}
    assert passed_on(Endpoint.COMPLETIONS, stream + DONE, size) == expected + event([], **right) + DONE


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("created", [7, 8])
def test_a_chats_second_role_is_left_out(size: int, created: int) -> None:
    role = event([delta({"role": "assistant", "content": ""})], created=created, prompt_token_ids=None)
    said = [[delta({"content": TRICKY})], [delta({"role": "assistant", "content": ""})]]
    stream = role + b"".join(event(choices, created=created) for choices in said)
    expected = b"".join(event(choices) for choices in said)
    assert passed_on(Endpoint.CHAT, stream + DONE, size) == expected + DONE


@pytest.mark.parametrize("endpoint", [Endpoint.COMPLETIONS, Endpoint.CHAT])
def test_an_error_in_place_of_a_beginning_is_passed_on(endpoint: Endpoint) -> None:
    stream = b'data: {"error":{"message":"m"}}\n\n' + DONE
    assert passed_on(endpoint, stream, 10_000) == stream


def test_a_chat_that_begins_without_a_role_loses_nothing() -> None:
    stream = event([delta({"content": "b"})]) + DONE
    assert passed_on(Endpoint.CHAT, stream, 10_000) == stream
