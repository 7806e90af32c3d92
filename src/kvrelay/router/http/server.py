"""The server side of the router: HTTP/1.1 connections from clients.

One request of a connection is answered at a time. What a client pipelines behind it is parsed and waits, bounded in
number and bytes, so that the connection is always being read and a client that goes away is noticed at once: its task
is cancelled, and with it everything done for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import TYPE_CHECKING, cast

import httptools
from msgspec import Struct

from kvrelay.router.core.answers import Refusal
from kvrelay.router.core.framing import is_mostly_wrapping, request_problem
from kvrelay.router.http.deadline import Deadline
from kvrelay.router.http.messages import Headers, Request, first_by_name, render
from kvrelay.router.http.reply import Reply
from kvrelay.router.http.watch import GONE_S, LOOK_S, Watch, keep_alive, sent_by

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from kvrelay.router.http.registry import Registry

logger = logging.getLogger(__name__)

WRITE_HIGH_BYTES = 256 << 10
"""Bytes waiting for a slow client before its source is paused."""
UNSCREENED_BYTES = 64 << 10
"""Smaller bodies are received whatever is to be said to their request."""
MAX_PIECES = 64
"""Of a body, held one by one."""


class Limits(Struct, frozen=True):
    """Bounds on what a client may send and how long it may take. Times in seconds."""

    max_body_bytes: int = 64 << 20
    max_head_bytes: int = 64 << 10
    max_headers: int = 128
    max_pipelined: int = 16
    idle_s: float = 75.0
    """Between requests."""
    receive_s: float = 30.0
    """For a head once begun, and between pieces of a body."""
    gone_s: float = GONE_S
    """For a client that does not answer at all to what is sent to it."""
    stall_s: float = 120.0
    """For a client that is there and takes nothing of its answer."""
    linger_s: float = 2.0
    """For a refused client to stop sending and read why."""


class Connection(asyncio.Protocol):
    """One client's connection."""

    def __init__(
        self,
        handler: Callable[[Request, Reply], Awaitable[None]],
        limits: Limits,
        registry: Registry,
        loop: asyncio.AbstractEventLoop,
        refuse: Callable[[Refusal, Reply], None] = lambda refusal, reply: reply.refuse(refusal),
        screen: Callable[[Headers], Refusal | None] | None = None,
    ) -> None:
        """``handler`` answers a request; ``registry`` holds the open connections; ``refuse`` answers what is none.

        ``screen``: looks at the headers of what has a large body yet to come, and may say why it need not.
        """
        self._screen = screen
        self._refuse_unread = refuse
        self._handler = handler
        self._limits = limits
        self._registry = registry
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._deadline = Deadline(loop, self._expire)
        self._waiting: deque[Request | Refusal] = deque()
        self._waiting_bytes = 0
        self._active: Reply | None = None
        self._task: asyncio.Task[None] | None = None
        self._target = b""
        self._headers: Headers = []
        self._by_name: dict[bytes, bytes] = {}
        self._http_1_0 = False
        self._body: list[bytes | bytearray] = []
        self._body_bytes = 0
        self._head_bytes = 0
        self._wire_bytes = self._num_chunks = self._num_begun = 0
        self._in_head = self._in_body = False
        self._small = False
        """Whether a head that ends now cannot be too large, by what it came in."""
        self._deaf = False
        """Nothing more is understood on this connection: what comes is thrown away."""
        self._writable = True
        self._watch = Watch(loop.time())
        self._look_s = min(LOOK_S, limits.gone_s / 2, limits.stall_s / 2)
        self.draining = False

    # --- asyncio.Protocol ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client is there."""
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=WRITE_HIGH_BYTES)
        keep_alive(self._transport)
        self._registry.add(self)
        self._deadline.set(self._limits.idle_s)

    def data_received(self, data: bytes) -> None:
        """The client sent something."""
        if self._deaf:
            return
        in_head, in_body, number = self._in_head, self._in_body, self._num_begun
        self._small = not in_head and len(data) <= self._limits.max_head_bytes
        self._parse(data)
        if in_body and self._in_body and number == self._num_begun:
            self._wire_bytes += len(data)
            if is_mostly_wrapping(self._wire_bytes, self._body_bytes, self._num_chunks):
                self._refuse(Refusal(400, "malformed_request", "The body's chunks are mostly wrapping"))
        if self._in_head and in_head:
            self._head_bytes += len(data)
            if self._head_bytes > self._limits.max_head_bytes:
                self._refuse_head()
        if self._active is None and not self._waiting and not (self._in_head and in_head):
            receiving = self._in_head or self._in_body
            self._deadline.set(self._limits.receive_s if receiving else self._limits.idle_s)
        self._advance()

    def eof_received(self) -> bool:
        """The client will send nothing more. Half-open clients are taken for gone, as servers commonly do."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """The client is gone: nothing is done for it any longer."""
        self._deadline.close()
        self._deaf = True
        self._waiting.clear()
        if self._active is not None:
            self._active.lost()
        if self._task is None:
            self._registry.discard(self)
        elif self._active is None or not self._active.ended:  # else it has had all of its answer
            self._task.cancel()

    def pause_writing(self) -> None:
        """The client is slower than its answer."""
        self._writable = False
        if self._active is not None:
            self._active.pause()

    def resume_writing(self) -> None:
        """The client has caught up."""
        self._writable = True
        if self._active is not None:
            self._active.resume()

    # --- httptools ---

    def on_message_begin(self) -> None:
        """A request begins."""
        self._target = b""
        self._headers, self._body = [], []
        self._body_bytes = self._head_bytes = self._wire_bytes = self._num_chunks = 0
        self._num_begun += 1
        self._in_head, self._in_body = True, False

    def on_url(self, url: bytes) -> None:
        """A piece of the request's target."""
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header; trailers are dropped."""
        if self._in_head:
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """The head is whole."""
        self._in_head, self._in_body = False, True
        if self._parser.should_upgrade():
            return  # read once more, without the offer
        limits, headers = self._limits, self._headers
        large = not self._small and sum(len(k) + len(v) for k, v in headers) > limits.max_head_bytes
        if large or len(headers) > limits.max_headers:
            self._refuse_head()
            return
        version = self._parser.get_http_version()
        if version not in {"1.1", "1.0"}:
            self._refuse(Refusal(505, "http_version", "This server speaks HTTP/1.1"))
            return
        self._http_1_0 = version == "1.0"
        self._by_name = by_name = first_by_name(headers)
        if problem := request_problem(version, self._target, headers, by_name):
            self._refuse(Refusal(400, "malformed_request", f"This request cannot be served: {problem}"))
            return
        length = by_name.get(b"content-length")
        if length is not None and int(length) > limits.max_body_bytes:
            self._refuse_body()
            return
        expect = by_name.get(b"expect")
        much = int(length) > UNSCREENED_BYTES if length is not None else b"transfer-encoding" in by_name
        if (much or expect is not None) and self._screen is not None and (refused := self._screen(headers)) is not None:
            self._refuse(refused)
            return
        if expect is not None:
            self._expect(expect)

    def on_body(self, data: bytes) -> None:
        """A piece of the body."""
        if self._deaf:
            return
        self._body_bytes += len(data)
        if self._body_bytes > self._limits.max_body_bytes:
            self._refuse_body()
            return
        self._body.append(data)
        if len(self._body) > MAX_PIECES:  # a list of little ones would take many times their bytes
            first = self._body[0]
            whole = first if isinstance(first, bytearray) else bytearray(first)
            whole += b"".join(self._body[1:])
            self._body = [whole]

    def on_chunk_header(self) -> None:
        """One more chunk."""
        self._num_chunks += 1

    def on_message_complete(self) -> None:
        """The request is whole."""
        self._in_body = False
        if self._deaf or self._parser.should_upgrade():
            return
        try:
            method = self._parser.get_method().decode("ascii")
            target = _origin_form(self._target)
        except (UnicodeDecodeError, httptools.HttpParserError):
            self._refuse(Refusal(400, "malformed_request", "The request's target is not a URL"))
            return
        first = self._body[0] if len(self._body) == 1 else None
        body = first if isinstance(first, bytes) else b"".join(self._body)
        request = Request(
            method=method,
            target=target,
            headers=self._headers,
            body=body,
            http_1_0=self._http_1_0,
            keep_alive=self._parser.should_keep_alive(),
            by_name=self._by_name,
        )
        self._body = []
        self._waiting.append(request)
        self._waiting_bytes += len(body)
        many = len(self._waiting) > self._limits.max_pipelined
        if many or (len(self._waiting) > 1 and self._waiting_bytes > self._limits.max_body_bytes):
            self._refuse(
                Refusal(429, "too_many_pipelined", "Too much was sent on one connection before it was answered")
            )

    def _parse(self, data: bytes) -> None:
        try:
            while data:
                try:
                    self._parser.feed_data(data)
                    data = b""
                except httptools.HttpParserUpgrade as upgrade:
                    data = self._without_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            self._refuse(Refusal(400, "malformed_request", f"This is not a valid HTTP/1.1 request: {error}"))

    def _without_upgrade(self, rest: bytes) -> bytes:
        """What to read on with as if no other protocol had been offered: the parser stopped behind the head.

        Java's HTTP client, for one, offers HTTP/2 with its first request.
        """
        method, version = self._parser.get_method(), self._parser.get_http_version().encode()
        if method == b"CONNECT":
            self._refuse(Refusal(405, "method", "This is not a proxy"))
            return b""
        line = b"%b %b HTTP/%b\r\n" % (method, self._target, version)
        headers = render([header for header in self._headers if header[0] != b"upgrade"])
        self._parser = httptools.HttpRequestParser(self)
        return line + headers + b"\r\n" + rest

    # --- answering ---

    def drain(self) -> None:
        """Take no request that has not begun; close as soon as nothing is being answered."""
        self.draining = True
        if not self.busy and self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close at once."""
        if self._transport is not None:
            self._transport.abort()

    @property
    def busy(self) -> bool:
        """Whether a request is being answered, waits for it, or is being received."""
        return self._active is not None or bool(self._waiting) or self._in_head or self._in_body

    def _advance(self) -> None:
        if self._active is not None or not self._waiting or self._transport is None or self._transport.is_closing():
            return
        item = self._waiting.popleft()
        if isinstance(item, Refusal):
            self._say_refusal(item)
            return
        self._waiting_bytes -= len(item.body)
        self._deadline.set(self._look_s)
        last = self._deaf and not self._waiting
        self._active = reply = Reply(self._transport, item, close=last or self.draining, writable=self._writable)
        self._task = self._loop.create_task(self._answer(item, reply))
        self._task.add_done_callback(self._answered)

    async def _answer(self, request: Request, reply: Reply) -> None:
        try:
            await self._handler(request, reply)
        except Exception:
            logger.exception("%s %s failed in the router", request.method, request.path)
            reply.refuse(Refusal(500, "internal", "The router failed; its log says how"))
        finally:
            if not reply.finished:
                reply.abort()

    def _answered(self, task: asyncio.Task[None]) -> None:
        reply, self._active, self._task = self._active, None, None
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a request's task ended with an error", exc_info=error)
        if self._transport is None or reply is None:
            return
        if self._transport.is_closing():
            self._registry.discard(self)
            return
        if reply.close or ((self._deaf or self.draining) and not self._waiting):
            self._transport.close()  # what is written still goes out
            self._deadline.set(self._look_s)
        elif self._waiting:
            self._advance()
        else:
            self._deadline.set(self._limits.receive_s if self._in_head or self._in_body else self._limits.idle_s)

    def _expect(self, expectation: bytes) -> None:
        if expectation.lower() != b"100-continue":
            self._refuse(Refusal(417, "expectation", "The only expectation that can be met is 100-continue"))
        elif self._active is None and not self._waiting and self._transport is not None:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        # else: an answer is under way that an interim response would break; the client goes on by itself after a while

    def _refuse_head(self) -> None:
        self._refuse(Refusal(431, "head_too_large", f"The head is larger than {self._limits.max_head_bytes} bytes"))

    def _refuse_body(self) -> None:
        limit = self._limits.max_body_bytes
        self._refuse(Refusal(413, "body_too_large", f"The body is larger than the {limit} bytes taken here"))

    def _refuse(self, refusal: Refusal) -> None:
        """Answer with ``refusal`` once everything before it is answered; understand nothing after it."""
        if not self._deaf:
            self._deaf = True
            self._in_head = self._in_body = False
            self._body = []
            self._waiting.append(refusal)

    def _say_refusal(self, refusal: Refusal) -> None:
        transport = cast("asyncio.Transport", self._transport)
        self._refuse_unread(refusal, Reply(transport, None, close=True, writable=self._writable))
        self._linger()

    def _linger(self) -> None:
        """Let the client read the answer before the connection goes: closing on unread input would reset it."""
        transport = cast("asyncio.Transport", self._transport)
        self._deaf = True
        if transport.can_write_eof():
            transport.write_eof()
        self._deadline.set(self._limits.linger_s)

    def _expire(self) -> None:
        transport, limits, watch = self._transport, self._limits, self._watch
        if transport is None:
            return
        if (sent := sent_by(transport.get_extra_info("socket"))) is not None:
            watch.look(sent, self._loop.time())
        answering = self._active is not None or transport.is_closing()
        if watch.silent_s >= limits.gone_s or watch.stuck_s >= limits.stall_s:
            transport.abort()
        elif answering:
            self._deadline.set(self._look_s)
        elif self._deaf:
            transport.abort()
        elif self._in_head or self._in_body:
            self._refuse(Refusal(408, "request_timeout", f"The request did not come within {limits.receive_s:g} s"))
            self._advance()
        elif watch.pending:  # it is still reading its last answer
            self._deadline.set(self._look_s)
        else:
            transport.abort()


def _origin_form(target: bytes) -> bytes:
    if target.startswith(b"/"):
        return target
    if not target.startswith((b"http://", b"https://")):
        return target  # such as the * of OPTIONS: no path that is served
    url = httptools.parse_url(target)
    query = b"?" + url.query if url.query is not None else b""
    return (url.path or b"/") + query
