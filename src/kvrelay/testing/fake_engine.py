"""A fake vLLM server: OpenAI's API with canned answers, scripted failures, and a record of what it was asked.

In a test::

    engine = await FakeEngine.start()
    engine.script(fail(500, "boom"), hang())     # what becomes of the next two POSTs; then it is well again
    ...
    assert engine.requests[0].json["max_tokens"] == 1
    await engine.stop()

As a process: ``python -m kvrelay.testing.fake_engine --port 8100 --tokens 32``.

A behaviour is a coroutine function of one `Exchange`, which gives it the request and the bare connection.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import struct
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Self, cast

import httptools
import msgspec

from kvrelay.testing import fake_answers
from kvrelay.testing.fake_dialects import MESSAGES, RESPONSES, Dialects

if TYPE_CHECKING:
    import ssl
    from typing import Any

GENERATING = frozenset({"/v1/completions", "/v1/chat/completions", RESPONSES, MESSAGES})
WAIT_S = 10.0
DONE = b"data: [DONE]\n\n"
"""The last event of a stream that is whole."""


class Recorded:
    """A request as it arrived."""

    __slots__ = ("body", "headers", "method", "target")

    def __init__(self, method: str, target: str, headers: dict[str, str], body: bytes) -> None:
        """``headers``: names in lower case."""
        self.method = method
        self.target = target
        self.headers = headers
        self.body = body

    @property
    def json(self) -> dict[str, Any]:
        """The body, which is a JSON object."""
        return msgspec.json.decode(self.body, type=dict)


class Exchange:
    """One request and the means to answer it, or not."""

    __slots__ = ("_transport", "ended", "engine", "gone", "request", "writable")

    def __init__(self, engine: FakeEngine, request: Recorded, transport: asyncio.Transport) -> None:
        """``gone`` is set when the client leaves before the answer's end."""
        self.engine = engine
        self.request = request
        self.gone = asyncio.Event()
        self.writable = asyncio.Event()
        """Clear while the client does not keep up."""
        self.writable.set()
        self.ended = False
        self._transport = transport

    def send(self, data: bytes) -> None:
        """These bytes, as they are."""
        self._transport.write(data)

    def head(self, status: int, content_type: str, *, length: int | None = None, extra: str = "") -> None:
        """An answer's head; chunked unless ``length`` is given. ``extra``: more header lines, each with CRLF."""
        framing = "transfer-encoding: chunked" if length is None else f"content-length: {length}"
        self.send(f"HTTP/1.1 {status} Fake\r\ncontent-type: {content_type}\r\n{framing}\r\n{extra}\r\n".encode())

    def chunk(self, data: bytes) -> None:
        """A piece of a chunked body."""
        self.send(b"%x\r\n%b\r\n" % (len(data), data))

    def end(self) -> None:
        """The end of a chunked body."""
        self.send(b"0\r\n\r\n")

    def answer(self, status: int, body: bytes, content_type: str = "application/json", extra: str = "") -> None:
        """A whole answer."""
        self.head(status, content_type, length=len(body), extra=extra)
        self.send(body)

    def close(self) -> None:
        """Close the connection, in order."""
        self._transport.close()

    def abort(self) -> None:
        """Drop the connection."""
        self._transport.abort()

    def reset(self) -> None:
        """Drop the connection, and have its other end told so at once: RST."""
        sock = self._transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._transport.abort()


Behaviour = Callable[[Exchange], Awaitable[None]]


def fail(status: int, message: str = "scripted") -> Behaviour:
    """Answer with an error."""

    async def behave(exchange: Exchange) -> None:
        exchange.answer(status, fake_answers.error(status, message))

    return behave


def raw(data: bytes, *, close: bool = False) -> Behaviour:
    """Send these bytes, whatever they are; then close the connection if ``close``."""

    async def behave(exchange: Exchange) -> None:
        exchange.send(data)
        if close:
            exchange.close()

    return behave


def hang() -> Behaviour:
    """Never answer."""

    async def behave(exchange: Exchange) -> None:
        await exchange.gone.wait()

    return behave


def drop() -> Behaviour:
    """Close the connection without a word."""

    async def behave(exchange: Exchange) -> None:
        exchange.close()

    return behave


