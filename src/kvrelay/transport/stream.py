"""A non-blocking socket that moves frames: the one byte mover under the pool server and both clients.

Payloads are sent from, and received into, the buffers they belong to (the arena, a staging buffer): no intermediate
copy but for what arrived together with the message in front of it.
"""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from kvrelay.errors import PoolUnavailableError, ProtocolError
from kvrelay.transport import payload as payloads
from kvrelay.wire import frames
from kvrelay.wire.base import Message
from kvrelay.wire.scatter import MAX_VECTORS

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from kvrelay.transport.tls import TlsSocket
    from kvrelay.wire.payload import Payload

M = TypeVar("M", bound=Message)
M_contra = TypeVar("M_contra", bound=Message, contravariant=True)

SCRATCH_BYTES = 64 << 10
HEAD_BYTES = 16 << 10
"""What is received of a message whose size is not known: what comes of its payload with it is copied once more."""
REST_BYTES = 64 << 10
"""A payload that ends so soon behind a bound is moved whole: a turn, or a wake-up, of its own would cost more."""
MAX_TOGETHER = 64
"""Small frames sent by one system call."""
LOCAL_BUFFER_BYTES = 512 << 10
"""Socket buffers between processes of one host: what is under way stays in the processor's cache.

Left to itself, the kernel lets them grow to many megabytes, and a byte then travels through memory twice more.
Between hosts they must grow with the distance: there the kernel is left to itself.
"""
LOW_WATER_BYTES = 256 << 10
"""What a receiver amid a payload waits for: to be woken for every packet would cost both ends more than the bytes."""
MESSAGE_COST = 16
"""How much longer it takes, about, to act on a byte of messages than to receive a byte of payload."""
MAX_FDS = 4
KEEPALIVE = {socket.TCP_KEEPIDLE: 15, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3}
"""A peer whose host vanished is noticed after half a minute, not never."""
_FD_SPACE = socket.CMSG_SPACE(MAX_FDS * 4)


class Handler(Protocol[M_contra]):
    """Who gets what a stream receives."""

    def on_message(self, message: M_contra, payload_bytes: int) -> Payload | Sequence[memoryview] | None:
        """Take a message.

        When ``payload_bytes`` follow, return where they go (in order, exactly that many), or None to drop them.
        """

    def on_payload(self, message: M_contra) -> None:
        """Note that all payload bytes of ``message`` are where they belong."""


class _Nobody:
    """The handler of a closed stream."""

    def on_message(self, message: object, payload_bytes: int) -> None:
        """Drop it."""

    def on_payload(self, message: object) -> None:
        """Nobody waits for it."""


class _Outgoing:
    """One frame on its way out."""

    __slots__ = ("fds", "head", "head_bytes", "on_sent", "payload")

    def __init__(
        self, head: bytes, payload: Payload | None, fds: Sequence[int], on_sent: Callable[[], None] | None
    ) -> None:
        self.head = memoryview(head)
        """What is left of header and message."""
        self.head_bytes = len(head)
        self.payload = payload
        self.fds = fds
        self.on_sent = on_sent

    @property
    def left(self) -> int:
        """Bytes not sent yet."""
        return len(self.head) + (0 if self.payload is None else self.payload.left)

    def advance(self, count: int) -> None:
        """Note that ``count`` bytes have left."""
        size = len(self.head)
        if count <= size:
            self.head = self.head[count:]
            return
        assert self.payload is not None
        self.head = self.head[size:]
        self.payload.advance(count - size)


