"""The first token from P: which streams may have it, and what their legs are asked.

The prefill engine's one token is the answer's first: the client gets it at once, and the decode engine is asked to
continue the prompt *and* that token. A decode engine cannot know that the token is not part of the prompt, so this is
done only where that makes no difference to anything the client sees: greedy streams of one continuation whose every
field is known here. `reason_against` names what stands against it. Fields are allowed by name, values by value; a field
nobody here has heard of is one reason.

What the engines add by themselves (a model's default penalties, limits on output, parsers) is `Defaults`, asked of each
engine beforehand.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import TYPE_CHECKING, Literal

import msgspec
from msgspec import Raw, Struct

from kvrelay.router.core.legs import KV_PARAMS, Endpoint, encode_fields

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvrelay.router.core.engine_defaults import Defaults
    from kvrelay.router.core.first_events import FirstEvents
    from kvrelay.router.core.legs import ClientBody, Fields


class SkipReason(StrEnum):
    """Why a stream's first token comes from D after all."""

    CONNECTOR = "connector"
    """The engines' connector cannot continue a hand-over."""
    POLICY = "policy"
    """Nothing may be sent before the decode side has proven what it took, or may lose it."""
    ALONE = "alone"
    """No prefill engine is asked, or a decode engine first."""
    ENDPOINT = "endpoint"
    """Neither completions nor chats."""
    SAMPLING = "sampling"
    """Not known to be greedy, or more than one continuation."""
    MAX_TOKENS = "max_tokens"
    LOGPROBS = "logprobs"
    STOP = "stop"
    GUIDED = "guided"
    """Tools, reasoning, guided decoding: text is constrained or parsed."""
    PROMPT = "prompt"
    """More than one prompt, or not text and not token ids."""
    STREAM_OPTIONS = "stream_options"
    FIELD = "field"
    """A field, or a value, that is not known here."""
    UNKNOWN_MODEL = "unknown_model"
    """What the engines add by themselves is not known (yet), or not the same on all of them."""
    MODEL = "model"
    """The engines add something that makes a difference."""
    LENGTH = "length"
    """The first token fills the model's context."""
    ENDED = "ended"
    """The first token ended the answer."""
    PARTIAL_TEXT = "partial_text"
    """The first token is no text to go on from: part of a character, only spaces, or none at all."""
    ANSWER = "answer"
    """The prefill engine's answer has something that is not known here."""
    NO_ANSWER = "no_answer"
    """No prefill engine answered."""


_INT = re.compile(rb"[1-9][0-9]{0,8}")
_ZERO = re.compile(rb"0(\.0+)?")
_NUMBER = re.compile(rb"-?[0-9]+(\.[0-9]+)?|null")
_PROMPT = re.compile(rb'"|\[\s*[0-9]')
_TRUE, _FALSE, _NULL = b"true", b"false", b"null"
_ONE = Raw(b"1")

