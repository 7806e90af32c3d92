"""A connection to a pool that is written to and read from by hand: for what no client of ours would say."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Self

from kvrelay.wire import messages as m
from kvrelay.wire.frames import FrameDecoder, encode

if TYPE_CHECKING:
    from collections.abc import Callable

ANSWER_S = 20.0


class Talker:
    """Says what it is told to, over a pool's TCP address or UNIX socket. ``greet``: say hello first, with ``token``."""

    def __init__(self, address: str, *, token: str | None = None, greet: bool = True) -> None:
        if address.startswith("unix:"):
            self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self.sock.settimeout(ANSWER_S)
            self.sock.connect(address.removeprefix("unix:"))
        else:
            host, port = address.removeprefix("tcp:").split(":")
            self.sock = socket.create_connection((host, int(port)), ANSWER_S)
        self._replies: FrameDecoder[m.Reply] = FrameDecoder(m.AnyReply)
        if greet:
            self.say(m.Hello(1, [1], "talker", token))
            reply, _ = self.hear()
            assert isinstance(reply, m.Welcome), reply

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave, without a word."""
        self.sock.close()

    def say(self, message: m.Request, payload: bytes = b"", *, announced: int | None = None) -> None:
        """Send a message and bytes behind it. ``announced``: how many its header speaks of, if not those there are."""
        self.sock.sendall(encode(message, len(payload) if announced is None else announced) + payload)

    def hear(self) -> tuple[m.Reply, bytes]:
        """The next answer, and the bytes behind it. ConnectionError: the pool has closed the connection."""
        while (frame := self._replies.next()) is None:
            data = self.sock.recv(1 << 16)
            if not data:
                raise ConnectionResetError("the pool has closed the connection")
            self._replies.feed(data)
        payload = bytearray(frame.payload_bytes)
        taken = self._replies.take(memoryview(payload))
        while taken < len(payload):
            got = self.sock.recv_into(memoryview(payload)[taken:])
            if not got:
                raise ConnectionResetError("the pool has closed the connection")
            self._replies.skip(got)
            taken += got
        return frame.message, bytes(payload)

    def ask(self, message: m.Request, payload: bytes = b"") -> tuple[m.Reply, bytes]:
        """Say it and hear the next answer."""
        self.say(message, payload)
        return self.hear()

    def until(self, done: Callable[[m.Reply], bool]) -> m.Reply:
        """The first answer that is ``done``; those before it are dropped."""
        while True:
            reply, _ = self.hear()
            if done(reply):
                return reply
