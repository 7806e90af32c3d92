"""The first token from P: which streams may have it, and what their legs are asked."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvrelay.router.core.engine_defaults import Defaults, Question, Said, ask_defaults
from kvrelay.router.core.first_events import FirstEvents
from kvrelay.router.core.first_token import (
    FREE,
    NEUTRAL,
    NUMBERS,
    SkipReason,
    asked_tokens,
    decode_leg,
    limit_of,
    prefill_leg,
    reason_against,
)
from kvrelay.router.core.legs import ClientBody, Endpoint, parse_fields

COMPLETION = {"model": "m", "prompt": "hi", "stream": True, "temperature": 0, "max_tokens": 5}
CHAT = {
    "model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True, "temperature": 0.0,
}  # fmt: skip
DEFAULTS = Defaults(
    max_model_len=100, max_output=None, default_output=None, changes_text=False, plain_chat=True, sampling=""
)
OPENING = FirstEvents(events=b"", head=b"", prompt_ids=b"[1,2,3]", num_prompt_tokens=3, token_id=9)


def body(fields: dict[str, Any]) -> ClientBody:
    endpoint = Endpoint.CHAT if "messages" in fields else Endpoint.COMPLETIONS
    return ClientBody(endpoint, parse_fields(msgspec.json.encode(fields)))


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"n": 1, "seed": None, "presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": None, "stop": None},
        {"top_p": 0.9, "top_k": 40, "min_p": 0.1, "user": "somebody", "cache_salt": "s", "ignore_eos": True},
        {"stream_options": {"include_usage": True}},
        {"stream_options": {"include_usage": False, "continuous_usage_stats": False}},
        {"stream_options": None, "return_token_ids": False, "echo": False},
    ],
)
def test_greedy_streams_of_known_fields_may(more: dict[str, Any]) -> None:
    assert reason_against(body({**COMPLETION, **more})) is None
    assert reason_against(body({**CHAT, **more})) is None


def test_prompts_may_be_one_text_or_its_tokens() -> None:
    assert reason_against(body({**COMPLETION, "prompt": [1, 2, 3]})) is None
    for prompt in (["a"], ["a", "b"], [[1, 2]], [], None, 5):
        assert reason_against(body({**COMPLETION, "prompt": prompt})) is SkipReason.PROMPT
    nothing = {name: value for name, value in COMPLETION.items() if name != "prompt"}
    assert reason_against(body(nothing)) is SkipReason.PROMPT


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"temperature": 0.1}, SkipReason.SAMPLING),
        ({"temperature": None}, SkipReason.SAMPLING),
        ({"temperature": "0"}, SkipReason.SAMPLING),
        ({"n": 2}, SkipReason.SAMPLING),
        ({"best_of": 2}, SkipReason.SAMPLING),
        ({"seed": 1}, SkipReason.SAMPLING),
        ({"presence_penalty": 0.1}, SkipReason.SAMPLING),
        ({"frequency_penalty": -1}, SkipReason.SAMPLING),
        ({"repetition_penalty": 1.1}, SkipReason.SAMPLING),
        ({"logit_bias": {"5": 1}}, SkipReason.SAMPLING),
        ({"use_beam_search": True}, SkipReason.SAMPLING),
        ({"max_tokens": 1}, SkipReason.MAX_TOKENS),
        ({"max_tokens": 0}, SkipReason.MAX_TOKENS),
        ({"max_tokens": "5"}, SkipReason.MAX_TOKENS),
        ({"max_tokens": 5.0}, SkipReason.MAX_TOKENS),
        ({"min_tokens": 3}, SkipReason.MAX_TOKENS),
        ({"logprobs": 0}, SkipReason.LOGPROBS),
        ({"logprobs": True}, SkipReason.LOGPROBS),
        ({"prompt_logprobs": 1}, SkipReason.LOGPROBS),
        ({"return_token_ids": True}, SkipReason.LOGPROBS),
        ({"stop": ["x"]}, SkipReason.STOP),
        ({"stop": "x"}, SkipReason.STOP),
        ({"stop_token_ids": [5]}, SkipReason.STOP),
        ({"ignore_eos": "yes"}, SkipReason.STOP),
        ({"response_format": {"type": "json_object"}}, SkipReason.GUIDED),
        ({"structured_outputs": {"regex": "a"}}, SkipReason.GUIDED),
        ({"tools": [{"type": "function"}]}, SkipReason.GUIDED),
        ({"reasoning_effort": "low"}, SkipReason.GUIDED),
        ({"echo": True}, SkipReason.PROMPT),
        ({"stream_options": {"include_usage": True, "continuous_usage_stats": True}}, SkipReason.STREAM_OPTIONS),
        ({"stream_options": {"include_obfuscation": True}}, SkipReason.STREAM_OPTIONS),
        ({"stream_options": "all"}, SkipReason.STREAM_OPTIONS),
        ({"skip_special_tokens": False}, SkipReason.FIELD),
        ({"guided_json": {}}, SkipReason.FIELD),
        ({"bad_words": ["x"]}, SkipReason.FIELD),
        ({"allowed_token_ids": [1]}, SkipReason.FIELD),
        ({"prompt_embeds": "x"}, SkipReason.FIELD),
        ({"truncate_prompt_tokens": 5}, SkipReason.FIELD),
        ({"stream_interval": 5}, SkipReason.FIELD),
        ({"vllm_xargs": {"a": 1}}, SkipReason.FIELD),
        ({"unheard_of": None}, SkipReason.FIELD),
        ({"top_p": "0.9"}, SkipReason.FIELD),
        ({"model": None}, SkipReason.FIELD),
        ({"model": 5}, SkipReason.FIELD),
    ],
)
def test_what_could_make_a_difference_stands_against_it(more: dict[str, Any], why: SkipReason) -> None:
    assert reason_against(body({**COMPLETION, **more})) is why
    if more not in ({"logprobs": 0}, {"max_tokens": 0}):  # of a chat they are no legal values either
        assert reason_against(body({**CHAT, **more})) is why


def test_a_temperature_that_is_not_given_is_the_models_own() -> None:
    for request in (COMPLETION, CHAT):
        unset = {name: value for name, value in request.items() if name != "temperature"}
        assert reason_against(body(unset)) is SkipReason.SAMPLING


def test_logprobs_false_asks_for_none_of_a_chat_only() -> None:
    assert reason_against(body({**CHAT, "logprobs": False, "parallel_tool_calls": True})) is None
    assert reason_against(body({**COMPLETION, "logprobs": False})) is SkipReason.LOGPROBS
    assert reason_against(body({**COMPLETION, "parallel_tool_calls": True})) is SkipReason.FIELD


def test_completions_must_say_how_many_tokens_and_chats_need_not() -> None:
    assert reason_against(body({**COMPLETION, "max_tokens": None})) is SkipReason.MAX_TOKENS
    assert reason_against(body({**COMPLETION, "max_completion_tokens": 5})) is SkipReason.MAX_TOKENS
    for more, asked in (
        ({}, None), ({"max_tokens": None}, None), ({"max_tokens": 7}, 7), ({"max_completion_tokens": 8}, 8),
        ({"max_tokens": 1, "max_completion_tokens": 8}, 8), ({"max_tokens": 7, "max_completion_tokens": None}, 7),
    ):  # fmt: skip
        chat = body({**CHAT, **more})
        assert reason_against(chat) is None, more
        assert asked_tokens(chat) == asked
    assert reason_against(body({**CHAT, "max_tokens": 8, "max_completion_tokens": 1})) is SkipReason.MAX_TOKENS


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "input_audio", "input_audio": {}}]},
        {"role": "assistant", "content": "a", "tool_calls": []},
        {"role": "tool", "content": "a", "tool_call_id": "1"},
        {"role": "user", "content": None},
        {"role": "user"},
    ],
)
def test_messages_of_anything_but_text_stand_against_it(message: dict[str, Any]) -> None:
    assert reason_against(body({**CHAT, "messages": [message]})) is SkipReason.PROMPT


def test_messages_of_text_do_not() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    said = [{"role": "system", "content": parts}, {"role": "assistant", "content": "x"}, *CHAT["messages"]]  # type: ignore[misc]
    assert reason_against(body({**CHAT, "messages": said})) is None


@given(st.text(min_size=1), st.none() | st.booleans() | st.integers() | st.text() | st.lists(st.integers()))
def test_no_field_that_is_not_known_gets_through(name: str, value: object) -> None:
    known = {*FREE, *NUMBERS, *NEUTRAL, "parallel_tool_calls", "kv_transfer_params"}
    if name not in known:
        assert reason_against(body({**COMPLETION, name: value})) is SkipReason.FIELD
        assert reason_against(body({**CHAT, name: value})) is SkipReason.FIELD


# --- limits ---


def test_the_limit_is_what_one_vllm_would_give() -> None:
    assert limit_of(body(COMPLETION), DEFAULTS) == 5
    assert limit_of(body(CHAT), DEFAULTS) is None
    assert limit_of(body(CHAT), replace(DEFAULTS, default_output=20)) == 20
    assert limit_of(body(CHAT), replace(DEFAULTS, default_output=20, max_output=10)) == 10
    assert limit_of(body({**CHAT, "max_tokens": 50}), replace(DEFAULTS, default_output=20)) == 50
    assert limit_of(body({**COMPLETION, "max_tokens": 50}), replace(DEFAULTS, max_output=10)) == 10
    assert limit_of(body({**COMPLETION, "max_tokens": 100}), DEFAULTS) == 100


def test_what_the_decode_engine_refuses_or_changes_stands_against_it() -> None:
    assert limit_of(body({**COMPLETION, "max_tokens": 101}), DEFAULTS) is SkipReason.MAX_TOKENS
    assert limit_of(body(COMPLETION), replace(DEFAULTS, max_output=1)) is SkipReason.MAX_TOKENS
    for request in (COMPLETION, CHAT):
        assert limit_of(body(request), replace(DEFAULTS, changes_text=True)) is SkipReason.MODEL
    assert limit_of(body(CHAT), replace(DEFAULTS, plain_chat=False)) is SkipReason.MODEL
    assert limit_of(body(COMPLETION), replace(DEFAULTS, plain_chat=False)) == 5


# --- legs ---


def test_the_prefill_leg_is_the_clients_own_request_for_one_token() -> None:
    sent = {**CHAT, "max_completion_tokens": 9, "ignore_eos": True, "top_p": 0.5}
    leg = msgspec.json.decode(prefill_leg(body(sent), b'{"p":1}'))
    assert leg == {
        **sent, "max_tokens": 1, "max_completion_tokens": 1, "return_token_ids": True,
        "stream_options": {"include_usage": True}, "kv_transfer_params": {"p": 1},
    }  # fmt: skip
    assert "max_completion_tokens" not in msgspec.json.decode(prefill_leg(body(COMPLETION), None))


def test_the_decode_leg_asks_for_what_follows_prompt_and_token() -> None:
    leg = msgspec.json.decode(decode_leg(body(COMPLETION), b'{"p":1}', OPENING, 5))
    assert leg == {**COMPLETION, "prompt": [1, 2, 3, 9], "max_tokens": 4, "kv_transfer_params": {"p": 1}}
    leg = msgspec.json.decode(decode_leg(body(CHAT), b'{"p":1}', OPENING, None))
    assert leg == {**CHAT, "kv_transfer_params": {"p": 1, "prompt_token_ids": [1, 2, 3, 9]}}
    leg = msgspec.json.decode(decode_leg(body({**CHAT, "max_completion_tokens": 9}), b'{"p":1}', OPENING, 6))
    assert leg["max_completion_tokens"] == 5
    leg = msgspec.json.decode(decode_leg(body(CHAT), b'{"p":1}', OPENING, 6))
    assert leg["max_tokens"] == 5


# --- what engines add ---

CARD = {"id": "m", "parent": None, "max_model_len": 100}


def interview(*answers: tuple[int, object]) -> Defaults | None:
    """What it comes to."""
    asking = ask_defaults("m")
    next(asking)
    for status, said in answers:
        try:
            asking.send(Said(status, msgspec.json.encode(said)))
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
    raise AssertionError("it asks on")


def rendered(max_tokens: int, prompt: int = 1, **more: object) -> dict[str, Any]:
    params = {"temperature": 0.0, "max_tokens": max_tokens, "skip_clone": True, "stop": [], "bad_words": [], **more}
    return {"token_ids": [5] * prompt, "sampling_params": params, "reasoning_parser_kwargs": None}


def asked(*answers: tuple[int, object]) -> Defaults:
    known = interview((200, {"data": [CARD]}), *answers)
    assert known is not None
    return known


def test_a_model_that_adds_nothing() -> None:
    known = asked((200, [rendered(99)]), (200, rendered(90, 10)), (400, {}))
    assert (known.max_model_len, known.max_output, known.default_output) == (100, None, None)
    assert (known.changes_text, known.plain_chat) == (False, True)


def test_limits_penalties_and_parsers_are_seen() -> None:
    known = asked((200, [rendered(50)]), (200, rendered(40, 10)), (400, {}))
    assert (known.max_output, known.default_output) == (50, 40)
    assert asked((200, [rendered(99, presence_penalty=0.5)]), (200, rendered(90, 10)), (400, {})).changes_text
    penalised = asked((200, [rendered(99, repetition_penalty=1.1)]), (200, rendered(90, 10)), (400, {}))
    assert not penalised.changes_text
    assert not penalised.agrees(asked((200, [rendered(99)]), (200, rendered(90, 10)), (400, {})))
    assert not asked((200, [rendered(99)]), (200, rendered(90, 10)), (200, {})).plain_chat
    reasons = {**rendered(90, 10), "reasoning_parser_kwargs": {"chat_template_kwargs": {}}}
    assert not asked((200, [rendered(99)]), (200, reasons), (400, {})).plain_chat
    assert not asked((200, [rendered(99)]), (400, {}), (400, {})).plain_chat


def test_adapters_and_unknown_models_are_not_known() -> None:
    assert interview((200, {"data": [{**CARD, "id": "other"}]})) is None
    assert interview((200, {"data": [{**CARD, "parent": "base"}]})) is None
    assert interview((401, {})) is None
    assert interview((200, {"data": [CARD]}), (404, {})) is None


def test_the_first_question_is_which_models_there_are() -> None:
    assert next(ask_defaults("m")) == Question("/v1/models")
