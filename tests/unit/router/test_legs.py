"""The two legs' bodies."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.errors import BadRequestError
from kvrelay.router.core.legs import (
    OUTPUT_ONLY,
    OUTPUT_ONLY_OF,
    ClientBody,
    Endpoint,
    encode_fields,
    parse_fields,
    scrub,
)

PARAMS = b'{"do_remote_decode":true}'

values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(-1e300, 1e300) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
names = (
    st.sampled_from(
        sorted(
            OUTPUT_ONLY.union(*OUTPUT_ONLY_OF.values())
            | {"prompt", "messages", "input", "model", "tools", "thinking", "kv_transfer_params"}
        )
    )
    | st.text()
)
bodies = st.dictionaries(names, values, max_size=12)
endpoints = st.sampled_from(list(Endpoint))


def client_body(endpoint: Endpoint = Endpoint.COMPLETIONS, **fields: Any) -> ClientBody:
    return ClientBody(endpoint, parse_fields(json.dumps(fields).encode()))


@given(endpoints, bodies)
def test_the_decode_leg_is_the_clients_request_plus_our_parameters(endpoint: Endpoint, sent: dict[str, Any]) -> None:
    body = ClientBody(endpoint, parse_fields(json.dumps(sent).encode()))
    leg = json.loads(body.decode(PARAMS))
    assert leg.pop("kv_transfer_params") == {"do_remote_decode": True}
    sent.pop("kv_transfer_params", None)
    assert leg == sent


@given(endpoints, bodies)
def test_the_prefill_leg_asks_for_one_token_of_one_continuation_unstreamed(
    endpoint: Endpoint, sent: dict[str, Any]
) -> None:
    leg = json.loads(ClientBody(endpoint, parse_fields(json.dumps(sent).encode())).prefill(PARAMS))
    limit = "max_output_tokens" if endpoint is Endpoint.RESPONSES else "max_tokens"
    assert leg[limit] == 1
    assert leg.get("max_completion_tokens", 1) == 1
    assert leg["stream"] is False
    assert endpoint is not Endpoint.RESPONSES or leg["store"] is False
    allowed = {limit, "max_completion_tokens", "stream", "store"}
    assert not ((OUTPUT_ONLY | OUTPUT_ONLY_OF[endpoint]) - allowed) & leg.keys()


@given(endpoints, bodies)
def test_the_prefill_leg_keeps_everything_that_is_not_known_to_concern_output(
    endpoint: Endpoint, sent: dict[str, Any]
) -> None:
    leg = json.loads(ClientBody(endpoint, parse_fields(json.dumps(sent).encode())).prefill(PARAMS))
    left_out = OUTPUT_ONLY | OUTPUT_ONLY_OF[endpoint]
    kept = {name: value for name, value in sent.items() if name not in left_out}
    kept["kv_transfer_params"] = {"do_remote_decode": True}
    assert {name: leg[name] for name in kept} == kept


def test_values_pass_byte_for_byte() -> None:
    raw = b'{"prompt": "\\u00e9\xc3\xa9", "temperature": 1.50e0, "seed": 123456789012345678901, "x": [1,  2]}'
    leg = ClientBody(Endpoint.COMPLETIONS, parse_fields(raw)).decode(None)
    for piece in (b'"\\u00e9\xc3\xa9"', b"1.50e0", b"123456789012345678901", b"[1,  2]"):
        assert piece in leg


def test_what_changes_the_prompt_stays_on_the_prefill_leg() -> None:
    prompt_fields = {
        "messages": [{"role": "user", "content": "hi"}], "tools": [{"type": "function"}], "tool_choice": "required",
        "chat_template": "x", "chat_template_kwargs": {"a": 1}, "add_generation_prompt": False, "documents": [],
        "reasoning_effort": "high", "truncate_prompt_tokens": 5, "truncation_side": "left", "cache_salt": "s",
        "mm_processor_kwargs": {}, "response_format": {"type": "json_object"}, "add_special_tokens": True,
        "continue_final_message": True, "model": "m", "priority": 3,
    }  # fmt: skip
    leg = json.loads(client_body(Endpoint.CHAT, **prompt_fields, stop=["a"], logprobs=True).prefill(PARAMS))
    assert {name: leg.get(name) for name in prompt_fields} == prompt_fields
    assert "stop" not in leg
    assert "logprobs" not in leg


def test_a_response_is_prefilled_without_being_stored_or_named() -> None:
    sent = {
        "input": "hi", "instructions": "be brief", "max_output_tokens": 90, "store": True, "stream": True,
        "include": ["message.output_text.logprobs"], "top_logprobs": 2, "request_id": "resp_mine", "seed": 3,
        "text": {"format": {"type": "json_object"}}, "reasoning": {"effort": "low"}, "truncation": "auto",
    }  # fmt: skip
    leg = json.loads(client_body(Endpoint.RESPONSES, **sent).prefill(PARAMS))
    kept = {name: sent[name] for name in ("input", "instructions", "text", "reasoning", "truncation")}
    params = {"kv_transfer_params": {"do_remote_decode": True}}
    assert leg == {**kept, "max_output_tokens": 1, "store": False, "stream": False, **params}


def test_a_response_is_named_on_the_decode_leg_unless_the_client_has_done_so() -> None:
    body = client_body(Endpoint.RESPONSES, input="hi")
    assert json.loads(body.decode(None, "resp_1")) == {"input": "hi", "request_id": "resp_1"}
    own = client_body(Endpoint.RESPONSES, input="hi", request_id="mine")
    assert json.loads(own.decode(PARAMS, "resp_1"))["request_id"] == "mine"
    assert b"request_id" not in client_body(Endpoint.CHAT, messages=[]).decode(None, "resp_1")


@pytest.mark.parametrize(
    ("thinking", "expected"),
    [
        ({"type": "enabled", "budget_tokens": 2000}, {"type": "adaptive"}),
        ({"type": "disabled"}, {"type": "disabled"}),
        ({"type": "adaptive"}, {"type": "adaptive"}),
        ("odd", "odd"),
    ],
)
def test_a_thinking_budget_does_not_get_the_prefill_leg_refused(thinking: Any, expected: Any) -> None:
    """vLLM wants the budget below ``max_tokens``, which is 1 there; it changes nothing of the prompt."""
    body = client_body(Endpoint.MESSAGES, messages=[], max_tokens=4000, thinking=thinking, stop_sequences=["x"])
    leg = json.loads(body.prefill(None))
    assert leg == {"messages": [], "max_tokens": 1, "thinking": expected, "stream": False}
    assert json.loads(body.decode(None))["thinking"] == thinking


@pytest.mark.parametrize(
    ("endpoint", "fields", "expected"),
    [
        (Endpoint.RESPONSES, {"input": "a"}, ""),
        (Endpoint.RESPONSES, {"previous_response_id": "resp_1"}, "previous_response"),
        (Endpoint.RESPONSES, {"previous_response_id": None}, ""),
        (Endpoint.RESPONSES, {"background": True}, "background"),
        (Endpoint.RESPONSES, {"background": False}, ""),
        (Endpoint.RESPONSES, {"tools": [{"type": "function"}, {"type": "custom"}]}, ""),
        (Endpoint.RESPONSES, {"tools": [{"type": "function"}, {"type": "code_interpreter"}]}, "builtin_tools"),
        (Endpoint.RESPONSES, {"tools": [{"type": "mcp"}]}, "builtin_tools"),
        (Endpoint.RESPONSES, {"tools": "odd"}, ""),
        (Endpoint.CHAT, {"background": True, "tools": [{"type": "mcp"}]}, ""),
    ],
)
def test_what_only_a_decode_engine_can_have(endpoint: Endpoint, fields: dict[str, Any], expected: str) -> None:
    assert client_body(endpoint, **fields).alone == expected


@pytest.mark.parametrize("endpoint", [Endpoint.RESPONSES, Endpoint.MESSAGES])
def test_responses_and_messages_are_one_engine_request_whatever_is_in_them(endpoint: Endpoint) -> None:
    body = client_body(endpoint, n=5, prompt=["a", "b"], use_beam_search=True, prompt_logprobs=1, echo=True)
    assert body.num_engine_requests == 1
    assert not body.is_beam_search
    assert not body.reads_no_kv


@pytest.mark.parametrize(
    ("fields", "expected"), [({"model": "é"}, "é"), ({"model": 3}, ""), ({"model": None}, ""), ({}, "")]
)
def test_the_model_asked_for(fields: dict[str, Any], expected: str) -> None:
    assert client_body(**fields).model == expected


def test_max_completion_tokens_is_bounded_only_where_the_client_gave_it() -> None:
    assert "max_completion_tokens" not in json.loads(client_body(max_tokens=9).prefill(PARAMS))
    assert json.loads(client_body(max_completion_tokens=9).prefill(PARAMS))["max_completion_tokens"] == 1


@pytest.mark.parametrize(
    "raw",
    [b"", b"[]", b"null", b'"x"', b"{", b'{"a":NaN}', b'{"a":1}x', b"\xef\xbb\xbf{}", '{"a":1}'.encode("utf-16"),
     b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"],
    ids=["empty", "list", "null", "string", "cut", "nan", "trailing", "bom", "utf16", "deep"],
)  # fmt: skip
def test_what_is_not_a_json_object_is_refused(raw: bytes) -> None:
    with pytest.raises(BadRequestError):
        parse_fields(raw)


@pytest.mark.parametrize(
    "raw",
    [
        b'{"kv_transfer_params":{"a":1}}',
        b'{"kv_transfer_params":1,"kv_transfer_params":2}',
        b'{"kv\\u005ftransfer_params":{"a":1}}',
        b'{"vllm_xargs":{"kv_transfer_params":"x","mine":1}}',
        b'{"vllm_xargs":{"kv_transfer\\u005fparams":"x","mine":1}}',
    ],
)
def test_a_clients_own_parameters_are_stripped_however_they_are_spelt(raw: bytes) -> None:
    fields = parse_fields(raw)
    assert scrub(fields)
    assert "transfer" not in encode_fields(fields).decode()


def test_other_extra_arguments_survive_the_scrubbing() -> None:
    fields = parse_fields(b'{"vllm_xargs":{"mine":1.50}}')
    assert not scrub(fields)
    assert encode_fields(fields) == b'{"vllm_xargs":{"mine":1.50}}'


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"prompt": "a"}, 1),
        ({"prompt": [1, 2, 3]}, 1),
        ({"prompt": ["a"]}, 1),
        ({"prompt": ["a", "b"]}, 2),
        ({"prompt": [[1], [2], [3]]}, 3),
        ({"prompt": ["a", "b"], "n": 3}, 6),
        ({"prompt": "a", "n": None}, 1),
        ({"prompt": "a", "n": "2"}, 2),
        ({"prompt": "a", "n": "many"}, 1),
        ({"prompt": None, "prompt_embeds": ["x", "y"]}, 2),
        ({}, 1),
    ],
)
def test_engine_requests_are_prompts_times_continuations(fields: dict[str, Any], expected: int) -> None:
    assert client_body(**fields).num_engine_requests == expected


@pytest.mark.parametrize(
    ("endpoint", "fields", "expected"),
    [
        (Endpoint.COMPLETIONS, {"prompt_logprobs": 0}, True),
        (Endpoint.COMPLETIONS, {"prompt_logprobs": None}, False),
        (Endpoint.COMPLETIONS, {"echo": True}, False),
        (Endpoint.COMPLETIONS, {"echo": True, "logprobs": 1}, True),
        (Endpoint.COMPLETIONS, {"echo": False, "logprobs": 1}, False),
        (Endpoint.CHAT, {"echo": True}, True),
        (Endpoint.CHAT, {"logprobs": True}, False),
    ],
)
def test_prompt_logprobs_are_known_to_use_no_kv(endpoint: Endpoint, fields: dict[str, Any], *, expected: bool) -> None:
    assert client_body(endpoint, **fields).reads_no_kv is expected
