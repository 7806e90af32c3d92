"""An HTTP/1.1 client for tests that look at every byte and at the moment it comes."""

from __future__ import annotations

import asyncio
import ctypes
import socket
import struct
from typing import TYPE_CHECKING, Self

import msgspec
from msgspec import Struct

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Any

TIMEOUT_S = 10.0
_SO_ATTACH_FILTER = 26
_BPF_RETURN = 0x06
"""Of Linux' socket filters: an instruction that returns how many bytes of a packet to take."""


class Answer(Struct, frozen=True):
    """A whole answer. ``headers``: names in lower case; of repeated ones the last."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> dict[str, Any]:
        """The body, which is a JSON object."""
        return msgspec.json.decode(self.body, type=dict)


class RawClient:
    """One connection. Every wait is bounded by `TIMEOUT_S`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """See `open`."""
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, port: int, *, receive_buffer: int | None = None) -> Self:
        """Connect. ``receive_buffer``: bytes the kernel takes for a client that does not read."""
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=receive_buffer or 1 << 20)
        if receive_buffer is not None:
            sock = writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        return cls(reader, writer)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    def vanish(self) -> None:
        """As if its cable was pulled: its kernel takes nothing that comes, and says nothing to it."""
        drop_all = ctypes.create_string_buffer(struct.pack("=HBBI", _BPF_RETURN, 0, 0, 0))
        program = struct.pack("HP", 1, ctypes.addressof(drop_all))
        self._writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)

    def send(self, data: bytes) -> None:
        """These bytes, as they are."""
        self._writer.write(data)

    def post(self, path: str, body: object, *, headers: str = "") -> None:
        """A POST of JSON; ``headers``: more lines, each with CRLF."""
        data = body if isinstance(body, bytes) else msgspec.json.encode(body)
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n"
        self.send(head.encode() + headers.encode() + b"\r\n" + data)

    def get(self, path: str) -> None:
        """A GET."""
        self.send(f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode())

    async def head(self) -> tuple[int, dict[str, str]]:
        """Status and headers of the next answer."""
        async with asyncio.timeout(TIMEOUT_S):
            lines = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines[1:] if line)
        return int(lines[0].split(" ")[1]), headers

    async def chunk(self) -> bytes:
        """The next chunk of a chunked body; empty at its end."""
        async with asyncio.timeout(TIMEOUT_S):
            size = int(await self._reader.readline(), 16)
            data = await self._reader.readexactly(size)
            await self._reader.readexactly(2)
        return data

    async def answer(self) -> Answer:
        """The next whole answer."""
        status, headers = await self.head()
        if headers.get("transfer-encoding") == "chunked":
            pieces: list[bytes] = []
            while piece := await self.chunk():
                pieces.append(piece)
            body = b"".join(pieces)
        elif "content-length" in headers:
            async with asyncio.timeout(TIMEOUT_S):
                body = await self._reader.readexactly(int(headers["content-length"]))
        else:
            body = await self.rest()
        return Answer(status, headers, body)

    async def rest(self) -> bytes:
        """Everything up to the end of the connection."""
        async with asyncio.timeout(TIMEOUT_S):
            return await self._reader.read()

    def finish_sending(self) -> None:
        """Nothing more will be sent."""
        self._writer.write_eof()

    def abort(self) -> None:
        """Go away."""
        self._writer.transport.abort()


async def post(port: int, path: str, body: object, *, headers: str = "") -> Answer:
    """One POST on a connection of its own."""
    async with await RawClient.open(port) as client:
        client.post(path, body, headers=headers)
        return await client.answer()


async def get(port: int, path: str) -> Answer:
    """One GET on a connection of its own."""
    async with await RawClient.open(port) as client:
        client.get(path)
        return await client.answer()
