"""The answer to one request, as it is written to the client."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from kvrelay.router.core.answers import JSON, Dialect, dialect_of
from kvrelay.router.core.events import count_ends
from kvrelay.router.http.messages import REASONS, render

if TYPE_CHECKING:
    import asyncio

    from kvrelay.router.core.answers import Refusal
    from kvrelay.router.http.messages import Headers, Request

_JOIN_BYTES = 16 << 10
"""Up to here one copy is cheaper than another buffer in the transport's queue."""


class Source(Protocol):
    """What fills an answer, and can be told to wait."""

    def pause(self) -> None:
        """Give nothing more until `resume`."""
        ...

    def resume(self) -> None:
        """Go on."""
        ...


class Reply:
    """One answer: `start`, any number of `write`, `finish`; or `answer`; or `refuse`.

    After the client is gone all do nothing. What is sent together leaves together, since each call of the kernel costs
    more than all else about a small piece: the head waits for the first piece of the body, or for `flush`.
    """

    __slots__ = (
        "_chunked",
        "_ended",
        "_gone",
        "_head",
        "_head_only",
        "_http_1_0",
        "_source",
        "_transport",
        "_writable",
        "always",
        "close",
        "dialect",
        "events",
        "extra",
        "finished",
        "last",
        "num_bytes",
        "num_events",
        "started",
        "status",
    )

    def __init__(self, transport: asyncio.Transport, request: Request | None, *, close: bool, writable: bool) -> None:
        """``request``: None if it could not be read. ``close``: the connection ends with this answer."""
        self._transport = transport
        self.dialect = Dialect.OPENAI if request is None else dialect_of(request.path)
        self._http_1_0 = request is not None and request.http_1_0
        self._head_only = request is not None and request.method == "HEAD"
        self._writable = writable
        self._source: Source | None = None
        self._chunked = False
        self._gone = False
        self._head = b""
        """What of the answer's beginning has not been sent."""
        self._ended = False
        """Whether the end of the body has been sent."""
        self.close = close or request is None or not request.keep_alive
        self.started = False
        self.finished = False
        self.events = False
        """Whether the body is a stream of events, of which whole ones were written so far."""
        self.always: Headers = []
        """Headers of the answer, whoever gives it, unless it has them."""
        self.extra: Headers = []
        """Headers of the answer, whoever gives it, instead of those of the same names."""
        self.status = 0
        """0 until there is an answer."""
        self.num_bytes = 0
        """Of the body so far."""
        self.num_events = 0
        """Ends of events in it, if it is a stream of events."""
        self.last = (b"", b"", b"")
        """Pieces of the body: the last of them."""

    @property
    def tail(self) -> bytes:
        """The end of the body."""
        return b"".join(self.last)

    @property
    def client(self) -> str:
        """The address the client's connection came from."""
        peer = self._transport.get_extra_info("peername")
        return str(peer[0]) if isinstance(peer, tuple) and peer else ""

    def start(self, status: int, headers: Headers, *, reason: bytes = b"") -> None:
        """Begin with the head. ``headers``: end to end ones; without a `content-length` the body is framed here."""
        if self._gone:
            return
        self.started = True
        self.status = status
        names = {name for name, _ in headers}
        headers += [header for header in self.always if header[0] not in names]
        if self.extra:
            own = {name for name, _ in self.extra} - {b"vary"}
            headers = [header for header in headers if header[0] not in own] + self.extra
        framing = b""
        if status >= 200 and status not in {204, 304} and b"content-length" not in names:
            if self._http_1_0:
                self.close = True
            else:
                self._chunked = True
                framing = b"transfer-encoding: chunked\r\n"
        if self.close:
            framing += b"connection: close\r\n"
        elif self._http_1_0:
            framing += b"connection: keep-alive\r\n"
        line = b"HTTP/1.1 %d %b\r\n" % (status, reason or REASONS.get(status, b""))
        self._head = line + render(headers) + framing + b"\r\n"

    def flush(self) -> None:
        """Send the head, if it has not been sent: the body may be a while."""
        head, self._head = self._head, b""
        if head and not self._gone:
            self._transport.write(head)

    def write(self, data: bytes, *, end: bool = False) -> None:
        """Send a piece of the body, now. ``end``: and the end of it."""
        if self._gone or not data or self._head_only:
            return
        self.num_bytes += len(data)
        self.last = (*self.last[1:], data)
        head, self._head = self._head, b""
        tail = b""
        if self._chunked:
            self.num_events += count_ends(data)
            head = b"%b%x\r\n" % (head, len(data))
            tail = b"\r\n0\r\n\r\n" if end else b"\r\n"
            self._ended = end
        if not head and not tail:
            self._transport.write(data)
        elif len(data) <= _JOIN_BYTES:
            self._transport.write(b"%b%b%b" % (head, data, tail))
        else:
            self._transport.writelines((head, data, tail) if tail else (head, data))

    def finish(self) -> None:
        """The body is whole."""
        self.finished = True
        if self._gone or self._ended:
            return
        tail = b"0\r\n\r\n" if self._chunked and not self._head_only else b""
        head, self._head = self._head, b""
        if head or tail:
            self._transport.write(head + tail)

    def answer(self, status: int, body: bytes, content_type: bytes = JSON, headers: Headers | None = None) -> None:
        """A whole answer."""
        framing = [(b"content-type", content_type), (b"content-length", b"%d" % len(body))]
        self.start(status, framing + (headers or []))
        self.write(body)
        self.finish()

    def refuse(self, refusal: Refusal, headers: Headers | None = None) -> None:
        """Answer with an error; where an answer has begun, break it off."""
        if self.started:
            self.abort()
        else:
            self.answer(refusal.status, refusal.body_for(self.dialect), headers=headers)

    def break_off(self, refusal: Refusal) -> None:
        """End an answer that will not be whole: with the error itself, an event of it, or a closed connection."""
        if self.started and self.events and not self.finished:
            self.write(refusal.event_for(self.dialect))
            self.finish()
        elif not self.finished:
            self.refuse(refusal)

    @property
    def ended(self) -> bool:
        """Whether the end of the body has been sent, whoever has yet to learn of it."""
        return self._ended

    @property
    def gone(self) -> bool:
        """Whether the client is gone."""
        return self._gone

    def abort(self) -> None:
        """Break off: the client sees that the answer is not whole."""
        self.finished = self.close = True
        if not self._gone:
            self._transport.abort()

    def fed_by(self, source: Source | None) -> None:
        """Who writes from now on: paused while the client does not keep up."""
        self._source = source
        if source is not None and not self._writable:
            source.pause()

    def pause(self) -> None:
        """The client does not keep up."""
        self._writable = False
        if self._source is not None:
            self._source.pause()

    def resume(self) -> None:
        """The client has caught up."""
        self._writable = True
        if self._source is not None:
            self._source.resume()

    def lost(self) -> None:
        """The client is gone."""
        self._gone = True
        self._source = None
