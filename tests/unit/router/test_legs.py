"""The two legs' bodies."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.errors import BadRequestError
from kvrelay.router.core.legs import OUTPUT_ONLY, ClientBody, Endpoint, encode_fields, parse_fields, scrub

PARAMS = b'{"do_remote_decode":true}'

values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(-1e300, 1e300) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
names = (
    st.sampled_from(sorted(OUTPUT_ONLY | {"prompt", "messages", "model", "tools", "kv_transfer_params"})) | st.text()
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
    assert leg["max_tokens"] == 1
    assert leg.get("max_completion_tokens", 1) == 1
    assert leg["stream"] is False
    allowed = {"max_tokens", "max_completion_tokens", "stream"}
    assert not (OUTPUT_ONLY - allowed) & leg.keys()


@given(endpoints, bodies)
def test_the_prefill_leg_keeps_everything_that_is_not_known_to_concern_output(
    endpoint: Endpoint, sent: dict[str, Any]
) -> None:
    leg = json.loads(ClientBody(endpoint, parse_fields(json.dumps(sent).encode())).prefill(PARAMS))
    kept = {name: value for name, value in sent.items() if name not in OUTPUT_ONLY}
    kept["kv_transfer_params"] = {"do_remote_decode": True}
    if endpoint is Endpoint.COMPLETIONS:
        kept.pop("response_format", None)
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