def stream(pieces: list[bytes], *, ending: str = "end", gate: asyncio.Semaphore | None = None) -> Behaviour:
    """Stream these chunks as events; each waits for ``gate`` if given. ``ending``: ``end``, ``drop`` or ``hang``."""

    async def behave(exchange: Exchange) -> None:
        exchange.head(200, "text/event-stream; charset=utf-8")
        for piece in pieces:
            if gate is not None:
                await gate.acquire()
            exchange.chunk(piece)
        if ending == "hang":
            await exchange.gone.wait()
        elif ending == "drop":
            exchange.close()
        else:
            exchange.end()

    return behave


class _Connection(asyncio.Protocol):
    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine
        self._parser = httptools.HttpRequestParser(self)
        self._exchange: Exchange | None = None
        self._task: asyncio.Task[None] | None = None
        self._url = b""
        self._headers: dict[str, str] = {}
        self._body = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._engine.connected(self._transport)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def pause_writing(self) -> None:
        if self._exchange is not None:
            self._exchange.writable.clear()

    def resume_writing(self) -> None:
        if self._exchange is not None:
            self._exchange.writable.set()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._engine.disconnected(self._transport)
        if self._exchange is not None and not self._exchange.ended:
            self._exchange.gone.set()
            self._engine.left(self._exchange.request)
        if self._task is not None:
            self._task.cancel()

    def on_message_begin(self) -> None:
        self._url, self._headers, self._body = b"", {}, b""

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode().lower()] = value.decode("latin-1")

    def on_body(self, data: bytes) -> None:
        self._body += data

    def on_message_complete(self) -> None:
        request = Recorded(self._parser.get_method().decode(), self._url.decode(), self._headers, self._body)
        self._exchange = exchange = Exchange(self._engine, request, self._transport)
        behaviour = self._engine.arrived(request)
        self._task = asyncio.get_running_loop().create_task(self._run(behaviour, exchange))

    @staticmethod
    async def _run(behaviour: Behaviour, exchange: Exchange) -> None:
        await behaviour(exchange)
        exchange.ended = True


