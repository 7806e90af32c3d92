"""Asking a starting process whether it serves yet."""

from __future__ import annotations

import asyncio
import ssl
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvrelay.launch.core.plan import Readiness

POLL_S = 0.25
ANSWER_S = 10.0
"""How long one answer may take; a starting engine may be slow."""


async def is_ready(readiness: Readiness) -> bool:
    """Ask once. False when nobody listens, the answer is not 200, or none comes in time."""
    try:
        async with asyncio.timeout(ANSWER_S):
            if readiness.unix:
                _, writer = await asyncio.open_unix_connection(readiness.unix)
                reader = None
            else:
                context = _trusting_anybody() if readiness.tls else None
                reader, writer = await asyncio.open_connection(readiness.host, readiness.port, ssl=context)
            try:
                return reader is None or await _get(reader, writer, readiness) == b"200"
            finally:
                writer.close()
                await writer.wait_closed()
    except (OSError, TimeoutError):
        return False


def _trusting_anybody() -> ssl.SSLContext:
    """For a process of our own on this machine, which is asked for nothing but whether it serves."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


async def until_ready(readiness: Readiness) -> None:
    """Return once ready; the caller bounds the wait."""
    while not await is_ready(readiness):  # noqa: ASYNC110 - another process has no event to wait for
        await asyncio.sleep(POLL_S)


async def _get(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, readiness: Readiness) -> bytes:
    request = f"GET {readiness.path} HTTP/1.1\r\nHost: {readiness.host}:{readiness.port}\r\nConnection: close\r\n\r\n"
    writer.write(request.encode())
    _, _, rest = (await reader.readline()).partition(b" ")
    return rest[:3]
