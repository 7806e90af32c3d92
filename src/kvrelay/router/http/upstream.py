"""The client side of the router: one request at a time on a kept-alive connection to an engine.

`EngineClient.open` sends a request and returns its `Call` once the head of the answer is there.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any, cast

import httptools

from kvrelay.errors import ConfigError
from kvrelay.router.core.framing import response_problem
from kvrelay.router.engine_tls import why_not
from kvrelay.router.errors import EngineError, EngineLostError, EngineUnreachableError
from kvrelay.router.http.call import Call
from kvrelay.router.http.deadline import Deadline
from kvrelay.router.http.watch import GONE_S, LOOK_S, Watch, keep_alive, sent_by

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvrelay.router.core.fleet import Address
    from kvrelay.router.engine_tls import EngineTls
    from kvrelay.router.http.messages import Headers

MAX_IDLE = 256
"""Idle connections kept to one engine."""
MAX_HEAD_BYTES = 128 << 10
STALE_S = 1.0
"""A kept connection that ends within this time of a request, without an answer, was being closed as the request left:
the engine has not seen it. One that ends later may have died over it."""


class _StaleError(EngineLostError):
    """A kept connection had been closed by the engine when the request was sent."""


class _Connection(asyncio.Protocol):
    """A connection to an engine: idle, or with one call. Parses answers."""

    def __init__(self, client: EngineClient, loop: asyncio.AbstractEventLoop) -> None:
        self._client = client
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._chunks: list[bytes] = []
        self.on_body = self._chunks.append
        """For the parser, which calls it for each chunk of an answer: without a frame of Python between."""
        self._num_chunks = 0
        """Of a whole answer."""
        self._parser = httptools.HttpResponseParser(self)
        self._call: Call | None = None
        self._answered = False
        """Whether anything has come for the current call."""
        self._status = 0
        self._reason = b""
        self._headers: Headers = []
        self._head_bytes = 0
        self._in_body = False
        self._framed = False
        """Whether the answer says itself where it ends; else the end of the connection does."""
        self._problem = ""
        self._complete = False
        self._keep_alive = False
        self._begun_at = 0.0
        self.deadline = Deadline(loop, self._expire)
        """Of the current call."""
        self._watch = Watch(loop.time())
        self._next_look = Deadline(loop, self._look)
        self._reused = False

    @property
    def usable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def begin(self, payload: Sequence[bytes]) -> Call:
        assert self._transport is not None
        self._begun_at = self._loop.time()
        self._call = call = Call(self, self._loop)
        self._answered = self._complete = False
        self._next_look.set(LOOK_S)
        if len(payload) == 1:
            self._transport.write(payload[0])
        else:
            self._transport.writelines(payload)
        return call

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def pause_reading(self) -> None:
        if self.usable:
            cast("asyncio.Transport", self._transport).pause_reading()

    def resume_reading(self) -> None:
        if self.usable:
            cast("asyncio.Transport", self._transport).resume_reading()

    # --- asyncio.Protocol ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        keep_alive(transport)
        self._client.opened(self)

    def data_received(self, data: bytes) -> None:
        if self._call is None:
            self.abort()  # an idle engine has nothing to say
            return
        self._answered = True
        if not self._in_body:
            self._head_bytes += len(data)
        problem = ""
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            problem = f"the engine's answer is not HTTP: {error}"
        problem = self._problem or problem
        if not self._in_body and self._head_bytes > MAX_HEAD_BYTES:
            problem = f"the engine's answer has a head of more than {MAX_HEAD_BYTES} bytes"
        if self._complete and self._call is not None:
            self._call.whole = True
            del self._chunks[self._num_chunks :]  # of a second answer, which nobody asked for
        self._flush()
        if self._complete:
            self._finish(reusable=self._keep_alive and not problem and self._all_sent)
        elif problem:
            self._lost(EngineLostError(problem))

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._client.forget(self)
        self.deadline.close()
        self._next_look.close()
        if self._call is None:
            return
        if self._in_body and not self._framed and exc is None and self._client.cuts_show:
            self._complete = True
            self._finish(reusable=False)
            return
        cause = f": {exc}" if exc is not None else ""
        stale = self._reused and not self._answered and self._loop.time() - self._begun_at < STALE_S
        kind = _StaleError if stale else EngineLostError
        self._lost(kind(f"the engine closed the connection before its answer was whole{cause}"))

    # --- httptools ---

    def on_message_begin(self) -> None:
        if self._complete:
            self._client.spoil(self)  # more than was asked for: the rest cannot be trusted
        self._status, self._reason, self._headers = 0, b"", []
        self._in_body = self._framed = False

    def on_status(self, reason: bytes) -> None:
        self._reason += reason

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_body:
            return  # a trailer
        name = name.lower()
        if name in {b"content-length", b"transfer-encoding"}:
            self._framed = True
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        self._status = status = self._parser.get_status_code()
        version = self._parser.get_http_version()
        if problem := response_problem(version, status, self._reason, self._headers):
            self._problem = f"the engine's answer cannot be believed: {problem}"
        if self._problem or status < 200 or self._complete:
            return
        if status == 204:  # it has no body, and must not name the length of one
            self._headers = [header for header in self._headers if header[0] != b"content-length"]
        self._in_body = True
        self._framed = self._framed or self._status in {204, 304}
        self._head_bytes = 0
        if self._call is not None:
            self._call.on_head(self._status, self._reason, self._headers)

    def on_message_complete(self) -> None:
        if self._in_body:
            self._complete = True
            self._in_body = False
            self._num_chunks = len(self._chunks)
            self._keep_alive = self._parser.should_keep_alive()

    # --- the current call ---

    @property
    def _all_sent(self) -> bool:
        """An engine may answer before it has read the request, and never read the rest."""
        return cast("asyncio.Transport", self._transport).get_write_buffer_size() == 0

    def _flush(self) -> None:
        chunks = self._chunks
        if chunks and self._call is not None:
            data = chunks[0] if len(chunks) == 1 else b"".join(chunks)
            chunks.clear()
            self._call.on_data(data)

    def _expire(self) -> None:
        if self._call is not None:
            self._call.expire()

    def _look(self) -> None:
        """Whether the engine's machine is still there, while it has not acknowledged all of the request."""
        if self._call is None or self._transport is None:
            return
        if (sent := sent_by(self._transport.get_extra_info("socket"))) is not None:
            self._watch.look(sent, self._loop.time())
        if self._watch.silent_s >= GONE_S:
            self._lost(EngineLostError(f"the engine's machine has not answered for {GONE_S:g} s"))
        elif self._watch.pending:
            self._next_look.set(LOOK_S)

    def _finish(self, *, reusable: bool) -> None:
        call, self._call = self._call, None
        self._in_body = False
        if call is None:
            return
        if reusable:
            self._reused = True
            self._client.give_back(self)
        else:
            self.abort()
        call.on_end()

    def _lost(self, error: EngineError) -> None:
        call, self._call = self._call, None
        self.abort()
        if call is not None:
            call.fail(error)


