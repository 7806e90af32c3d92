"""One connection of a pool server: from its stream to the core, a bounded turn at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvrelay.pool.traffic import transport_of
from kvrelay.transport.payload import landing
from kvrelay.transport.stream import Stream
from kvrelay.wire import limits
from kvrelay.wire import messages as m

if TYPE_CHECKING:
    import socket

    from kvrelay.pool.server import PoolServer
    from kvrelay.transport.tls import TlsSocket
    from kvrelay.wire.payload import Payload

MAX_QUEUED_BYTES = 256 << 20
"""A connection with more than this unsent is not served until it takes its answers."""
MAX_QUEUED_MESSAGE_BYTES = 8 << 20
"""The same, of messages: objects' bytes are sent from the arena, these are kept until they have left."""
TURN_BYTES = 1 << 20
"""What is received, or sent, for one connection before the others have their turn."""
TURN_S = 0.005
"""For how long one connection's requests are handled before the others have their turn."""
LEAST_BYTES_S = 256 << 10
"""A payload takes room in the arena from its first byte on: it must come at this pace, all in all."""


class Peer:
    """Feeds the core, and is the `Handler` of its stream."""

    def __init__(self, server: PoolServer, number: int, sock: socket.socket | TlsSocket) -> None:
        self.server = server
        self.number = number
        self.stream: Stream[m.Request] = Stream(sock, m.AnyRequest, self, invalid=m.Invalid, scratch=server.scratch)
        self.stream.limit_messages(limits.MAX_HELLO_BYTES)
        self.transport = transport_of(sock)
        self.greeted = False
        self.writing = False
        self.reading = True
        self.closing = False
        self.progressed_at = self.heard_at = server.now()
        self.turn_began = 0.0
        self.recalled = False
        """Whether its next turn is due without new bytes."""
        self._begun_at = 0.0
        self._payload: Payload | None = None
        self._payload_bytes = 0

    @property
    def behind(self) -> bool:
        """Whether too much of its answers waits to be taken."""
        stream = self.stream
        return stream.queued_bytes > MAX_QUEUED_BYTES or stream.queued_message_bytes > MAX_QUEUED_MESSAGE_BYTES

    def is_late(self, now: float, grace_s: float) -> bool:
        """Whether a payload has been coming for ``grace_s`` longer than it may take."""
        return self._payload is not None and now - self._begun_at > grace_s + self._payload_bytes / LEAST_BYTES_S

    def on_message(self, message: m.Request, payload_bytes: int) -> Payload | None:
        """Hand a request to the core; say where its payload goes."""
        self.greeted = self.greeted or isinstance(message, m.Hello)
        core, now = self.server.core, self.server.now()
        if not payload_bytes or not isinstance(message, m.Write | m.Put):
            core.handle(self.number, message, now)
            self._handled(message, now)
            if isinstance(message, m.Hello) and core.is_known(self.number):
                self.stream.limit_messages(limits.MAX_BODY_BYTES)
            return None
        self._begun_at = now
        delivery = core.begin_payload(self.number, message, payload_bytes, now)
        if delivery is None:
            self._handled(message, now)
            return None
        self._payload_bytes = payload_bytes
        self._payload = landing(self.server.arena.view, *delivery)
        return self._payload

    def on_payload(self, message: m.Request) -> None:
        """Tell the core what arrived: it was checksummed on the way."""
        payload, self._payload = self._payload, None
        assert payload is not None
        self.server.traffic.received[self.transport] += self._payload_bytes
        self.server.core.finish_payload(self.number, message, payload.sums, self.server.now(), payload.trailer)
        self._handled(message, self._begun_at)

    def _handled(self, message: m.Request, began: float) -> None:
        self.server.perform()
        now = self.server.now()
        self.server.latencies.observe(type(message).__name__.lower(), now - began)
        self.stream.paused = self.behind or now - self.turn_began > TURN_S
