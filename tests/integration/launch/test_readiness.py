"""What a process that is asked whether it serves may do instead of answering."""

from __future__ import annotations

import asyncio
import errno
import socket
from typing import TYPE_CHECKING

from kvrelay.launch.core.plan import Readiness
from kvrelay.launch.readiness import is_ready

if TYPE_CHECKING:
    import pytest


async def test_a_process_that_ends_right_after_it_accepted_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connection has no peer any more when asyncio looks who that is."""

    def gone(_: socket.socket) -> object:
        raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        readiness = Readiness(host="127.0.0.1", port=server.sockets[0].getsockname()[1])
        assert await is_ready(readiness)
        monkeypatch.setattr(socket.socket, "getpeername", gone)
        assert not await is_ready(readiness)
