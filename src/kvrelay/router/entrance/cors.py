"""Requests of browsers from other origins (the Fetch standard's CORS protocol)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvrelay.router.core.answers import Refusal

if TYPE_CHECKING:
    from kvrelay.router.http.messages import Headers, Request
    from kvrelay.router.http.reply import Reply

MAX_AGE_S = 600
_ANY = b"*"
_EXPOSED = (
    b"retry-after, x-request-id, x-kvrelay-handover, x-kvrelay-prefill, x-kvrelay-decode, x-kvrelay-proof, "
    b"x-ratelimit-limit-requests, x-ratelimit-remaining-requests, x-ratelimit-reset-requests, "
    b"x-ratelimit-limit-tokens, x-ratelimit-remaining-tokens, x-ratelimit-reset-tokens"
)
_DEFAULT_HEADERS = b"authorization, content-type"


class Cors:
    """Says which pages of which origins may read answers. Credentials of the browser's own are never allowed."""

    def __init__(self, origins: frozenset[bytes]) -> None:
        """``origins``: in lower case, or ``*`` alone."""
        self._origins = origins

    def preflight(self, request: Request, reply: Reply) -> str:
        """Answer a question about a request to come. The outcome; empty if it was none."""
        origin, method = request.header(b"origin"), request.header(b"access-control-request-method")
        if request.method != "OPTIONS" or origin is None or method is None:
            return ""
        if not self._allows(origin):
            reply.refuse(Refusal(403, "cors_origin", "Pages of this origin may not use this server"))
            return "client_error"
        headers = request.header(b"access-control-request-headers") or _DEFAULT_HEADERS
        said = [
            (b"access-control-allow-methods", b"GET, POST, OPTIONS"),
            (b"access-control-allow-headers", headers),
            (b"access-control-max-age", b"%d" % MAX_AGE_S),
            (b"vary", b"access-control-request-headers"),
        ]
        reply.start(204, said)
        reply.finish()
        return "ok"

    def headers(self, request: Request) -> Headers:
        """What the answer to ``request`` says."""
        origin = request.header(b"origin")
        if _ANY in self._origins:
            return [(b"access-control-allow-origin", _ANY), (b"access-control-expose-headers", _EXPOSED)]
        if origin is None or not self._allows(origin):
            return [(b"vary", b"origin")]
        return [
            (b"access-control-allow-origin", origin),
            (b"access-control-expose-headers", _EXPOSED),
            (b"vary", b"origin"),
        ]

    def _allows(self, origin: bytes) -> bool:
        return _ANY in self._origins or origin.lower() in self._origins
