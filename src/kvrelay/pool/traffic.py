"""What a pool moved over its sockets, by transport."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvrelay.transport.tls import TlsSocket

TRANSPORTS = ("unix", "tcp", "tls")


class Traffic:
    """Payload bytes since the start. Bytes copied through shared memory pass no socket and are not in it."""

    def __init__(self) -> None:
        self.received: dict[str, int] = dict.fromkeys(TRANSPORTS, 0)
        self.sent: dict[str, int] = dict.fromkeys(TRANSPORTS, 0)


def transport_of(sock: socket.socket | TlsSocket) -> str:
    """Over which of `TRANSPORTS` a connection's bytes travel."""
    if not isinstance(sock, socket.socket):
        return "tls"
    return "unix" if sock.family == socket.AF_UNIX else "tcp"
