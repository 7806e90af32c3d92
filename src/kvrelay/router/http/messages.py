"""Messages and their heads. Header names are lower-case bytes throughout."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING

from kvrelay.native import native
from kvrelay.router.core.observing.observation import Observation

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

Header = tuple[bytes, bytes]
Headers = list[Header]

HOP_BY_HOP = frozenset({
    b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te", b"trailer",
    b"transfer-encoding", b"upgrade", b"http2-settings",
})  # fmt: skip
"""Headers about one connection, which end at it (RFC 9110, section 7.6.1)."""

REASONS: dict[int, bytes] = {status.value: status.phrase.encode() for status in HTTPStatus}


class Request:
    """A whole request from a client."""

    __slots__ = ("_by_name", "body", "headers", "http_1_0", "keep_alive", "method", "path", "query", "seen")

    def __init__(
        self,
        *,
        method: str,
        target: bytes,
        headers: Headers,
        body: bytes,
        http_1_0: bool,
        keep_alive: bool,
        by_name: dict[bytes, bytes] | None = None,
    ) -> None:
        """``target``: as in the request line, without scheme and authority. ``by_name``: each name's first header."""
        path, question_mark, query = target.partition(b"?")
        self.method = method
        self.path = path.decode("latin-1")
        self.query = question_mark + query
        self.headers = headers
        self.body = body
        self.http_1_0 = http_1_0
        self.keep_alive = keep_alive
        self.seen = Observation()
        self._by_name = first_by_name(headers) if by_name is None else by_name

    def header(self, name: bytes) -> bytes | None:
        """The first header of that name."""
        return self._by_name.get(name)

    @property
    def is_json(self) -> bool:
        """Whether an engine may read the body as JSON; where nothing says what it is, some do."""
        media_type = (self.header(b"content-type") or b"").split(b";", 1)[0].strip().lower()
        return media_type in {b"", b"application/json"} or media_type.endswith(b"+json")


def first_by_name(headers: Headers) -> dict[bytes, bytes]:
    """The first header of each name."""
    return dict(reversed(headers))


def _find(headers: Headers, name: bytes) -> bytes | None:
    for key, value in headers:
        if key == name:
            return value
    return None


def _without(headers: Headers, some: Collection[bytes], others: Collection[bytes]) -> Headers:
    return [header for header in headers if header[0] not in some and header[0] not in others]


def _render(headers: Headers) -> bytes:
    return b"".join([b"%b: %b\r\n" % header for header in headers])


find: Callable[[Headers, bytes], bytes | None] = getattr(native, "find_header", _find)
"""The first header of a name; None if there is none."""
without: Callable[[Headers, Collection[bytes], Collection[bytes]], Headers] = getattr(
    native, "headers_without", _without
)
"""Those whose names are in neither of two collections."""
render: Callable[[Headers], bytes] = getattr(native, "render_headers", _render)
"""As header lines, each with its line end."""


def end_to_end(headers: Headers, drop: Collection[bytes] = ()) -> Headers:
    """The headers to pass on: none that is about this connection, by its nature or because `Connection` names it."""
    named = find(headers, b"connection")
    if named is None or named.lower() in {b"keep-alive", b"close"}:
        return without(headers, HOP_BY_HOP, drop)
    options = {option.strip().lower() for key, value in headers if key == b"connection" for option in value.split(b",")}
    return without(without(headers, HOP_BY_HOP, drop), options, ())