ENDPOINTS = (Endpoint.COMPLETIONS, Endpoint.CHAT)
FREE = frozenset({
    "model", "prompt", "messages", "stream", "stream_options", "temperature", "max_tokens", "max_completion_tokens",
    "user", "cache_salt", "add_special_tokens", "add_generation_prompt", "continue_final_message",
    "chat_template_kwargs",
})  # fmt: skip
"""Looked at by themselves, or part of the prompt only."""
NUMBERS = frozenset({"top_p", "top_k", "min_p"})
"""Greedy decoding does not look at them."""
NEUTRAL: dict[str, tuple[SkipReason, tuple[bytes, ...]]] = {
    "n": (SkipReason.SAMPLING, (b"1", _NULL)),
    "best_of": (SkipReason.SAMPLING, (b"1", _NULL)),
    "seed": (SkipReason.SAMPLING, (_NULL,)),
    "presence_penalty": (SkipReason.SAMPLING, (b"0", b"0.0", _NULL)),
    "frequency_penalty": (SkipReason.SAMPLING, (b"0", b"0.0", _NULL)),
    "repetition_penalty": (SkipReason.SAMPLING, (b"1", b"1.0", _NULL)),
    "logit_bias": (SkipReason.SAMPLING, (b"{}", _NULL)),
    "use_beam_search": (SkipReason.SAMPLING, (_FALSE,)),
    "min_tokens": (SkipReason.MAX_TOKENS, (b"0",)),
    "logprobs": (SkipReason.LOGPROBS, (_NULL,)),
    "top_logprobs": (SkipReason.LOGPROBS, (b"0", _NULL)),
    "prompt_logprobs": (SkipReason.LOGPROBS, (_NULL,)),
    "return_token_ids": (SkipReason.LOGPROBS, (_FALSE, _NULL)),
    "stop": (SkipReason.STOP, (b"[]", _NULL)),
    "stop_token_ids": (SkipReason.STOP, (b"[]", _NULL)),
    "include_stop_str_in_output": (SkipReason.STOP, (_FALSE,)),
    "ignore_eos": (SkipReason.STOP, (_FALSE, _TRUE)),
    "tools": (SkipReason.GUIDED, (_NULL,)),
    "tool_choice": (SkipReason.GUIDED, (b'"none"',)),
    "response_format": (SkipReason.GUIDED, (_NULL,)),
    "structured_outputs": (SkipReason.GUIDED, (_NULL,)),
    "reasoning_effort": (SkipReason.GUIDED, (_NULL,)),
    "echo": (SkipReason.PROMPT, (_FALSE,)),
    "suffix": (SkipReason.PROMPT, (_NULL,)),
    "skip_special_tokens": (SkipReason.FIELD, (_TRUE,)),
    "spaces_between_special_tokens": (SkipReason.FIELD, (_TRUE,)),
}
"""Values that change nothing, byte for byte, and why any other is against it."""
_CHAT_NEUTRAL = {"logprobs": _FALSE, "parallel_tool_calls": _TRUE}
"""More of them, for chats. Completions take ``"logprobs": false`` for 0, which asks for some."""


class _Text(Struct, forbid_unknown_fields=True):
    type: Literal["text"]
    text: str


class _Message(Struct, forbid_unknown_fields=True):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[_Text]
    name: str | None = None