class FakeEngine:
    """A listening fake. Its records grow while it runs."""

    def __init__(self, default: Behaviour | None = None) -> None:
        """``default``: what it does when nothing is scripted; answers properly if not given."""
        self.default = default or self.answer_well
        self.requests: list[Recorded] = []
        """Every POST, in order of arrival."""
        self.gone: list[Recorded] = []
        """Those whose client left before the end of the answer."""
        self.num_accepted = 0
        """Connections so far."""
        self.carried: object = None
        """The ``kv_transfer_params`` of answers to prefill legs."""
        self.models = [fake_answers.MODEL]
        """What it says it serves."""
        self.dialects = Dialects()
        self.tokens: int | None = None
        """Tokens of every answer, instead of what was asked."""
        self.spread = False
        """Whether each event of a stream leaves by itself, as from a real engine, instead of all at once."""
        self.recording = True
        self._script: deque[Behaviour] = deque()
        self._transports: set[asyncio.Transport] = set()
        self._waiters: list[tuple[Callable[[], bool], asyncio.Future[None]]] = []
        self._server: asyncio.Server | None = None
        self._scheme = "http"

    @classmethod
    async def start(
        cls,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        default: Behaviour | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> Self:
        """Listen; port 0 takes a free one. ``tls``: a server's context, to speak TLS."""
        engine = cls(default)
        engine._scheme = "http" if tls is None else "https"
        engine._server = await asyncio.get_running_loop().create_server(
            lambda: _Connection(engine), host, port, ssl=tls
        )
        return engine

    async def stop(self) -> None:
        """Stop listening and drop every connection: from outside, a process that died."""
        if self._server is not None:
            self._server.close()
        for transport in list(self._transports):
            transport.abort()
        await self.left_alone()

    @property
    def port(self) -> int:
        """The port listened on."""
        assert self._server is not None
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    @property
    def url(self) -> str:
        """For ``--prefill`` or ``--decode``."""
        return f"{self._scheme}://127.0.0.1:{self.port}"

    def script(self, *behaviours: Behaviour) -> None:
        """What becomes of the next POSTs, in turn."""
        self._script.extend(behaviours)

    async def asked(self, count: int) -> None:
        """Wait until that many POSTs have arrived."""
        await self._wait(lambda: len(self.requests) >= count)

    async def left_by(self, count: int) -> None:
        """Wait until that many clients have left before the end."""
        await self._wait(lambda: len(self.gone) >= count)

    async def left_alone(self) -> None:
        """Wait until nobody is connected."""
        await self._wait(lambda: not self._transports)

    async def answer_well(self, exchange: Exchange) -> None:
        """As vLLM would."""
        request = exchange.request
        path = request.target.partition("?")[0]
        if request.method != "POST":
            self._answer_get(exchange, path)
        elif path not in GENERATING:
            exchange.answer(200, msgspec.json.encode({"path": path, "echo": request.body.decode("latin-1")}))
        else:
            body = request.json
            if self.tokens is not None and not (body.get("kv_transfer_params") or {}).get("do_remote_decode"):
                body["max_tokens"] = body["max_completion_tokens"] = body["max_output_tokens"] = self.tokens
            await self._generate(exchange, path, body)

    def _answer_get(self, exchange: Exchange, path: str) -> None:
        if path == "/health":
            exchange.answer(200, b"")
        elif path == "/v1/models":
            models = [{"id": name, "object": "model", "created": 1, "owned_by": "vllm"} for name in self.models]
            exchange.answer(200, msgspec.json.encode({"object": "list", "data": models}))
        elif path == "/version":
            exchange.answer(200, b'{"version":"0.32.0"}')
        elif (stored := self.dialects.stored.get(path.removeprefix(f"{RESPONSES}/"))) is not None:
            exchange.answer(200, stored)
        else:
            exchange.answer(404, b'{"detail":"Not Found"}')

    async def _generate(self, exchange: Exchange, path: str, body: dict[str, Any]) -> None:
        kind = "chatcmpl" if fake_answers.is_chat(path) else "cmpl"
        request_id = f"{kind}-{exchange.request.headers.get('x-request-id', 'none')}"
        if not body.get("stream"):
            remote = (body.get("kv_transfer_params") or {}).get("do_remote_decode")
            answer = (self.dialects if path in {RESPONSES, MESSAGES} else fake_answers).whole(
                path, body, request_id, self.carried if remote else None
            )
            if answer is None:
                exchange.answer(404, fake_answers.error(404, "no such response"))
            else:
                exchange.answer(200, answer)
            return
        exchange.head(200, "text/event-stream; charset=utf-8")
        speaker = self.dialects if path in {RESPONSES, MESSAGES} else fake_answers
        for event in speaker.events(path, body, request_id):
            exchange.chunk(event)
            if self.spread:
                await asyncio.sleep(0)
        exchange.end()

    # --- told by its connections ---

    def connected(self, transport: asyncio.Transport) -> None:
        """A client has connected."""
        self.num_accepted += 1
        self._transports.add(transport)
        self._notify()

    def disconnected(self, transport: asyncio.Transport) -> None:
        """A connection has ended."""
        self._transports.discard(transport)
        self._notify()

    def arrived(self, request: Recorded) -> Behaviour:
        """A request has come; what is to become of it."""
        if request.method != "POST":
            return self.default
        if self.recording:
            self.requests.append(request)
            self._notify()
        return self._script.popleft() if self._script else self.default

    def left(self, request: Recorded) -> None:
        """Its client did not wait for the end."""
        self.gone.append(request)
        self._notify()

    def _notify(self) -> None:
        for reached, waiter in self._waiters:
            if not waiter.done() and reached():
                waiter.set_result(None)

    async def _wait(self, reached: Callable[[], bool]) -> None:
        if reached():
            return
        waiting = (reached, asyncio.get_running_loop().create_future())
        self._waiters.append(waiting)
        try:
            async with asyncio.timeout(WAIT_S):
                await waiting[1]
        finally:
            self._waiters.remove(waiting)


async def _serve(host: str, port: int, tokens: int | None, *, spread: bool) -> None:
    engine = await FakeEngine.start(host=host, port=port)
    engine.tokens, engine.spread, engine.recording = tokens, spread, False
    print(f"fake engine ready: http://{host}:{engine.port}", flush=True)  # noqa: T201  its only output
    await asyncio.get_running_loop().create_future()


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser(description="A fake vLLM server.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--tokens", type=int, help="tokens of every decode answer, instead of what is asked")
    parser.add_argument("--spread", action="store_true", help="send each event by itself")
    args = parser.parse_args()
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(args.host, args.port, args.tokens, spread=args.spread))


if __name__ == "__main__":
    main()
