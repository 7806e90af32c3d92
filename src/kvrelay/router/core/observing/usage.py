"""How many tokens an answer says it cost, found in its last bytes without decoding it."""

from __future__ import annotations

import re

from msgspec import Struct

_FIELDS = re.compile(rb'"(prompt|input|completion|output)_tokens"\s*:\s*(\d{1,12})')
_USAGE = b'"usage":'
"""Inside a text the quotes would be escaped, so this is none of the model's words."""
_DONE = b"data: [DONE]"
_NO_CHOICES = re.compile(rb'"choices"\s*:\s*\[\s*\]')


class Usage(Struct, frozen=True):
    """Of one request, over all its prompts and continuations."""

    prompt_tokens: int
    completion_tokens: int


def read_usage(tail: bytes) -> Usage | None:
    """From the last bytes of an answer; None where they do not say.

    ``completion_tokens`` is 0 for answers that have none, such as embeddings.
    """
    place = tail.rfind(_USAGE)
    if place < 0:
        return None
    counts: dict[bytes, int] = {}
    for kind, count in _FIELDS.findall(tail, place):
        counts.setdefault(kind, int(count))
    prompt = counts.get(b"prompt", counts.get(b"input"))
    if prompt is None:
        return None
    return Usage(prompt, counts.get(b"completion", counts.get(b"output", 0)))


def count_silent(tail: bytes, *, chat: bool) -> int:
    """Of a stream's events, how many carry no token: its end, its usage, comments, and the role a chat begins with."""
    silent = int(chat)
    end = len(tail.rstrip())
    while end > 0:
        begin = tail.rfind(b"\n\n", 0, end)
        event = tail[begin + 2 : end] if begin >= 0 else tail[:end]
        if not event.startswith(b":") and event != _DONE and _NO_CHOICES.search(event) is None:
            break
        silent += 1
        end = begin
    return silent
