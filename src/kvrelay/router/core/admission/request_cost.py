"""What a request asks for, as far as limits depend on it: model, priority, and about how many tokens.

The estimate is what OpenAI's own limits use before an answer is there: a token for every four bytes of prompt (or the
token ids, counted), and as many completion tokens as the request allows.
"""

from __future__ import annotations

import re

import msgspec
from msgspec import Raw, Struct

BYTES_PER_TOKEN = 4
ASSUMED_COMPLETION_TOKENS = 256
"""Where a request sets no bound of its own."""
MAX_TOKENS = 10_000_000
"""More than any engine generates: what is above says nothing."""
MAX_N = 1024
MAX_PRIORITY = 1 << 31


_IDS = re.compile(rb"\s*\[[\s\[]*\d")
"""Token ids, one prompt's or several."""


class _Fields(Struct):
    model: Raw = Raw(b"null")
    priority: Raw = Raw(b"null")
    n: Raw = Raw(b"null")
    max_tokens: Raw = Raw(b"null")
    max_completion_tokens: Raw = Raw(b"null")
    max_output_tokens: Raw = Raw(b"null")
    prompt: Raw = Raw(b"")
    messages: Raw = Raw(b"")
    input: Raw = Raw(b"")


_fields = msgspec.json.Decoder(_Fields).decode
_text = msgspec.json.Decoder(str).decode
_whole = msgspec.json.Decoder(int).decode


class RequestCost(Struct, frozen=True):
    """Of one request."""

    model: str | None = None
    """None where it names none, or where none can be read."""
    priority: int | None = None
    prompt_tokens: int = 1
    completion_tokens: int = 0

    @property
    def tokens(self) -> int:
        """Estimated, prompt and completion."""
        return self.prompt_tokens + self.completion_tokens


def read_asked(body: bytes, *, is_json: bool, generates: bool) -> RequestCost:
    """Read a body; what is malformed counts as not given, since an engine will refuse it.

    ``generates``: whether there is a completion even where the request sets no bound for it.
    """
    by_size = max(1, len(body) // BYTES_PER_TOKEN)
    if not is_json:
        return RequestCost(prompt_tokens=by_size)
    try:
        fields = _fields(body)
    except (msgspec.MsgspecError, RecursionError):
        return RequestCost(prompt_tokens=by_size)
    prompt = sum(map(_tokens_of, (fields.prompt, fields.messages, fields.input))) or by_size
    said = (fields.max_completion_tokens, fields.max_tokens, fields.max_output_tokens)
    limits = [value for value in map(_int, said) if value is not None]
    each = limits[0] if limits else ASSUMED_COMPLETION_TOKENS * generates
    completion = min(MAX_TOKENS, max(0, each)) * min(MAX_N, max(1, _int(fields.n) or 1))
    return RequestCost(_str(fields.model), _int(fields.priority), prompt, completion)


def _tokens_of(value: Raw) -> int:
    data = memoryview(value)
    if _IDS.match(data) is not None:
        return bytes(data).count(b",") + 1
    return len(data) // BYTES_PER_TOKEN


def _int(value: Raw) -> int | None:
    try:
        return _whole(value)
    except msgspec.MsgspecError:
        return None


def _str(value: Raw) -> str | None:
    try:
        return _text(value)
    except msgspec.MsgspecError:
        return None


def read_priority(said: bytes) -> int | None:
    """A priority in a header; None if it is none."""
    try:
        value = int(said)
    except ValueError:
        return None
    return value if -MAX_PRIORITY <= value < MAX_PRIORITY else None