class Stream(Generic[M]):
    """Frames over ``sock``, which becomes non-blocking. ``kind``: the union of messages the peer may send.

    A `TlsSocket` is moved by its own ``sendmsg`` and ``recvmsg_into``, never by its descriptor.

    ``invalid``: see `FrameDecoder`. ``accept_fds``: take descriptors the peer sends along. ``scratch``: `SCRATCH_BYTES`
    that streams of one thread may share.

    The owner calls `flush` when the socket is writable and `receive` when it is readable, and closes the stream.
    """

    def __init__(
        self,
        sock: socket.socket | TlsSocket,
        kind: Any,
        handler: Handler[M],
        *,
        invalid: Callable[[int, str], M] | None = None,
        accept_fds: bool = False,
        scratch: memoryview | None = None,
    ) -> None:
        sock.setblocking(False)
        self._low_water = 0
        if sock.family in {socket.AF_INET, socket.AF_INET6}:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in KEEPALIVE.items():
                sock.setsockopt(socket.IPPROTO_TCP, option, value)
            if _is_loopback(sock):
                self._low_water = LOW_WATER_BYTES
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LOCAL_BUFFER_BYTES)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, LOCAL_BUFFER_BYTES)
        self.sock = sock
        self._pending: Callable[[], int] = getattr(sock, "pending", int)
        """What the socket has taken from the kernel and not given yet: with TLS, the rest of a record."""
        self._decoder: frames.FrameDecoder[M] = frames.FrameDecoder(kind, invalid)
        self._handler: Handler[M] = handler
        self._outgoing: deque[_Outgoing] = deque()
        self._scratch = memoryview(bytearray(SCRATCH_BYTES)) if scratch is None else scratch
        self._loose_bytes = 0
        """Of what was received last, those of a payload that came with its message."""
        self._incoming: M | None = None
        self._payload: Payload | None = None
        self.sated = False
        """Whether the last `receive` left off for its bound."""
        self._wanted = False
        """Whether the handler wants to hear of the incoming payload."""
        self._accept_fds = accept_fds
        self.received_fds: list[int] = []
        """Descriptors the peer sent, oldest first; whoever takes one out closes it."""
        self.queued_bytes = 0
        """Bytes waiting to be sent."""
        self.queued_message_bytes = 0
        """Of these, and of what has been sent of the first message, those of messages: they take memory."""
        self.paused = False
        """Set by the handler: no further message is handed on, nor received, until `resume`."""

    @property
    def amid_message(self) -> bool:
        """Whether a message has begun to arrive, and not all of it is there."""
        return self._incoming is not None or self._decoder.buffered > 0

    def limit_messages(self, max_body_bytes: int) -> None:
        """Refuse larger messages from the next on, before they are taken in."""
        self._decoder.max_body_bytes = max_body_bytes

    def fileno(self) -> int:
        """The socket's descriptor, -1 once closed."""
        return self.sock.fileno()

    def send(
        self,
        message: Message,
        payload: Payload | Sequence[memoryview] = (),
        *,
        sums_behind: bool = False,
        fds: Sequence[int] = (),
        on_sent: Callable[[], None] | None = None,
    ) -> None:
        """Queue a frame. ``on_sent`` is called when its last byte has left, or the stream is closed before.

        ``sums_behind``: the payload, a sequence of buffers, ends with their checksums, XXH3-64, u64 each.
        """
        outgoing: Payload | None = None
        payload_bytes = 0
        if payload:
            if isinstance(payload, Sequence):
                outgoing = payloads.outgoing(payload, sums=sums_behind, trailer=sums_behind)
            else:
                outgoing = payload
            payload_bytes = outgoing.left
        head = frames.encode(message, payload_bytes)
        self._outgoing.append(_Outgoing(head, outgoing if payload_bytes else None, fds, on_sent))
        self.queued_bytes += len(head) + payload_bytes
        self.queued_message_bytes += len(head)

    def flush(self, max_bytes: int = 1 << 62) -> bool:
        """Send as much as the socket takes, up to about ``max_bytes`` (`REST_BYTES`); whether nothing is left.

        Raises:
            PoolUnavailableError: the peer is gone.
        """
        try:
            while self._outgoing and max_bytes > 0:
                first = self._outgoing[0]
                if first.payload is None or first.head:
                    sent = self._send_heads()
                    self._sent(sent)
                    max_bytes -= sent
                    continue
                bound = _bound(first.payload, max_bytes)
                sent = payloads.move(first.payload, self.sock, bound)
                self._sent(sent, moved=True)
                if sent < bound and first.payload.left:
                    return False  # the socket takes no more
                max_bytes -= sent
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as error:
            raise PoolUnavailableError(f"connection lost while sending: {error}") from error
        return not self._outgoing

    def _send_heads(self) -> int:
        """Send messages, and small payloads with them: what is queued one behind the other leaves together."""
        first = self._outgoing[0]
        if first.fds:
            assert isinstance(self.sock, socket.socket)
            sent = socket.send_fds(self.sock, [first.head], list(first.fds))
            first.fds = ()
            return sent
        window: list[memoryview] = []
        more = False
        for frame in islice(self._outgoing, MAX_TOGETHER):
            if frame.fds:
                break
            window.append(frame.head)
            if frame.payload is not None:
                more = frame.left > SCRATCH_BYTES
                if more:
                    break
                pieces = frame.payload.window(SCRATCH_BYTES)
                window += pieces
                if len(window) > MAX_TOGETHER or sum(piece.nbytes for piece in pieces) < frame.payload.left:
                    break
        del window[MAX_VECTORS:]
        if more and isinstance(self.sock, socket.socket):
            return self.sock.sendmsg(window, (), socket.MSG_MORE)
        return self.sock.sendmsg(window)

    def _sent(self, count: int, *, moved: bool = False) -> None:
        """Note that ``count`` bytes have left. ``moved``: the first frame's payload knows."""
        self.queued_bytes -= count
        while self._outgoing:
            first = self._outgoing[0]
            if not moved:
                step = min(count, first.left)
                first.advance(step)
                count -= step
            if first.left:
                return
            self._outgoing.popleft()
            self.queued_message_bytes -= first.head_bytes
            if first.on_sent is not None:
                first.on_sent()
            if moved:
                return

    def receive(self, max_bytes: int = 8 << 20, *, until_empty: bool = True) -> bool:
        """Read what is there, up to about ``max_bytes`` (`REST_BYTES`), and hand it on; False when the peer has closed.

        Bytes of messages count `MESSAGE_COST` times, those of payloads once. `sated` tells whether it stopped for the
        bound: there may be more then, and an event loop that saw the connection break wakes for it only once. For such
        a loop it reads until the socket says that it has no more, since the end of the connection may be behind a short
        read; without ``until_empty``, for who polls again, a short read is enough.

        Raises:
            PoolUnavailableError: the connection broke.
            ProtocolError: the peer broke the protocol.
        """
        self.sated = False
        while (max_bytes > 0 or self._pending()) and not self.paused and self.sock.fileno() >= 0:
            try:
                payload = self._payload
                if payload is None:
                    asked = self._scratch_bytes
                    got = self._receive_scratch(asked)
                    max_bytes -= MESSAGE_COST * (got - self._loose_bytes) + self._loose_bytes
                else:
                    asked = min(_bound(payload, max(max_bytes, 1)), payload.left)
                    got = self._receive_payload(payload, asked)
                    max_bytes -= got
            except (BlockingIOError, InterruptedError):
                return True
            except OSError as error:
                raise PoolUnavailableError(f"connection lost while receiving: {error}") from error
            if not got:
                return False
            if got < asked and not until_empty and not self._pending():
                return True
        self.sated = max_bytes <= 0
        return True

    def resume(self) -> None:
        """Hand on what arrived before the handler paused. Errors as for `receive`."""
        self.paused = False
        self._dispatch()

    def _receive_payload(self, payload: Payload, max_bytes: int) -> int:
        got = payloads.move(payload, self.sock, max_bytes, self._low_water)
        if got:
            self._decoder.skip(got)
            self._finish_payload()
            self._dispatch()
        return got

    @property
    def _scratch_bytes(self) -> int:
        """How much to receive of messages: all that is missing of one whose size is known."""
        return min(max(self._decoder.missing, HEAD_BYTES), SCRATCH_BYTES)

    def _receive_scratch(self, max_bytes: int) -> int:
        self._loose_bytes = 0
        scratch = self._scratch[:max_bytes]
        if self._accept_fds:
            got, ancillary, _, _ = self.sock.recvmsg_into([scratch], _FD_SPACE, socket.MSG_CMSG_CLOEXEC)
            for level, kind, data in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    whole = len(data) - len(data) % 4
                    self.received_fds += memoryview(data)[:whole].cast("i").tolist()
        else:
            got = self.sock.recv_into(scratch)
        if got:
            self._decoder.feed(scratch[:got])
            self._dispatch()
        return got

    def _dispatch(self) -> None:
        """Hand on everything that is complete."""
        while self._incoming is None or self._drain_buffered():
            if self.paused or self.sock.fileno() < 0:
                return
            frame = self._decoder.next()
            if frame is None:
                return
            targets = self._handler.on_message(frame.message, frame.payload_bytes)
            if not frame.payload_bytes:
                continue
            self._incoming = frame.message
            self._wanted = targets is not None
            if targets is None:
                self._payload = payloads.dropping(frame.payload_bytes)
            else:
                self._payload = payloads.incoming(targets) if isinstance(targets, Sequence) else targets
            if self._payload.left != frame.payload_bytes:
                raise ProtocolError(
                    f"a {type(frame.message).__name__} message came with {frame.payload_bytes} payload bytes, "
                    f"not the {self._payload.left} it describes"
                )

    def _drain_buffered(self) -> bool:
        """Move payload bytes that arrived with the message; whether the payload is complete."""
        assert self._payload is not None
        while self._payload.left and self._decoder.buffered:
            taken = self._decoder.take(self._scratch)
            self._payload.fill(self._scratch[:taken])
            self._loose_bytes += taken
        return self._finish_payload()

    def _finish_payload(self) -> bool:
        message = self._incoming
        if self._decoder.payload_left or message is None:
            return message is None
        self._incoming = self._payload = None
        if self._wanted:
            self._handler.on_payload(message)
        return True

    def close(self) -> None:
        """Close the socket and drop what is queued, calling every ``on_sent``. May be called twice.

        The handler hears no more, and is let go of: it and the stream would otherwise keep each other, and the stream's
        buffers, until the next search for cycles, which a pool puts off for long.
        """
        self.sock.close()
        self._handler = _Nobody()
        outgoing, self._outgoing = self._outgoing, deque()
        self._payload = None
        self.queued_bytes = self.queued_message_bytes = 0
        for frame in outgoing:
            if frame.on_sent is not None:
                frame.on_sent()
        for fd in self.received_fds:
            os.close(fd)
        self.received_fds = []


def _bound(payload: Payload, max_bytes: int) -> int:
    """How much of a payload to move where about ``max_bytes`` may be."""
    return max_bytes if payload.left > max_bytes + REST_BYTES else max(max_bytes, payload.left)


def _is_loopback(sock: socket.socket | TlsSocket) -> bool:
    """Whether the other end is on this host, and was reached as such."""
    try:
        host = sock.getpeername()[0]
    except OSError:  # it has left already
        return False
    return bool(host == "::1" or host.startswith(("127.", "::ffff:127.")))