class EngineClient:
    """The connections to one engine."""

    def __init__(self, address: Address, *, connect_timeout_s: float, tls: EngineTls) -> None:
        """Connects when first needed. ``connect_timeout_s``: for each new connection, with its TLS handshake."""
        self._address = address
        self._tls = tls
        self.cuts_show = not address.tls
        """Whether an answer that is cut short shows as that, where only the connection's end tells the answer's."""
        self._connect_timeout_s = connect_timeout_s
        self._idle: deque[_Connection] = deque()
        self._open: set[_Connection] = set()
        self._closed = False

    async def open(
        self, payload: Sequence[bytes], *, timeout_s: float, on_sent: Callable[[], None] = lambda: None
    ) -> Call:
        """Send a request, in pieces; its call, once the head of the answer is there. ``on_sent``: called in between.

        A kept-alive connection may have been closed by the engine at the very moment it was taken up again. If such a
        connection ends at once, without an answer, the request is sent once more on a new one.

        Raises:
            EngineUnreachableError: no connection, or the engine has been removed.
            EngineLostError: it was lost before the head was whole.
            EngineSilentError: no head after ``timeout_s``.
        """
        connection = self._take()
        while True:
            if connection is None:
                connection = await self._connect()
                if not connection.usable:
                    raise EngineLostError("the engine closed the connection at once")
            call = connection.begin(payload)
            on_sent()
            try:
                await call.head(timeout_s)
            except _StaleError:  # never of a new connection
                call.close()
                connection = None
            except BaseException:
                call.close()
                raise
            else:
                return call

    def close(self) -> None:
        """Close idle connections, and those in use as soon as they are given back."""
        self._closed = True
        while self._idle:
            self._idle.pop().abort()

    def cut_off(self) -> None:
        """Close all connections, those in use too: whoever waits for an answer is told that it is lost."""
        self.close()
        for connection in list(self._open):
            connection.abort()

    def opened(self, connection: _Connection) -> None:
        """A connection that is made."""
        self._open.add(connection)

    def give_back(self, connection: _Connection) -> None:
        """A connection whose call is over."""
        if self._closed or len(self._idle) >= MAX_IDLE:
            connection.abort()
            return
        self._idle.append(connection)

    def forget(self, connection: _Connection) -> None:
        """A connection that is closed."""
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def spoil(self, connection: _Connection) -> None:
        """A connection that is out of step."""
        if connection in self._idle:
            self._idle.remove(connection)
        connection.abort()

    def _take(self) -> _Connection | None:
        idle = self._idle
        while idle:
            connection = idle.pop()
            if connection.usable:
                return connection
        return None

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        if self._closed:
            raise EngineUnreachableError(f"{self._address.url} no longer belongs to this router")
        connection = _Connection(self, loop)
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                options: Any = await self._tls.options(self._address)
                await loop.create_connection(lambda: connection, self._address.host, self._address.port, **options)
        except asyncio.CancelledError:
            connection.abort()  # it may have been made at this very moment
            raise
        except TimeoutError:
            connection.abort()
            raise EngineUnreachableError(
                f"no connection to {self._address.url} in {self._connect_timeout_s:g} s"
            ) from None
        except OSError as error:
            raise EngineUnreachableError(f"no connection to {self._address.url}: {why_not(error)}") from None
        except ConfigError as error:
            raise EngineUnreachableError(f"no connection to {self._address.url}: --engine-tls-{error}") from None
        return connection
