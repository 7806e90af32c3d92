"""TLS handshakes under way on a pool's listeners: each with a time limit, none in the way of the others."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from typing import TYPE_CHECKING

from kvrelay.transport.tls import TlsSocket, explain, shake_hands

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)

HANDSHAKE_S = 10.0
"""A connection that has not shaken hands by then is closed."""


PART_S = 1.0
"""How long one that is refused has to read why."""


class Handshakes:
    """Connections that are not let in yet."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, context: ssl.SSLContext, sock: socket.socket, admit: Callable[[TlsSocket], None]) -> None:
        """Shake hands on an accepted socket, then ``admit`` it. One that fails is logged and closed."""
        task = asyncio.create_task(self._shake(context, sock, admit))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _shake(self, context: ssl.SSLContext, sock: socket.socket, admit: Callable[[TlsSocket], None]) -> None:
        sock.setblocking(False)
        who = _shown(sock)
        secured: TlsSocket | None = None
        try:
            secured = TlsSocket(context, sock)
            async with asyncio.timeout(HANDSHAKE_S):
                await shake_hands(secured)
        except TimeoutError:
            why = f"no TLS handshake within {HANDSHAKE_S:.0f} s"
        except ssl.SSLCertVerificationError as error:
            why = f"its certificate is refused: {error.verify_message}"
        except ssl.SSLError as error:
            why = _reason(error)
        except OSError as error:
            why = f"it left during the TLS handshake: {error.strerror or error}"
        except asyncio.CancelledError:
            (secured or sock).close()
            raise
        else:
            admit(secured)
            return
        log.info("closing the connection from %s: %s", who, why)
        await _part(secured.detach() if secured is not None else sock)

    def close(self) -> None:
        """Give up those under way."""
        for task in self._tasks:
            task.cancel()


async def _part(sock: socket.socket) -> None:
    """Close a socket so that the other end can still read why: unread bytes would have the kernel drop it all."""
    loop = asyncio.get_running_loop()
    try:
        sock.shutdown(socket.SHUT_WR)
        async with asyncio.timeout(PART_S):
            for _ in range(16):
                if not await loop.sock_recv(sock, 4096):
                    break
    except (OSError, TimeoutError):
        pass
    finally:
        sock.close()


def _reason(error: ssl.SSLError) -> str:
    if "PEER_DID_NOT_RETURN_A_CERTIFICATE" in (error.reason or ""):
        return "it showed no certificate, and this pool asks its clients for one (tls.client_ca)"
    return explain(error)


def _shown(sock: socket.socket) -> str:
    try:
        host, port, *_ = sock.getpeername()
    except OSError:
        return "somebody who has left"
    return f"{host} port {port}"
