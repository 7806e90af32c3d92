"""The HTTP front fed a byte stream in pieces, without sockets: for tests and for fuzzing.

`converse` is one client's connection from its first byte to its end; `check_answers` is what must hold of all that was
said to it, by a reader of its own. `Mutator` damages valid requests.
"""

from __future__ import annotations

import asyncio
import logging
import re
from typing import TYPE_CHECKING, Any, NamedTuple

from kvrelay.router.http.registry import Registry
from kvrelay.router.http.server import Connection, Limits

if TYPE_CHECKING:
    import random
    from collections.abc import Iterable, Sequence

    from kvrelay.router.http.messages import Request
    from kvrelay.router.http.reply import Reply

BODY = b'{"prompt":"a","max_tokens":1}'
LIMITS = Limits(max_body_bytes=2048, max_head_bytes=1024, max_headers=16, max_pipelined=3)
"""Small, so that they are met."""
_POST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
SEEDS = (
    b"GET /v1/models?a=b HTTP/1.1\r\nhost: x\r\n\r\n",
    b"HEAD /health HTTP/1.1\r\nhost: x\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nhost: x\r\norigin: http://a\r\n\r\n",
    b"GET http://x:1/version HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
    b"GET /health HTTP/1.0\r\nconnection: keep-alive\r\n\r\n",
    _POST + b"content-length: %d\r\n\r\n%b" % (len(BODY), BODY),
    _POST + b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY),
    _POST + b'transfer-encoding: chunked\r\n\r\n5;a=b;c="d"\r\n{"pro\r\n8\r\nmpt":1}\n\r\n0\r\nx-trailer: 1\r\n\r\n',
    _POST + b"expect: 100-continue\r\ncontent-length: 2\r\n\r\n{}",
    _POST + b"connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AA\r\ncontent-length: 2\r\n\r\n{}",
)
ANSWERS = (
    b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 14\r\n\r\n{"choices":[]}',
    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    (
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        b'8\r\ndata: 1\n\r\n1;a="b"\r\n\n\r\ne\r\ndata: [DONE]\n\n\r\n0\r\nx-trailer: 1\r\n\r\n'
    ),
    b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\nconnection: close\r\n\r\nup to the end",
    b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\nconnection: keep-alive\r\n\r\n{}",
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}",
    b"HTTP/1.1 204 No Content\r\n\r\n",
    b"HTTP/1.1 429 Busy\r\nretry-after: 1\r\ncontent-length: 2\r\n\r\n{}",
    b"HTTP/1.1 500 Oops\r\ncontent-length: 2\r\n\r\n{}",
)
"""An engine's."""
TOKENS = (
    b"\r\n", b"\n", b"\r", b"\0", b" ", b"\t", b":", b";", b",", b"#", b"%00", b"\r\n\r\n", b"0\r\n\r\n", b"\xff",
    b"content-length: 5\r\n", b"Content-Length: 0\r\n", b"transfer-encoding: chunked\r\n",
    b"transfer-encoding: identity\r\n", b"host: y\r\n", b"connection: close\r\n", b"expect: 100-continue\r\n",
    b"upgrade: websocket\r\nconnection: upgrade\r\n", b"expect: more\r\n", b"HTTP/1.0", b"HTTP/2.0", b"HTTP/0.9",
    b"CONNECT x:1 ", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"ffffffffffffffff\r\n", b"18446744073709551616",
    b"+", b"x" * 300, b"a: b\r\n" * 20,
)  # fmt: skip
_HEAD = re.compile(rb"HTTP/1\.1 (\d{3}) [\t -~\x80-\xff]*\r\n((?:[!-9;-~]+: [\t -~\x80-\xff]*\r\n)*)\r\n")
_CHUNK = re.compile(rb"([0-9a-f]+)\r\n")


class _Socket:
    def setsockopt(self, *_: Any) -> None:
        """Nothing to set."""


