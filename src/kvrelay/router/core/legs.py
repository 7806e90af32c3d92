"""The two legs' request bodies, made from the client's.

A body is taken apart into ``name -> undecoded JSON`` so that every value the router does not change stays byte for byte
what the client sent. The decode leg is the client's request; the prefill leg asks for the same prompt and one token.

The prefill leg drops what is *known* to concern output only and keeps everything else, so that a field this router has
never heard of still changes the prompt on both sides alike. Notably kept: ``tools``, ``tool_choice``, a chat's
``response_format`` (some models' chat templates print it), a response's ``text`` and a message's ``output_config`` for
the same reason, ``truncate_prompt_tokens``, ``cache_salt``, media options.
Notably dropped: ``stop`` (a finish by stop string makes vLLM withhold ``kv_transfer_params``) and everything that vLLM
checks against ``max_tokens`` or that costs the prefill side work whose result nobody sees.
"""

from __future__ import annotations

import re
from enum import StrEnum

import msgspec
from msgspec import Raw

from kvrelay.errors import BadRequestError

KV_PARAMS = "kv_transfer_params"
XARGS = "vllm_xargs"
"""vLLM passes these to the same place as ``kv_transfer_params``: a second way in."""

Fields = dict[str, Raw]

_decode_fields = msgspec.json.Decoder(dict[str, Raw]).decode
_decode_items = msgspec.json.Decoder(list[Raw]).decode
_decode_text = msgspec.json.Decoder(str).decode
_decode_count = msgspec.json.Decoder(int | None, strict=False).decode
_encode = msgspec.json.Encoder().encode
_QUOTE = ord('"')
_BATCH = re.compile(rb'\[\s*[\["]')
"""A list whose first item is itself a list or a string; a list of numbers is one tokenised prompt."""
_ONE, _FALSE, _NULL, _TRUE = Raw(b"1"), Raw(b"false"), Raw(b"null"), Raw(b"true")
_ADAPTIVE = Raw(b'{"type":"adaptive"}')


class Endpoint(StrEnum):
    """The endpoints that are disaggregated."""

    __hash__ = str.__hash__  # enum's own is written in Python, and every request looks its endpoint up

    COMPLETIONS = "/v1/completions"
    CHAT = "/v1/chat/completions"
    RESPONSES = "/v1/responses"
    MESSAGES = "/v1/messages"


OUTPUT_ONLY = frozenset({
    "stream", "stream_options", "stream_interval", "n", "best_of",
    "max_tokens", "max_completion_tokens", "min_tokens", "min_completion_tokens",
    "logprobs", "top_logprobs", "prompt_logprobs", "logprob_token_ids", "echo",
    "return_token_ids", "return_tokens_as_token_ids", "return_prompt_text", "return_token_offsets",
    "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos",
    "temperature", "top_p", "top_k", "min_p", "seed", "use_beam_search", "length_penalty",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "repetition_detection", "watermarking",
    "logit_bias", "allowed_token_ids", "bad_words", "thinking_token_budget",
    "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
    "guided_decoding_backend", "guided_whitespace_pattern",
})  # fmt: skip
"""Fields that cannot change the prompt's tokens or their KV."""
OUTPUT_ONLY_OF: dict[Endpoint, frozenset[str]] = {
    Endpoint.COMPLETIONS: frozenset({"response_format"}),
    Endpoint.CHAT: frozenset(),
    Endpoint.RESPONSES: frozenset({
        "max_output_tokens", "include", "enable_response_messages", "store", "background", "request_id",
    }),
    Endpoint.MESSAGES: frozenset({"stop_sequences"}),
}  # fmt: skip
"""More of them, of one endpoint."""
FUNCTIONS = frozenset({"function", "custom", "namespace"})
"""Kinds of tools of a response that the client runs; after the others the engine makes another request of its own."""
_LIMIT = {Endpoint.RESPONSES: "max_output_tokens"}


def parse_fields(body: bytes) -> Fields:
    """Take a JSON object apart, values undecoded; of a repeated name the last counts, as for the engines.

    Anything else is refused here rather than passed on: a laxer parser behind us could find fields we did not.

    Raises:
        BadRequestError: the body is not a JSON object.
    """
    try:
        return _decode_fields(body)
    except RecursionError:
        raise BadRequestError("The request body is nested too deeply") from None
    except msgspec.MsgspecError as error:
        raise BadRequestError(f"The request body must be a JSON object: {error}") from None


def scrub(fields: Fields) -> bool:
    """Remove a client's own hand-over parameters, wherever vLLM would take them from. Whether there were any."""
    found = fields.pop(KV_PARAMS, None) is not None
    if (xargs := fields.get(XARGS)) is not None:
        try:
            inner = _decode_fields(xargs)
        except (msgspec.MsgspecError, RecursionError):
            return found  # not an object: every engine refuses it
        if inner.pop(KV_PARAMS, None) is not None:
            fields[XARGS] = Raw(_encode(inner))
            found = True
    return found


def encode_fields(fields: Fields) -> bytes:
    """Put a body together again; values as they came."""
    return _encode(fields)


