"""Tokenising once: the prompt's token ids, which P's answer gives, in D's leg instead of what they were made of.

D then neither applies the chat template nor tokenises. It is done where nothing else of the request needs the prompt's
text: a completion of one text, or a chat. A field nobody here has heard of might, so it stands against it.
"""

from __future__ import annotations

import re

import msgspec
from msgspec import Raw, Struct

from kvrelay.router.core.first_token import with_prompt
from kvrelay.router.core.legs import KV_PARAMS, OUTPUT_ONLY, ClientBody, Endpoint, encode_fields

_TEXT = frozenset({"echo", "use_beam_search", "return_prompt_text", "return_token_offsets"})
"""Of the fields that concern output only, those whose output has the prompt in it."""
_KNOWN = (OUTPUT_ONLY - _TEXT) | {
    "model", "user", "cache_salt", "priority", "request_id", "session_id", "add_special_tokens", "skip_special_tokens",
    "spaces_between_special_tokens", "response_format",
}  # fmt: skip
_KNOWN_OF = {
    Endpoint.COMPLETIONS: _KNOWN | {"prompt"},
    Endpoint.CHAT: _KNOWN | {
        "messages", "tools", "tool_choice", "parallel_tool_calls", "reasoning_effort", "include_reasoning", "documents",
        "chat_template", "chat_template_kwargs", "add_generation_prompt", "continue_final_message",
    },
}  # fmt: skip
_TEXT_PROMPT = re.compile(rb'"')
_NO = (Raw(b"false"), Raw(b"null"))


class _Choice(Struct):
    prompt_token_ids: Raw = Raw(b"null")


class _Answer(Struct):
    choices: list[_Choice]
    prompt_token_ids: Raw = Raw(b"null")


_read_answer = msgspec.json.Decoder(_Answer).decode


class PromptIds(Struct, frozen=True):
    """A prompt's token ids."""

    ids: bytes
    """JSON: a list of numbers."""

    @property
    def count(self) -> int:
        """How many there are."""
        return self.ids.count(b",") + 1


def may_reuse(body: ClientBody) -> bool:
    """Whether D may be given the token ids in place of the text."""
    known = _KNOWN_OF.get(body.endpoint, frozenset())
    if not all(name in known or (name in _TEXT and value in _NO) for name, value in body.fields.items()):
        return False
    if body.endpoint is Endpoint.CHAT:
        return "messages" in body.fields
    return _TEXT_PROMPT.match(memoryview(body.fields.get("prompt", Raw(b"")))) is not None


def asking_for_ids(leg: bytes) -> bytes:
    """A prefill leg, an object that is not empty, that asks for the prompt's token ids as well."""
    return leg.rstrip()[:-1] + b',"return_token_ids":true}'


def read_ids(endpoint: Endpoint, answer: bytes) -> PromptIds | None:
    """The prompt's token ids in a prefill leg's answer; None if it has none."""
    try:
        said = _read_answer(answer)
    except (msgspec.MsgspecError, RecursionError):
        return None
    chat = endpoint is Endpoint.CHAT
    ids = bytes(said.prompt_token_ids if chat or not said.choices else said.choices[0].prompt_token_ids)
    return PromptIds(ids) if ids.startswith(b"[") and len(ids) > 2 else None


def decode_leg(body: ClientBody, params: bytes | None, prompt: PromptIds) -> bytes:
    """The decode leg with the prompt as token ids. ``params``: JSON of ``kv_transfer_params``."""
    leg = dict(body.fields)
    if body.endpoint is Endpoint.COMPLETIONS:
        leg["prompt"] = Raw(prompt.ids)
    else:
        params = with_prompt(params, prompt.ids) if params else b'{"prompt_token_ids":%b}' % prompt.ids
    if params is not None:
        leg[KV_PARAMS] = Raw(params)
    return encode_fields(leg)