class Wire(asyncio.Transport):
    """A transport that keeps what is written."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__({"socket": _Socket(), "peername": ("127.0.0.1", 1)})
        self._loop = loop
        self.said = bytearray()
        self.protocol: asyncio.Protocol | None = None
        self._closing = self._ended = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Keep it; what is written after the end is a bug."""
        if self._ended and not self._closing:
            raise AssertionError("something was said after the end")
        if not self._closing:
            self.said += data

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        """Keep all."""
        for data in list_of_data:
            self.write(data)

    def write_eof(self) -> None:
        """Nothing more will be said."""
        self._ended = True

    def can_write_eof(self) -> bool:
        """As a socket."""
        return True

    def is_closing(self) -> bool:
        """Whether it was closed, by either side."""
        return self._closing

    @property
    def ended(self) -> bool:
        """Whether the router has closed, or will say nothing more."""
        return self._closing or self._ended

    def close(self) -> None:
        """Close, and tell the protocol soon."""
        if not self._closing:
            self._closing = True
            if self.protocol is not None:
                self._loop.call_soon(self.protocol.connection_lost, None)

    def abort(self) -> None:
        """The same."""
        self.close()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Nothing is buffered."""

    def get_write_buffer_size(self) -> int:
        """Nothing."""
        return 0

    def pause_reading(self) -> None:
        """Not expected to hold anything back."""

    def resume_reading(self) -> None:
        """Go on."""


class Conversation(NamedTuple):
    """What came of a stream."""

    requests: list[Request]
    said: bytes
    ended: bool
    """Whether the router closed, before the client did."""


class _Listener(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.heard: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.heard.append(logging.Formatter().format(record))


async def converse(data: bytes, sizes: Sequence[int], limits: Limits = LIMITS) -> Conversation:
    """Feed ``data`` in pieces of ``sizes`` (the last takes the rest) to a connection whose handler answers everything.

    Checks on the way that no exception leaves the parser or is logged, and that the connection lets go of everything.
    """
    loop = asyncio.get_running_loop()
    requests: list[Request] = []

    async def handle(request: Request, reply: Reply) -> None:
        requests.append(request)
        await asyncio.sleep(0)
        if len(request.body) % 2:
            reply.start(200, [])
            reply.write(b"piece")
            reply.write(b"by piece")
            reply.finish()
        else:
            reply.answer(200, b"{}")

    registry, wire, listener = Registry(), Wire(loop), _Listener()
    connection = Connection(handle, limits, registry, loop)
    wire.protocol = connection
    logger = logging.getLogger("kvrelay.router.http.server")
    logger.addHandler(listener)
    try:
        connection.connection_made(wire)
        for piece in pieces(data, sizes):
            if not wire.is_closing():
                connection.data_received(piece)
            await asyncio.sleep(0)
        for _ in range(8 * (limits.max_pipelined + 2)):
            await asyncio.sleep(0)
        ended = wire.ended
        wire.close()
        for _ in range(8):
            await asyncio.sleep(0)
    finally:
        logger.removeHandler(listener)
    if listener.heard:
        raise AssertionError("logged: " + "\n".join(listener.heard))
    if len(registry):
        raise AssertionError("the connection is still there")
    return Conversation(requests, bytes(wire.said), ended)


def pieces(data: bytes, sizes: Sequence[int]) -> list[bytes]:
    """``data`` cut into pieces of ``sizes``; what is left comes last."""
    cut, at = [], 0
    for size in sizes:
        cut.append(data[at : at + size])
        at += size
    return [piece for piece in (*cut, data[at:]) if piece]


def check_answers(said: bytes, methods: Sequence[str] = ()) -> list[int]:
    """The statuses of well-formed answers, one after the other, to requests of ``methods`` and then to none.

    Raises:
        AssertionError: there is something else, or an answer is none a client could read.
    """
    statuses: list[int] = []
    at, last = 0, False
    methods = list(methods)
    while at < len(said):
        if last:
            raise AssertionError(f"something follows the last answer: {said[at:][:80]!r}")
        found = _HEAD.match(said, at)
        if found is None:
            raise AssertionError(f"no answer: {said[at:][:80]!r}")
        status, at = int(found[1]), found.end()
        headers = [line.split(b": ", 1) for line in found[2].split(b"\r\n") if line]
        names = [name.lower() for name, _ in headers]
        if status == 100:
            if headers:
                raise AssertionError("an interim answer has headers")
            continue
        last = any(name.lower() == b"connection" and value == b"close" for name, value in headers)
        framing = names.count(b"content-length") + names.count(b"transfer-encoding")
        if framing != 1 and not (last and framing == 0):  # to HTTP/1.0: up to the end of the connection
            raise AssertionError(f"{framing} framings in {found[0]!r}")
        is_head = len(statuses) < len(methods) and methods[len(statuses)] == "HEAD"
        statuses.append(status)
        if not framing:
            at = len(said)
        elif not is_head:
            at = _body_end(said, at, dict(zip(names, (value for _, value in headers), strict=True)))
    return statuses


def _body_end(said: bytes, at: int, headers: dict[bytes, bytes]) -> int:
    if b"content-length" in headers:
        end = at + int(headers[b"content-length"])
        if end > len(said):
            raise AssertionError("an answer is cut off")
        return end
    while True:
        size = _CHUNK.match(said, at)
        if size is None:
            raise AssertionError(f"no chunk: {said[at:][:80]!r}")
        end = size.end() + int(size[1], 16)
        if said[end : end + 2] != b"\r\n":
            raise AssertionError("a chunk does not end")
        at = end + 2
        if end == size.end():
            return at


async def check(data: bytes, sizes: Sequence[int]) -> Conversation:
    """Everything that must hold, whatever a client sends: see `converse` and `check_answers`.

    And that the answer does not depend on how the stream is cut, apart from interim answers and where limits are met.
    """
    whole = await converse(data, [])
    cut = await converse(data, sizes)
    for said in (whole, cut):
        statuses = check_answers(said.said, [request.method for request in said.requests])
        if any(status >= 500 and status != 505 for status in statuses):
            raise AssertionError(f"a request made the router fail: {statuses}")
        if len(statuses) < len(said.requests):
            raise AssertionError(f"{len(said.requests)} requests and {len(statuses)} answers")
        refused = len(statuses) - len(said.requests)
        if refused > 1 or (refused and not said.ended):
            raise AssertionError(f"refused {refused} times, ended: {said.ended}")
    if _facts(whole)[: len(cut.requests)] != _facts(cut)[: len(whole.requests)]:
        raise AssertionError("the same bytes, cut otherwise, are other requests")
    return cut


def _facts(conversation: Conversation) -> list[tuple[Any, ...]]:
    return [
        (request.method, request.path, request.query, request.headers, request.body)
        for request in conversation.requests
    ]


class Mutator:
    """Makes damaged messages of good ones, by chance that can be repeated."""

    def __init__(self, rng: random.Random, seeds: Sequence[bytes] = SEEDS) -> None:
        """``rng``: seeded by the caller."""
        self._rng = rng
        self._seeds = seeds

    def stream(self) -> bytes:
        """A few messages, damaged here and there."""
        rng = self._rng
        data = bytearray(b"".join(rng.choices(self._seeds, k=rng.choice((1, 1, 1, 2, 3, 6)))))
        for _ in range(rng.choice((0, 1, 1, 2, 3, 8))):
            self._damage(data)
        return bytes(data)

    def sizes(self) -> list[int]:
        """How to cut a stream."""
        rng = self._rng
        return [rng.choice((1, 1, 2, 3, 7, 20, 100)) for _ in range(rng.choice((0, 1, 3, 30)))]

    def _damage(self, data: bytearray) -> None:
        rng = self._rng
        at = rng.randrange(len(data) + 1)
        end = min(len(data), at + rng.choice((1, 1, 2, 8, 40)))
        match rng.randrange(6):
            case 0:
                data[at:at] = rng.choice(TOKENS)
            case 1:
                data[at:end] = rng.choice(TOKENS)
            case 2:
                data[at:end] = b""
            case 3:
                data[at:at] = data[at:end]
            case 4:
                data[at:end] = bytes(rng.randrange(256) for _ in range(end - at))
            case _:
                line = data.find(b"\r\n", at)
                if line >= 0:
                    data[line + 2 : line + 2] = rng.choice([token for token in TOKENS if b": " in token])
