"""Everything an engine can do wrong on a connection, byte by byte, each under a name.

`FAILURES` are behaviours for `FakeEngine.script`; `refusing` and `black_hole` are ports where no engine is. A failure
says what becomes of a request that only this engine could answer: nothing here depends on how the router works.
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import contextmanager
from typing import TYPE_CHECKING

from msgspec import Struct

from kvrelay.testing.fake_engine import DONE, fail, raw

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvrelay.testing.fake_engine import Behaviour, Exchange

EVENT = b'data: {"choices":[{"text":"a"}]}\n\n'
WHOLE = b'{"object":"text_completion","choices":[{"text":"a"}]}'
_JSON = "application/json"
_EVENTS = "text/event-stream; charset=utf-8"


class Failure(Struct, frozen=True):
    """One way to fail. ``status``: what a client gets that does not stream, and one that does."""

    behave: Behaviour
    status: int
    streamed: int = 0
    """The same, if 0. 200: the stream begins, and ends with an error event."""
    silent: bool = False
    """Whether it is noticed by nothing but a deadline."""


async def _half_a_head(exchange: Exchange) -> None:
    exchange.send(b"HTTP/1.1 200 OK\r\ncontent-le")
    exchange.close()


async def _head_then_silence(exchange: Exchange) -> None:
    exchange.head(200, _EVENTS if _streams(exchange) else _JSON)
    await exchange.gone.wait()


async def _head_then_close(exchange: Exchange) -> None:
    exchange.head(200, _EVENTS if _streams(exchange) else _JSON)
    exchange.close()


async def _cut_chunk(exchange: Exchange) -> None:
    _begin(exchange)
    exchange.send(b"40\r\nhalf of a chunk")
    exchange.close()


async def _bad_chunk(exchange: Exchange) -> None:
    _begin(exchange)
    exchange.send(b"no size\r\n")
    await exchange.gone.wait()


async def _short_body(exchange: Exchange) -> None:
    exchange.head(200, _JSON, length=len(WHOLE) + 10)
    exchange.send(WHOLE)
    exchange.close()


async def _reset(exchange: Exchange) -> None:
    _begin(exchange)
    await asyncio.sleep(0.05)  # let what was sent leave: a reset would take it back
    exchange.reset()


async def _reset_at_once(exchange: Exchange) -> None:
    exchange.reset()


async def _no_done(exchange: Exchange) -> None:
    if _streams(exchange):
        _begin(exchange)
        exchange.end()
    else:
        exchange.answer(200, b"")


async def _empty_chunked(exchange: Exchange) -> None:
    exchange.head(200, _EVENTS if _streams(exchange) else _JSON)
    exchange.end()


async def _error_in_200(exchange: Exchange) -> None:
    exchange.answer(200, b'{"error":{"message":"boom","code":500}}')


async def _silence_mid_answer(exchange: Exchange) -> None:
    _begin(exchange)
    await exchange.gone.wait()


async def _silence(exchange: Exchange) -> None:
    await exchange.gone.wait()


def _begin(exchange: Exchange) -> None:
    """A good beginning: a whole event of a stream, or half of a JSON answer."""
    exchange.head(200, _EVENTS if _streams(exchange) else _JSON)
    exchange.chunk(EVENT if _streams(exchange) else WHOLE[: len(WHOLE) // 2])


def _streams(exchange: Exchange) -> bool:
    return exchange.request.json.get("stream") is True


FAILURES: dict[str, Failure] = {
    "closes-at-once": Failure(raw(b"", close=True), 502),
    "resets-at-once": Failure(_reset_at_once, 502),
    "half-a-status-line": Failure(raw(b"HTTP/1.1 20", close=True), 502),
    "half-a-head": Failure(_half_a_head, 502),
    "garbage": Failure(raw(b"\x16\x03\x01 this is no HTTP\r\n\r\n"), 502),
    "giant-head": Failure(raw(b"HTTP/1.1 200 OK\r\nx: " + b"y" * (256 << 10) + b"\r\n\r\n"), 502),
    "endless-interim": Failure(raw(b"HTTP/1.1 103 Early Hints\r\n\r\n" * 8_000), 502),
    "switches-protocols": Failure(raw(b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\n\r\n"), 502),
    "no-answer": Failure(_silence, 504, silent=True),
    "head-then-silence": Failure(_head_then_silence, 504, silent=True),
    "head-then-close": Failure(_head_then_close, 502),
    "cut-chunk": Failure(_cut_chunk, 502, streamed=200),
    "bad-chunk": Failure(_bad_chunk, 502, streamed=200),
    "short-body": Failure(_short_body, 502),
    "reset-mid-answer": Failure(_reset, 502, streamed=200),
    "silence-mid-answer": Failure(_silence_mid_answer, 504, streamed=200, silent=True),
    "500-with-a-body": Failure(fail(500, "boom"), 500),
    "500-without-a-body": Failure(raw(b"HTTP/1.1 500 Oops\r\ncontent-length: 0\r\n\r\n"), 500),
    "200-with-an-empty-body": Failure(raw(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"), 502),
    "200-with-an-empty-chunked-body": Failure(_empty_chunked, 502),
    "200-with-an-error": Failure(_error_in_200, 500),
    "no-done": Failure(_no_done, 502, streamed=200),
}  # fmt: skip


async def _drip(exchange: Exchange) -> None:
    _head(exchange, "")
    for byte in _body(exchange):
        exchange.chunk(bytes([byte]))
        await asyncio.sleep(0)
    exchange.end()


async def _interim(exchange: Exchange) -> None:
    exchange.send(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\n")
    _head(exchange, "")
    exchange.chunk(_body(exchange))
    exchange.end()


async def _closes_in_order(exchange: Exchange) -> None:
    _head(exchange, "connection: close\r\n")
    exchange.chunk(_body(exchange))
    exchange.end()
    exchange.close()


async def _until_close(exchange: Exchange) -> None:
    kind = _EVENTS if _streams(exchange) else _JSON
    exchange.send(f"HTTP/1.0 200 OK\r\ncontent-type: {kind}\r\n\r\n".encode() + _body(exchange))
    exchange.close()


def _head(exchange: Exchange, extra: str) -> None:
    exchange.head(200, _EVENTS if _streams(exchange) else _JSON, extra=extra)


def _body(exchange: Exchange) -> bytes:
    return EVENT + DONE if _streams(exchange) else WHOLE


ODDITIES: dict[str, Behaviour] = {
    "drips": _drip,
    "interim-answers": _interim,
    "connection-close": _closes_in_order,
    "ends-with-the-connection": _until_close,
}
"""What is unusual and right: the answer is `EVENT` and `DONE`, or `WHOLE`."""


@contextmanager
def refusing() -> Iterator[str]:
    """The URL of a port that nobody listens on, and nobody can take meanwhile."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


@contextmanager
def black_hole() -> Iterator[str]:
    """The URL of a port that takes no connection and refuses none: its queue is full."""
    with socket.socket() as full, socket.socket() as first, socket.socket() as second:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for filler in (first, second):
            filler.setblocking(False)
            filler.connect_ex(full.getsockname())
        yield f"http://127.0.0.1:{full.getsockname()[1]}"
