"""The router's own answers, in the form the clients of an endpoint know."""

from __future__ import annotations

from enum import Enum, auto
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

if TYPE_CHECKING:
    from kvrelay.errors import KvRelayError

JSON = b"application/json"

_TYPES = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
_ANTHROPIC_TYPES = {
    **_TYPES, 413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip


class Dialect(Enum):
    """How an endpoint's clients are told of errors."""

    OPENAI = auto()
    RESPONSES = auto()
    """As OpenAI, but for events, which have types."""
    ANTHROPIC = auto()


def dialect_of(path: str) -> Dialect:
    """The dialect of an endpoint, and of those below it."""
    if path.startswith("/v1/messages"):
        return Dialect.ANTHROPIC
    return Dialect.RESPONSES if path.startswith("/v1/responses") else Dialect.OPENAI


class Refusal(Struct, frozen=True):
    """An answer that is not an engine's. ``code``: for programs, stable; ``message``: for people."""

    status: int
    code: str
    message: str
    kind: str = ""
    """OpenAI's ``type``; the status's if not given."""

    @property
    def body(self) -> bytes:
        """``{"error": {"message", "type", "param", "code"}}``."""
        return self.body_for(Dialect.OPENAI)

    def body_for(self, dialect: Dialect) -> bytes:
        """The body of an answer."""
        if dialect is not Dialect.ANTHROPIC:
            return msgspec.json.encode({"error": self._error})
        usual = "invalid_request_error" if self.status < 500 else "api_error"
        kind = _ANTHROPIC_TYPES.get(self.status, usual)
        error = {"type": kind, "message": self.message, "code": self.code}
        return msgspec.json.encode({"type": "error", "error": error})

    def event_for(self, dialect: Dialect) -> bytes:
        """The same as a server-sent event, for a stream that has begun."""
        if dialect is Dialect.OPENAI:
            return b"data: %b\n\n" % self.body
        body = self.body_for(dialect)
        if dialect is Dialect.RESPONSES:  # the event's own fields, and the member that makes official clients raise
            said = {"type": "error", "code": self.code, "message": self.message, "param": None, "error": self._error}
            body = msgspec.json.encode(said)
        return b"event: error\ndata: %b\n\n" % body

    @property
    def _error(self) -> dict[str, str | None]:
        kind = self.kind or _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"message": self.message, "type": kind, "param": None, "code": self.code}


def refusal(error: KvRelayError) -> Refusal:
    """What an error of ours becomes."""
    return Refusal(error.http_status, error.code, str(error))
