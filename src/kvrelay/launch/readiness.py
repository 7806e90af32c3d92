"""Asking a starting process whether it serves yet, and making sure that it was this process which answered.

A program that had the port first answers as well as ours would: another stack's router that was started at the same
time. And vLLM lets others of the same user share its port (SO_REUSEPORT), as a router of several workers does.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import TYPE_CHECKING

from kvrelay.errors import ConfigError
from kvrelay.launch.kernel import session_members
from kvrelay.launch.listeners import listening, open_sockets

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvrelay.launch.core.plan import Readiness

POLL_S = 0.25
ANSWER_S = 10.0
"""How long one answer may take; a starting engine may be slow."""


async def is_ready(readiness: Readiness) -> bool:
    """Ask once. False when nobody listens, the answer is not 200, or none comes in time."""
    return await _answering_at(readiness) is not None


async def until_ready(readiness: Readiness, leader: Callable[[], int | None]) -> None:
    """Return once the process serves whose session ``leader`` began; the caller bounds the wait.

    ``leader``: its id, None until it is known. Raises `ConfigError` when another program's process shares its port.
    """
    while not await _serves(readiness, leader):  # noqa: ASYNC110 - another process has no event to wait for
        await asyncio.sleep(POLL_S)


async def _serves(readiness: Readiness, leader: Callable[[], int | None]) -> bool:
    address = await _answering_at(readiness)
    pid = leader()
    if address is None or pid is None:
        return False
    if readiness.unix:
        return True  # in the run's own directory
    found = listening(address, readiness.port)
    if found is None:
        return True
    ours = found & open_sockets(session_members(pid))
    if ours and found != ours:
        raise ConfigError(
            f"another program, too, listens on port {readiness.port} and gets some of the requests: stop it "
            f"(`ss -ltnp 'sport = :{readiness.port}'`) or choose another port"
        )
    return bool(ours)


async def _answering_at(readiness: Readiness) -> str | None:
    """The numeric address (empty: a UNIX socket) from which a good answer came; None without one in time."""
    try:
        async with asyncio.timeout(ANSWER_S):
            if readiness.unix:
                _, writer = await asyncio.open_unix_connection(readiness.unix)
                reader = None
            else:
                context = _trusting_anybody() if readiness.tls else None
                reader, writer = await asyncio.open_connection(readiness.host, readiness.port, ssl=context)
            try:
                if reader is None:
                    return ""
                peer: tuple[str, int] | None = writer.get_extra_info("peername")
                if peer is None:  # it ended right after it accepted
                    return None
                return peer[0] if await _get(reader, writer, readiness) == b"200" else None
            finally:
                writer.close()
                await writer.wait_closed()
    except (OSError, TimeoutError):
        return None


def _trusting_anybody() -> ssl.SSLContext:
    """For a process of our own on this machine, which is asked for nothing but whether it serves."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


async def _get(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, readiness: Readiness) -> bytes:
    request = f"GET {readiness.path} HTTP/1.1\r\nHost: {readiness.host}:{readiness.port}\r\nConnection: close\r\n\r\n"
    writer.write(request.encode())
    _, _, rest = (await reader.readline()).partition(b" ")
    return rest[:3]
