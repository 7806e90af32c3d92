"""A client's request as engines get it: its line and headers, made once for all its legs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvrelay.router.core import request_options
from kvrelay.router.core.observing.observation import Leg
from kvrelay.router.core.observing.traceparent import TRACEPARENT
from kvrelay.router.http.messages import end_to_end, render

if TYPE_CHECKING:
    from kvrelay.router.core.fleet import Engine
    from kvrelay.router.core.observing.forwarding import HeaderRules
    from kvrelay.router.http.messages import Request

_REPLACED = (
    frozenset({b"host", b"content-length", b"expect", b"accept-encoding", b"x-request-id"}) | request_options.HEADERS
)
_REPLACED_WHEN_TRACED = _REPLACED | {TRACEPARENT}
_JOIN_BYTES = 32 << 10
"""Up to here one copy is cheaper than a second buffer for the kernel to gather."""


class Outgoing:
    """A client's request on its way to engines: the same line and headers for each, but for the host and the body."""

    __slots__ = ("_head", "_method", "_seen", "_target")

    def __init__(self, request: Request, *, request_id: bytes = b"", rules: HeaderRules | None = None) -> None:
        """``request_id``: what engines call the request, where that is not what everybody does.

        ``rules``: which of the client's headers reach engines; None for all that are about the request.
        """
        self._seen = seen = request.seen
        headers = end_to_end(request.headers, _REPLACED if seen.trace is None else _REPLACED_WHEN_TRACED)
        if rules is not None:
            headers = [header for header in headers if rules.passes(header[0])]
        headers.append((b"x-request-id", request_id or seen.request_id))
        self._method = request.method.encode()
        self._target = request.path.encode("latin-1") + request.query
        self._head = render(headers)

    def to(self, engine: Engine, body: bytes) -> Leg:
        """The request as ``engine`` gets it, for `Engines.ask`."""
        address, head, span, trace = engine.address, self._head, 0, self._seen.trace
        if trace is not None:
            span = self._seen.new_span()
            head += b"traceparent: %b\r\n" % trace.traceparent(span)
        start = b"%b %b%b HTTP/1.1\r\nhost: %b\r\n%bcontent-length: %d\r\n\r\n" % (
            self._method, engine.base, self._target, engine.host, head, len(body),
        )  # fmt: skip
        message = (start + body,) if len(body) <= _JOIN_BYTES else (start, body)
        leg = Leg(engine.name, engine.role, message, (address.host, address.port), span)
        self._seen.legs.append(leg)
        return leg
