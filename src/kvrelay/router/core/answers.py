"""The router's own answers, in the form OpenAI clients know."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

if TYPE_CHECKING:
    from kvrelay.errors import KvRelayError

JSON = b"application/json"

_TYPES = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error"}


class Refusal(Struct, frozen=True):
    """An answer that is not an engine's. ``code``: for programs, stable; ``message``: for people."""

    status: int
    code: str
    message: str

    @property
    def body(self) -> bytes:
        """``{"error": {"message", "type", "param", "code"}}``."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        error = {"message": self.message, "type": kind, "param": None, "code": self.code}
        return msgspec.json.encode({"error": error})

    @property
    def event(self) -> bytes:
        """The same as a server-sent event, for a stream that has begun."""
        return b"data: %b\n\n" % self.body


def refusal(error: KvRelayError) -> Refusal:
    """What an error of ours becomes."""
    return Refusal(error.http_status, error.code, str(error))
