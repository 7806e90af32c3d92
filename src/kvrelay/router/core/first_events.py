"""What P's answer is worth to a client: the events a stream begins with, taken out of it.

The prefill leg of such a request is a stream of one token, so that everything a vLLM of this configuration says in each
chunk is there. Text is moved as it stands, undecoded JSON; what only the prefill leg was asked for is emptied.

The decode engine makes text of what follows from the tokens before it, and must come to what it would have come to had
it made the first token's text itself. It does unless that token ends inside a character, or is nothing but spaces,
which SentencePiece's decoder strips from a beginning (``tests/e2e/test_text_across_the_first_token.py``).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec
from msgspec import Raw, Struct

from kvrelay.router.core.first_token import SkipReason
from kvrelay.router.core.legs import Endpoint

if TYPE_CHECKING:
    from collections.abc import Mapping

HEAD = re.compile(
    rb'data: (\{"id":"[^"\\]*","object":"[a-z._]*","created":[0-9]+,"model":"(?:[^"\\]|\\.)*"),"choices":'
)
"""How every chunk of a stream begins; the group is the same in all of them."""
DONE = b"data: [DONE]"
_NULL = Raw(b"null")
_HEAD_FIELDS = ("id", "object", "created", "model", "choices")
_EMPTIED = frozenset({"prompt_token_ids", "prompt_text"})
_CHOICE = {
    Endpoint.COMPLETIONS: frozenset({
        "index", "text", "logprobs", "finish_reason", "stop_reason", "prompt_token_ids", "token_ids",
    }),
    Endpoint.CHAT: frozenset({"index", "delta", "logprobs", "finish_reason", "stop_reason", "token_ids"}),
}  # fmt: skip
_read = msgspec.json.Decoder(dict[str, Raw]).decode
_read_choices = msgspec.json.Decoder(list[dict[str, Raw]]).decode
_read_text = msgspec.json.Decoder(str).decode
_read_ids = msgspec.json.Decoder(list[int]).decode
_encode = msgspec.json.Encoder().encode


class FirstEvents(Struct, frozen=True):
    """The beginning of an answer."""

    events: bytes
    """For the client: a chat's role, and the first token."""
    head: bytes
    """How each of its chunks begins."""
    prompt_ids: bytes
    """JSON: the prompt's token ids."""
    num_prompt_tokens: int
    token_id: int

    @property
    def continued_ids(self) -> bytes:
        """JSON: the prompt's token ids, and the first token's."""
        return b"%b,%d]" % (self.prompt_ids.rstrip()[:-1], self.token_id)


class _Usage(Struct):
    prompt_tokens: int
    completion_tokens: int
    completion_tokens_details: object = None


class _UsageChunk(Struct):
    usage: _Usage


_read_usage = msgspec.json.Decoder(_UsageChunk).decode


def read_opening(endpoint: Endpoint, answer: bytes) -> FirstEvents | SkipReason:
    """What a prefill leg's whole answer begins with; or why it cannot be used. Not of an answer that is no stream."""
    try:
        return _read_opening(endpoint, answer)
    except (msgspec.MsgspecError, RecursionError, KeyError):
        return SkipReason.ANSWER


def _read_opening(endpoint: Endpoint, answer: bytes) -> FirstEvents | SkipReason:
    chat = endpoint is Endpoint.CHAT
    *events, usage, done = answer.strip().split(b"\n\n") if answer.count(b"\n\n") > 1 else (b"", b"", b"")
    found = HEAD.match(events[0]) if events else None
    if found is None or done != DONE or len(events) != (2 if chat else 1):
        return SkipReason.ANSWER
    head = found[1]
    if not all(event.startswith(b"data: %b," % head) for event in (*events, usage)):
        return SkipReason.ANSWER
    chunks = [_read(event[6:]) for event in events]
    counted = _read_usage(usage[6:]).usage
    if any(not _is_plain(chunk) for chunk in chunks) or counted.completion_tokens_details is not None:
        return SkipReason.ANSWER
    (choice,) = _read_choices(chunks[-1]["choices"])
    prompt_ids = bytes(chunks[0]["prompt_token_ids"] if chat else choice["prompt_token_ids"])
    num_prompt_tokens = counted.prompt_tokens
    said = _said(endpoint, choice)
    if said is None or prompt_ids.count(b",") + 1 != num_prompt_tokens or counted.completion_tokens != 1:
        return SkipReason.ANSWER
    if choice["finish_reason"] != Raw(b'"length"'):
        return SkipReason.ENDED
    if not said.strip(" ") or said.endswith("\ufffd"):
        return SkipReason.PARTIAL_TEXT
    (token_id,) = _read_ids(choice["token_ids"])
    opened = [_emptied(chunk) for chunk in chunks[:-1]] + [_emptied(chunks[-1], _opened(endpoint, choice))]
    sent = b"".join(b"data: %b\n\n" % _encode(chunk) for chunk in opened)
    return FirstEvents(sent, head, prompt_ids, num_prompt_tokens, token_id)


def _is_plain(chunk: Mapping[str, Raw]) -> bool:
    """Whether a chunk has nothing but what is known here. Usage in every chunk is an engine's own setting."""
    return tuple(chunk)[: len(_HEAD_FIELDS)] == _HEAD_FIELDS and chunk.keys() <= {*_HEAD_FIELDS, *_EMPTIED}


def _said(endpoint: Endpoint, choice: Mapping[str, Raw]) -> str | None:
    """The choice's text; None if it has anything else that is not known here."""
    if not choice.keys() <= _CHOICE[endpoint] or choice["index"] != Raw(b"0") or choice["logprobs"] != _NULL:
        return None
    if endpoint is Endpoint.COMPLETIONS:
        return _read_text(choice["text"])
    delta = _read(choice["delta"])
    return _read_text(delta["content"]) if delta.keys() == {"content"} else None


def _opened(endpoint: Endpoint, choice: Mapping[str, Raw]) -> dict[str, Raw]:
    """The choice as it is where the answer goes on: a chat's says why it stopped in its last chunk only."""
    dropped = {"stop_reason"} if endpoint is Endpoint.CHAT else set()
    emptied = {"finish_reason", "stop_reason", "token_ids", "prompt_token_ids"}
    return {name: _NULL if name in emptied else value for name, value in choice.items() if name not in dropped}


def _emptied(chunk: Mapping[str, Raw], choice: Mapping[str, Raw] | None = None) -> dict[str, Raw]:
    emptied = {name: _NULL if name in _EMPTIED else value for name, value in chunk.items()}
    return emptied if choice is None else {**emptied, "choices": Raw(_encode([choice]))}
