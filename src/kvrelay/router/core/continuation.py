"""D's stream on its way to a client who has the first token already.

Three things in it are not one vLLM's, and are set right: each chunk's head (id, time, model) becomes that of the first
token's, a chat's second role chunk goes, and the usage counts the first token as generated. None is generated text: a
quotation mark inside a JSON string is escaped, so none of what is looked for can be part of one.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec
from msgspec import Raw, Struct

from kvrelay.router.core.first_events import HEAD
from kvrelay.router.core.legs import Endpoint

if TYPE_CHECKING:
    from kvrelay.router.core.first_events import FirstEvents

_USAGE = re.compile(rb'"choices":\[\],"usage":(\{)')
_PROMPT, _COMPLETION = re.compile(rb'"prompt_tokens":([0-9]+)'), re.compile(rb'"completion_tokens":([0-9]+)')


class _Delta(Struct):
    role: str | None = None
    content: str | None = None


class _Choice(Struct):
    delta: _Delta
    finish_reason: str | None = None
    token_ids: Raw = Raw(b"null")


class _Chunk(Struct):
    choices: list[_Choice]


_read_chunk = msgspec.json.Decoder(_Chunk).decode


class Continuation:
    """Rewrites one decode leg's stream. Fed with whole events, as `EventCutter` gives them."""

    __slots__ = ("_chat", "_head", "_opening", "_replaced")

    def __init__(self, endpoint: Endpoint, opening: FirstEvents) -> None:
        """``opening``: what the client has."""
        self._chat = endpoint is Endpoint.CHAT
        self._opening = opening
        self._head: bytes | None = None
        """How the decode engine's chunks begin, once one is there."""
        self._replaced = False

    def feed(self, data: bytes) -> bytes:
        """What the client is to get of it."""
        if self._head is None and data:
            data = self._begin(data)
        if self._replaced and self._head is not None:
            data = data.replace(b"data: %b," % self._head, b"data: %b," % self._opening.head)
        if b'"choices":[],"usage":{' in data:
            data = _count(data)
        return data

    def _begin(self, data: bytes) -> bytes:
        """The first events: learn their head, and leave a chat's role out."""
        found = HEAD.match(data)
        self._head = found[1] if found is not None else b""
        self._replaced = bool(self._head) and self._head != self._opening.head
        if self._chat and found is not None:
            first, end, rest = data.partition(b"\n\n")
            return rest if end and _is_role(first[6:]) else data
        return data


def _is_role(event: bytes) -> bool:
    try:
        choices = _read_chunk(event).choices
    except (msgspec.MsgspecError, RecursionError):
        return False
    return len(choices) == 1 and choices[0].delta.role is not None and not choices[0].delta.content


def _count(data: bytes) -> bytes:
    """The usage as of the client's request: the first token was generated, not part of the prompt."""
    found = _USAGE.search(data)
    if found is None:
        return data
    at = found.start(1)
    before, usage = data[:at], data[at:]
    usage = _PROMPT.sub(lambda number: b'"prompt_tokens":%d' % (int(number[1]) - 1), usage, count=1)
    usage = _COMPLETION.sub(lambda number: b'"completion_tokens":%d' % (int(number[1]) + 1), usage, count=1)
    return before + usage