class _StreamOptions(Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    continuous_usage_stats: Literal[False] | None = None


_read_messages = msgspec.json.Decoder(list[_Message]).decode
_read_options = msgspec.json.Decoder(_StreamOptions | None).decode


def reason_against(body: ClientBody) -> SkipReason | None:
    """Why a stream cannot have its first token from P, as far as the request tells; None if it can."""
    if body.endpoint not in ENDPOINTS:
        return SkipReason.ENDPOINT
    fields = body.fields
    neutral = _CHAT_NEUTRAL if body.endpoint is Endpoint.CHAT else {}
    for name, raw in fields.items():
        if name not in FREE and (against := _field_against(name, bytes(raw), neutral)) is not None:
            return against
    if _ZERO.fullmatch(_value(fields, "temperature")) is None:
        return SkipReason.SAMPLING
    if not _max_tokens_known(body):
        return SkipReason.MAX_TOKENS
    if not _fits(_read_options, fields.get("stream_options", Raw(_NULL))):
        return SkipReason.STREAM_OPTIONS
    if not _is_plain(body):
        return SkipReason.PROMPT
    return None if body.model else SkipReason.FIELD


def _field_against(name: str, value: bytes, neutral: Mapping[str, bytes]) -> SkipReason | None:
    """Why a field's value makes a difference, if it may. ``neutral``: values that make none at this endpoint."""
    if value == neutral.get(name):
        return None
    if name in NUMBERS:
        return None if _NUMBER.fullmatch(value) is not None else SkipReason.FIELD
    against, values = NEUTRAL.get(name, (SkipReason.FIELD, ()))
    return None if value in values else against


def is_stream(body: ClientBody) -> bool:
    """Whether the answer is to be streamed."""
    return _value(body.fields, "stream") == _TRUE


def limit_of(body: ClientBody, defaults: Defaults) -> int | SkipReason | None:
    """How many tokens one vLLM would give at most, so far as the model's context does not end it; None: that alone.

    Why the first token cannot come from P, if the engines would refuse, or add something to, the request.
    """
    if body.endpoint is Endpoint.CHAT and not defaults.plain_chat:
        return SkipReason.MODEL
    if defaults.changes_text:
        return SkipReason.MODEL
    asked = asked_tokens(body)
    if asked is not None and asked > defaults.max_model_len:
        return SkipReason.MAX_TOKENS  # the decode engine refuses it
    limits = [limit for limit in (asked, defaults.max_output) if limit is not None]
    if asked is None and defaults.default_output is not None:
        limits.append(defaults.default_output)
    limit = min(limits, default=None)
    return limit if limit is None or limit > 1 else SkipReason.MAX_TOKENS


def asked_tokens(body: ClientBody) -> int | None:
    """How many tokens the client asks for at most; None if it leaves that to the engine."""
    name = _limit_field(body)
    return None if name is None else int(bytes(body.fields[name]))


def prefill_leg(body: ClientBody, params: bytes | None) -> bytes:
    """The prefill leg: the client's own request, streamed, for one token, with the ids of everything."""
    leg = {**body.fields, "max_tokens": _ONE, "return_token_ids": Raw(_TRUE)}
    if "max_completion_tokens" in body.fields:
        leg["max_completion_tokens"] = _ONE
    leg["stream_options"] = Raw(b'{"include_usage":true}')
    if params is not None:
        leg[KV_PARAMS] = Raw(params)
    return encode_fields(leg)


def decode_leg(body: ClientBody, params: bytes, opening: FirstEvents, limit: int | None) -> bytes:
    """The decode leg: the client's request for what follows the prompt and its first token.

    ``params``: JSON of ``kv_transfer_params``, an object that is not empty; ``limit``: as from `limit_of`.
    """
    leg = dict(body.fields)
    if limit is not None:
        leg[_limit_field(body) or "max_tokens"] = Raw(b"%d" % (limit - 1))
    if body.endpoint is Endpoint.CHAT:
        params = with_prompt(params, opening.continued_ids)
    else:
        leg["prompt"] = Raw(opening.continued_ids)
    leg[KV_PARAMS] = Raw(params)
    return encode_fields(leg)


def with_prompt(params: bytes, ids: bytes) -> bytes:
    """``kv_transfer_params`` that give a chat's prompt as token ids: vLLM then makes none of its messages."""
    return b'%b,"prompt_token_ids":%b}' % (params.rstrip()[:-1], ids)


def _limit_field(body: ClientBody) -> str | None:
    names = ("max_completion_tokens", "max_tokens") if body.endpoint is Endpoint.CHAT else ("max_tokens",)
    return next((name for name in names if _value(body.fields, name) != _NULL), None)


def _max_tokens_known(body: ClientBody) -> bool:
    """Whether it is known how many tokens to ask for: what completions default to is a number of each engine's."""
    chat = body.endpoint is Endpoint.CHAT
    if not chat and "max_completion_tokens" in body.fields:
        return False
    named = [_value(body.fields, name) for name in ("max_tokens", "max_completion_tokens")]
    if any(value not in (_NULL, b"1") and _INT.fullmatch(value) is None for value in named):
        return False
    name = _limit_field(body)
    return chat if name is None else _value(body.fields, name) != b"1"


def _is_plain(body: ClientBody) -> bool:
    """Whether the prompt is one text, or messages of text, or token ids."""
    if body.endpoint is Endpoint.CHAT:
        return "prompt" not in body.fields and _fits(_read_messages, body.fields.get("messages", Raw(b"")))
    prompt = memoryview(body.fields.get("prompt", Raw(b"")))
    return "messages" not in body.fields and _PROMPT.match(prompt) is not None


def _value(fields: Fields, name: str) -> bytes:
    raw = fields.get(name)
    return _NULL if raw is None else bytes(raw)


def _fits(read: object, raw: Raw) -> bool:
    try:
        read(raw)  # type: ignore[operator]
    except (msgspec.MsgspecError, RecursionError):
        return False
    return True