class ClientBody:
    """A client's request for a generation, without hand-over parameters of its own."""

    __slots__ = ("_dropped", "_num_requests", "endpoint", "fields", "model")

    def __init__(self, endpoint: Endpoint, fields: Fields) -> None:
        """``fields``: as from `parse_fields`; scrubbed here."""
        scrub(fields)
        self.endpoint = endpoint
        self.fields = fields
        self._dropped = OUTPUT_ONLY_OF[endpoint]
        self._num_requests = 0
        """Not counted yet."""
        self.model = text_of(fields, "model")
        """Which model is asked; empty if none is named."""

    @property
    def num_engine_requests(self) -> int:
        """How many engine requests this becomes on the decode side: continuations times prompts."""
        if not self._num_requests:
            self._num_requests = self._num_continuations * self._num_prompts
        return self._num_requests

    @property
    def streams(self) -> bool:
        """Whether a stream of events is asked for."""
        return self.fields.get("stream") == _TRUE

    @property
    def reads_no_kv(self) -> bool:
        """Whether vLLM computes the whole prompt on the decode side whatever is handed over: prompt logprobs."""
        if self.endpoint not in _OPENAI:
            return False
        if self._is_set("prompt_logprobs"):
            return True
        if self.fields.get("echo") != _TRUE:
            return False
        return self.endpoint is Endpoint.CHAT or self._is_set("logprobs")

    @property
    def is_beam_search(self) -> bool:
        """Whether vLLM will make engine requests of its own, which carry no hand-over parameters."""
        return self.endpoint in _OPENAI and self.fields.get("use_beam_search") == _TRUE

    @property
    def previous_response(self) -> str:
        """The stored response that this one continues: one engine knows its messages. Empty if there is none."""
        return text_of(self.fields, "previous_response_id") if self.endpoint is Endpoint.RESPONSES else ""

    @property
    def alone(self) -> str:
        """Why only a decode engine can have this request, whatever the connector; empty if there is no reason."""
        if self.endpoint is not Endpoint.RESPONSES:
            return ""
        if self.previous_response:
            return "previous_response"  # a prefill engine does not know its messages
        if self.fields.get("background") == _TRUE:
            return "background"  # answered before it is begun
        return "builtin_tools" if self._has_builtin_tools else ""

    def prefill(self, params: bytes | None) -> bytes:
        """The prefill leg: the same prompt, one token, not streamed. ``params``: JSON of ``kv_transfer_params``."""
        dropped = self._dropped
        leg: dict[str, Raw] = {
            name: value for name, value in self.fields.items() if name not in OUTPUT_ONLY and name not in dropped
        }
        leg[_LIMIT.get(self.endpoint, "max_tokens")] = _ONE
        leg["stream"] = _FALSE
        if self.endpoint in _OPENAI:
            if "max_completion_tokens" in self.fields:
                leg["max_completion_tokens"] = _ONE
        elif self.endpoint is Endpoint.RESPONSES:
            leg["store"] = _FALSE
        elif _kind(leg.get("thinking")) == "enabled":
            leg["thinking"] = _ADAPTIVE  # its budget must be below max_tokens
        if params is not None:
            leg[KV_PARAMS] = Raw(params)
        return _encode(leg)

    def decode(self, params: bytes | None, name: str = "") -> bytes:
        """The decode leg: what the client sent, plus ``kv_transfer_params`` if ``params`` (JSON) are given.

        ``name``: what a response is to be called, unless the client has named it already.
        """
        leg = self.fields if params is None else {**self.fields, KV_PARAMS: Raw(params)}
        if name and self.endpoint is Endpoint.RESPONSES and "request_id" not in leg:
            leg = {**leg, "request_id": Raw(_encode(name))}
        return _encode(leg)

    def _is_set(self, name: str) -> bool:
        return self.fields.get(name, _NULL) != _NULL

    @property
    def _has_builtin_tools(self) -> bool:
        tools = self.fields.get("tools", _NULL)
        if tools == _NULL:
            return False
        try:
            return any(kind not in FUNCTIONS for kind in map(_kind, _decode_items(tools)) if kind)
        except (msgspec.MsgspecError, RecursionError):
            return False  # every engine refuses it

    @property
    def _num_continuations(self) -> int:
        value = self.fields.get("n") if self.endpoint in _OPENAI else None
        if value is None or value == _ONE:
            return 1
        try:
            return max(1, _decode_count(value) or 1)
        except msgspec.MsgspecError:
            return 1  # every engine refuses it

    @property
    def _num_prompts(self) -> int:
        if self.endpoint is not Endpoint.COMPLETIONS:
            return 1
        return max(1, _num_items(self.fields.get("prompt")) + _num_items(self.fields.get("prompt_embeds")))


_OPENAI = (Endpoint.COMPLETIONS, Endpoint.CHAT)


def text_of(fields: Fields, name: str) -> str:
    """A field that is a string; empty if it is missing or something else."""
    value = fields.get(name)
    if value is None:
        return ""
    try:
        return _decode_text(value)
    except msgspec.MsgspecError:
        return ""


def _kind(value: Raw | None) -> str:
    """The ``type`` of an object; empty if it is none."""
    if value is None:
        return ""
    try:
        return text_of(_decode_fields(value), "type")
    except (msgspec.MsgspecError, RecursionError):
        return ""


def _num_items(value: Raw | None) -> int:
    if value is None or value == _NULL:
        return 0
    view = memoryview(value)
    if view[0] == _QUOTE or _BATCH.match(view) is None:
        return 1
    return len(_decode_items(value))
