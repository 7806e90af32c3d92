"""Finding out that a peer is gone that says nothing: its machine lost its power, or its network.

A process that ends is known at once, since its kernel closes the connection. A machine that vanishes looks well for
ever. While nothing is on its way to it, the kernel asks now and then whether it is there (TCP keepalive). While
something is, it does not ask: it sends that again, less and less often, and gives up after a quarter of an hour. So we
look ourselves at what the peer has acknowledged. The kernel's own limit (TCP_USER_TIMEOUT) cannot be used: it
also ends connections whose peer answers but reads nothing for that long, and it replaces keepalive's limit.
"""

from __future__ import annotations

import socket
import struct
from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    import asyncio

IDLE_S, INTERVAL_S, PROBES = 15, 5, 3
GONE_S = float(IDLE_S + PROBES * INTERVAL_S)
"""A peer that is gone is noticed after so long without a word."""
LOOK_S = 5.0
"""Between two looks at a peer that is being written to."""
_TCP_INFO = struct.Struct("=24xI28xI60xQ16xI4x")
"""Of Linux' ``struct tcp_info``: unacked, last_ack_recv, bytes_acked, notsent_bytes."""


class Sent(Struct, frozen=True):
    """How what was written to a peer stands."""

    unacked: int
    """Segments that are on their way."""
    last_ack_s: float
    """Since the peer last acknowledged anything."""
    acked_bytes: int
    unsent_bytes: int
    """What the kernel holds back: the peer has no room for it, or the network is busy."""


def sent_by(sock: socket.socket) -> Sent | None:
    """How it stands; None where the kernel does not tell."""
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
        unacked, last_ack_ms, acked_bytes, unsent_bytes = _TCP_INFO.unpack(info)
    except (OSError, ValueError, AttributeError, struct.error):  # closed (ValueError: uvloop's), not Linux, before 4.6
        return None
    return Sent(unacked, last_ack_ms / 1000, acked_bytes, unsent_bytes)


class Watch:
    """Over one connection's peer, from look to look. Times in seconds on one clock."""

    __slots__ = ("_acked_bytes", "_since", "pending", "silent_s", "stuck_s")

    def __init__(self, now: float) -> None:
        """Nothing was written yet."""
        self._acked_bytes = 0
        self._since = now
        self.pending = False
        """Whether the peer has yet to acknowledge, or to make room for, something."""
        self.stuck_s = 0.0
        """How long it has acknowledged nothing of that: it may still answer that it has no room."""
        self.silent_s = 0.0
        """How long it has not answered at all to what is on its way."""

    def look(self, sent: Sent, now: float) -> None:
        """Note how things stand."""
        before, self.pending = self.pending, bool(sent.unacked or sent.unsent_bytes)
        if not (before and self.pending and sent.acked_bytes == self._acked_bytes):
            self._acked_bytes, self._since = sent.acked_bytes, now
        self.stuck_s = now - self._since
        self.silent_s = min(self.stuck_s, sent.last_ack_s) if sent.unacked else 0.0


def keep_alive(transport: asyncio.BaseTransport) -> None:
    """Let the kernel ask the peer now and then whether it is still there, while nothing is on its way to it."""
    sock = transport.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", IDLE_S), ("TCP_KEEPINTVL", INTERVAL_S), ("TCP_KEEPCNT", PROBES)):
        if hasattr(socket, name):  # not on every system
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
