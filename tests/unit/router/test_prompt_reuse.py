"""Tokenising once: which decode legs are given the prefill side's token ids, and how."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvrelay.router.core.legs import ClientBody, Endpoint, parse_fields
from kvrelay.router.core.prompt_reuse import PromptIds, asking_for_ids, decode_leg, may_reuse, read_ids

COMPLETION = {"model": "m", "prompt": "hi", "max_tokens": 5}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
IDS = PromptIds(b"[1,2,3]")


def body(fields: dict[str, Any], endpoint: Endpoint | None = None) -> ClientBody:
    of = endpoint or (Endpoint.CHAT if "messages" in fields else Endpoint.COMPLETIONS)
    return ClientBody(of, parse_fields(msgspec.json.encode(fields)))


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"n": 3, "temperature": 0.7, "seed": 1, "stop": ["x"], "logprobs": 2, "stream": True, "echo": False},
        {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}, "min_tokens": 2},
    ],
)
def test_whatever_concerns_the_answer_alone_does_not_matter(more: dict[str, Any]) -> None:
    assert may_reuse(body({**COMPLETION, **more}))
    assert may_reuse(body({**CHAT, **more, "tools": [{"type": "function"}], "tool_choice": "auto"}))


@pytest.mark.parametrize(
    "more",
    [
        {"echo": True}, {"unheard_of": 1}, {"truncate_prompt_tokens": 5}, {"prompt_embeds": "x"}, {"suffix": "x"},
        {"return_prompt_text": True}, {"use_beam_search": True}, {"vllm_xargs": {"a": 1}},
    ],
)  # fmt: skip
def test_what_needs_the_prompt_or_is_not_known_does(more: dict[str, Any]) -> None:
    assert not may_reuse(body({**COMPLETION, **more}))
    assert not may_reuse(body({**CHAT, **more}))


@pytest.mark.parametrize("prompt", [["a"], ["a", "b"], [1, 2], [[1]], None])
def test_only_one_text_is_worth_it(prompt: object) -> None:
    assert not may_reuse(body({**COMPLETION, "prompt": prompt}))


def test_other_endpoints_make_their_own() -> None:
    assert not may_reuse(body({"model": "m", "input": "x"}, Endpoint.RESPONSES))
    assert not may_reuse(body(CHAT, Endpoint.MESSAGES))


def test_the_prefill_leg_asks_for_them() -> None:
    leg = body(COMPLETION).prefill(None)
    assert msgspec.json.decode(asking_for_ids(leg)) == {**msgspec.json.decode(leg), "return_token_ids": True}


def test_answers_give_them_where_vllm_puts_them() -> None:
    completion = msgspec.json.encode({"choices": [{"text": "a", "prompt_token_ids": [1, 2, 3]}]})
    chat = msgspec.json.encode({"choices": [{"message": {}}], "prompt_token_ids": [1, 2, 3]})
    assert read_ids(Endpoint.COMPLETIONS, completion) == read_ids(Endpoint.CHAT, chat) == IDS
    assert IDS.count == 3
    for nothing in (b"", b"{}", b'{"choices":[{}]}', b'{"choices":[{"prompt_token_ids":[]}]}', b'{"choices":5}'):
        assert read_ids(Endpoint.COMPLETIONS, nothing) is None
        assert read_ids(Endpoint.CHAT, nothing) is None


def test_the_decode_leg_has_them_in_place_of_text_or_beside_messages() -> None:
    leg = msgspec.json.decode(decode_leg(body(COMPLETION), b'{"p":1}', IDS))
    assert leg == {**COMPLETION, "prompt": [1, 2, 3], "kv_transfer_params": {"p": 1}}
    assert msgspec.json.decode(decode_leg(body(COMPLETION), None, IDS)) == {**COMPLETION, "prompt": [1, 2, 3]}
    leg = msgspec.json.decode(decode_leg(body(CHAT), b'{"p":1}', IDS))
    assert leg == {**CHAT, "kv_transfer_params": {"p": 1, "prompt_token_ids": [1, 2, 3]}}
    leg = msgspec.json.decode(decode_leg(body(CHAT), None, IDS))
    assert leg == {**CHAT, "kv_transfer_params": {"prompt_token_ids": [1, 2, 3]}}
