"""What of an answer leaves together."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from kvrelay.router.http.messages import Request
from kvrelay.router.http.reply import Reply

if TYPE_CHECKING:
    from collections.abc import Iterable


class Sent(asyncio.Transport):
    """Remembers what each call of the kernel would have been."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[bytes] = []

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.calls.append(bytes(data))

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        self.calls.append(b"".join(list_of_data))


def asked(*, method: str = "POST", http_1_0: bool = False) -> Request:
    return Request(
        method=method, target=b"/v1/completions", headers=[], body=b"", http_1_0=http_1_0, keep_alive=not http_1_0
    )


def begun(request: Request, *, length: int | None = None) -> tuple[Reply, Sent]:
    sent = Sent()
    reply = Reply(sent, request, close=False, writable=True)
    reply.start(200, [] if length is None else [(b"content-length", b"%d" % length)])
    return reply, sent


HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


def test_a_head_leaves_with_the_first_piece_and_the_end_with_the_last() -> None:
    reply, sent = begun(asked())
    assert sent.calls == []
    reply.write(b"abc")
    reply.write(b"de", end=True)
    reply.finish()
    assert sent.calls == [HEAD + b"3\r\nabc\r\n", b"2\r\nde\r\n0\r\n\r\n"]
    assert reply.ended
    assert reply.finished


def test_a_head_can_be_sent_before_there_is_a_body_and_is_sent_once() -> None:
    reply, sent = begun(asked())
    reply.flush()
    reply.flush()
    reply.write(b"abc")
    reply.finish()
    assert sent.calls == [HEAD, b"3\r\nabc\r\n", b"0\r\n\r\n"]


def test_an_answer_without_a_body_is_its_head_and_end() -> None:
    reply, sent = begun(asked())
    reply.finish()
    assert sent.calls == [HEAD + b"0\r\n\r\n"]


def test_a_body_of_known_length_is_not_framed() -> None:
    reply, sent = begun(asked(), length=3)
    reply.write(b"abc", end=True)
    reply.finish()
    assert sent.calls == [b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nabc"]


def test_a_long_piece_is_framed_too() -> None:
    reply, sent = begun(asked())
    data = b"x" * (1 << 16)
    reply.write(data, end=True)
    reply.finish()
    assert sent.calls == [HEAD + b"10000\r\n" + data + b"\r\n0\r\n\r\n"]


def test_head_requests_get_a_head_alone() -> None:
    reply, sent = begun(asked(method="HEAD"), length=3)
    reply.write(b"abc", end=True)
    reply.finish()
    assert sent.calls == [b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\n"]


def test_http_1_0_gets_no_chunks_and_a_closed_connection() -> None:
    reply, sent = begun(asked(http_1_0=True))
    reply.write(b"abc", end=True)
    reply.finish()
    assert sent.calls == [b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\nabc"]
    assert reply.close


@pytest.mark.parametrize("step", ["start", "write", "finish"])
def test_a_client_that_is_gone_gets_nothing_more(step: str) -> None:
    reply, sent = begun(asked())
    if step != "start":
        reply.write(b"abc")
    if step == "finish":
        reply.write(b"de")
    before = list(sent.calls)
    reply.lost()
    reply.flush()
    reply.write(b"fg", end=True)
    reply.finish()
    assert sent.calls == before
