"""Finding out that a peer's machine is gone while neither side has anything to say.

A prefill may take minutes in which no byte moves. A process that dies is known at once, since its kernel closes the
connection; a machine that loses its power or its network says nothing, and the connection would look well for ever.
"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio

IDLE_S, INTERVAL_S, PROBES = 15, 5, 3
"""A peer that is gone is noticed after ``IDLE_S + PROBES * INTERVAL_S`` seconds without a word."""


def keep_watch(transport: asyncio.BaseTransport) -> None:
    """Let the kernel ask the peer now and then whether it is still there."""
    sock = transport.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", IDLE_S), ("TCP_KEEPINTVL", INTERVAL_S), ("TCP_KEEPCNT", PROBES)):
        if hasattr(socket, name):  # not on every system
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
