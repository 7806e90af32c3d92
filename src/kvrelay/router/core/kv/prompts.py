"""Token ids of a request before it is routed: what to ask whom, and what is remembered of it."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from typing import TYPE_CHECKING

import msgspec
from msgspec import Raw, Struct
from xxhash import xxh3_128_digest

from kvrelay.errors import ProtocolError
from kvrelay.router.core.legs import Endpoint
from kvrelay.router.core.prompts import has_media

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from kvrelay.router.core.prompts import Prompt

MAX_TOKEN_IDS = 1 << 20
"""Longer prompts go by text."""
_NULL = Raw(b"null")
_COMPLETION = ("model", "prompt", "add_special_tokens")
_CHAT = (
    "model", "messages", "add_generation_prompt", "continue_final_message", "add_special_tokens", "chat_template",
    "chat_template_kwargs", "tools",
)  # fmt: skip
_CHANGE_IT = ("documents", "reasoning_effort", "truncate_prompt_tokens", "prompt_embeds", "previous_response_id")
"""Fields that change a prompt's tokens in ways that `/tokenize` cannot be told."""
_encode = msgspec.json.Encoder().encode
_decode_text = msgspec.json.Decoder(str).decode
_decode_flag = msgspec.json.Decoder(bool).decode


class _Tokenized(Struct):
    tokens: list[int]


_decode_ids = msgspec.json.Decoder(list[int | list[int]]).decode
_decode_tokenized = msgspec.json.Decoder(_Tokenized).decode


def given_ids(prompt: Prompt) -> array[int] | None:
    """The token ids that a request brings itself; None if there are none, or several prompts of them."""
    if prompt.exact is None or len(prompt.parts) != 1 or prompt.exact > MAX_TOKEN_IDS:
        return None
    try:
        decoded = _decode_ids(prompt.parts[0])
    except msgspec.MsgspecError:
        return None
    first = decoded[0] if len(decoded) == 1 else None
    return packed_ids(first if isinstance(first, list) else decoded)


def packed_ids(ids: Sequence[Any]) -> array[int] | None:
    """As the index reads them; None if they are none."""
    try:
        return array("I", ids)
    except (OverflowError, TypeError):
        return None


def question(endpoint: Endpoint, fields: Mapping[str, Raw], prompt: Prompt) -> bytes | None:
    """The body with which `/tokenize` answers for a request; None if it cannot."""
    if not prompt.sized or any(fields.get(name, _NULL) != _NULL for name in _CHANGE_IT):
        return None
    names: tuple[str, ...] = _COMPLETION
    if endpoint is Endpoint.COMPLETIONS:
        if bytes(fields.get("prompt", _NULL))[:1] != b'"':
            return None
    elif endpoint is Endpoint.CHAT:
        names = _CHAT
    else:
        return None
    if has_media(prompt):
        return None
    return _encode({name: fields[name] for name in names if fields.get(name, _NULL) != _NULL})


def text_of_completion(endpoint: Endpoint, fields: Mapping[str, Raw]) -> tuple[str, bool] | None:
    """What a local tokenizer can read: a completion's text, and whether special tokens are added; None for others."""
    if endpoint is not Endpoint.COMPLETIONS or any(fields.get(name, _NULL) != _NULL for name in _CHANGE_IT):
        return None
    try:
        flag = fields.get("add_special_tokens", _NULL)
        return _decode_text(fields.get("prompt", _NULL)), flag == _NULL or _decode_flag(flag)
    except msgspec.MsgspecError:
        return None


def answered_ids(answer: bytes) -> array[int]:
    """What `/tokenize` said.

    Raises:
        ProtocolError: it is something else.
    """
    try:
        ids = packed_ids(_decode_tokenized(answer).tokens)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"/tokenize answered something else: {error}") from None
    if ids is None:
        raise ProtocolError("/tokenize answered with token ids that are none")
    return ids


class Remembered:
    """Answers of `/tokenize` by the question: those used last, up to a number of tokens."""

    def __init__(self, capacity_tokens: int) -> None:
        """Four bytes each, and some 300 for each answer, which count as tokens too."""
        self._capacity = capacity_tokens
        self._tokens = 0
        self._answers: OrderedDict[bytes, array[int]] = OrderedDict()

    OVERHEAD = 75
    """Tokens that an answer counts for beside its own."""

    def find(self, question: bytes) -> array[int] | None:
        """The answer, if it is remembered."""
        key = xxh3_128_digest(question)
        found = self._answers.get(key)
        if found is not None:
            self._answers.move_to_end(key)
        return found

    def add(self, question: bytes, ids: array[int]) -> None:
        """Remember; the longest unused give way."""
        key = xxh3_128_digest(question)
        if (before := self._answers.pop(key, None)) is not None:
            self._tokens -= len(before) + self.OVERHEAD
        self._answers[key] = ids
        self._tokens += len(ids) + self.OVERHEAD
        while self._tokens > self._capacity:
            _, old = self._answers.popitem(last=False)
            self._tokens -= len(old) + self.OVERHEAD
