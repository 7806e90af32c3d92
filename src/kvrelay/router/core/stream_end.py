"""Whether an engine's 200 is an answer at all.

An engine that fails half way can look well to HTTP: an empty body, an error in JSON under status 200, a stream whose
last chunk comes before ``[DONE]``. A client must not take these for an answer, so each has a name here.
"""

from __future__ import annotations

import re

import msgspec
from msgspec import Struct

DONE = b"data: [DONE]"
_TAIL_BYTES = 64
_ERROR = re.compile(rb'\s*\{\s*(?:"object"\s*:\s*"error"|"error"\s*:\s*[{"])')
_RESPONSES = (
    b"event: response.completed", b"event: response.incomplete", b"event: response.failed", b"event: error",
)  # fmt: skip
_LAST: dict[str, tuple[bytes, ...]] = {
    "/v1/completions": (),
    "/v1/chat/completions": (),
    "/cohere/v2/chat": (),
    "/v1/audio/transcriptions": (),
    "/v1/audio/translations": (),
    "/v1/responses": _RESPONSES,
    "/v1/messages": (b"event: message_stop", b"event: error"),
}
"""Endpoints that stream, and what the last event is called; ``()``: it is `DONE`."""


class _Said(Struct):
    code: int | str | None = None
    status: int | str | None = None
    message: str = ""


class _Body(Struct):
    error: _Said | str | None = None
    code: int | str | None = None
    message: str = ""


def says_error(body: bytes) -> bool:
    """Whether a JSON answer begins as errors do: ``{"error": ...`` or ``{"object": "error"``."""
    return _ERROR.match(body) is not None


def error_status(body: bytes) -> int:
    """The status an error in a 200 should have had: what it says itself, else 502."""
    try:
        said = msgspec.json.decode(body, type=_Body, strict=False)
    except (msgspec.MsgspecError, RecursionError):
        return 502
    inner = said.error if isinstance(said.error, _Said) else _Said(code=said.code)
    for value in (inner.code, inner.status):
        if str(value).isdecimal() and 400 <= int(str(value)) <= 599:
            return int(str(value))
    return 502


class StreamEnd:
    """Watches a stream of events for its end. `feed` is called for every piece of it, and costs next to nothing."""

    __slots__ = ("_marks", "_seen", "_tail")

    def __init__(self, marks: tuple[bytes, ...]) -> None:
        """``marks``: the last event's first line, one of these; none: the last event is `DONE`."""
        self._marks = marks
        self._tail = b""
        self._seen = False

    @classmethod
    def of(cls, path: str) -> StreamEnd | None:
        """For an endpoint's stream; None where nobody says how it ends."""
        marks = _LAST.get(path)
        return None if marks is None else cls(marks)

    def feed(self, data: bytes) -> None:
        """A piece that is passed on. The first line of an event is whole in one piece."""
        if not self._marks:
            self._tail = data if len(data) >= _TAIL_BYTES else self._tail[-_TAIL_BYTES:] + data
        elif not self._seen:  # at the beginning of a line: the text of an answer may be about events
            self._seen = data.startswith(self._marks) or any(b"\n" + mark in data for mark in self._marks)

    @property
    def whole(self) -> bool:
        """Whether what was passed on so far is a stream to its end."""
        if self._marks:
            return self._seen
        last = self._tail.rstrip().rpartition(b"\n")[2]
        return last in {DONE, b"data:[DONE]"}
