"""The bytes behind a message: where they lie, how far they have come, and their checksums as they pass.

A payload is moved by calls that may stop anywhere. With ``sums``, every buffer is hashed while the window of bytes that
has just arrived, or goes next, is still in the processor's cache; so bytes are not read from memory twice. Natively
where that is possible, else in Python: the choice is made here.
"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Protocol, cast

from kvrelay.native import native
from kvrelay.transport.pure_payload import PurePayload
from kvrelay.wire.payload import Payload

if TYPE_CHECKING:
    from collections.abc import Sequence

    from _typeshed import ReadableBuffer, WriteableBuffer

    from kvrelay.transport.tls import TlsSocket

SUM_WINDOW_BYTES = 256 << 10
"""What Python moves in one call when it is hashed: a part of the second-level cache."""
WINDOW_BYTES = 4 << 20
"""What it moves otherwise."""
_NOTHING = bytearray()


class _Native(Payload, Protocol):
    def move(self, descriptor: int, max_bytes: int, low_water: int, /) -> int: ...


class Payloads(Protocol):
    """What makes them: `kvrelay._native.Payload` and `PurePayload`."""

    def __call__(
        self,
        buffers: Sequence[ReadableBuffer],
        *,
        incoming: bool = False,
        sums: bool = False,
        trailer: bool = False,
    ) -> Payload:
        """Buffers, one behind the other. ``trailer``: their sums follow them, 8 bytes each."""

    def landing(
        self,
        buffer: WriteableBuffer,
        targets: Sequence[tuple[int | None, int]],
        offsets: ReadableBuffer,
        sizes: ReadableBuffer,
        trailer_bytes: int = 0,
    ) -> Payload:
        """What arrives for runs of one buffer.

        ``targets``: offset (None: the bytes are dropped) and size of each run, in order. ``offsets``, ``sizes``: u64
        columns of the pieces that the runs consist of, each with a sum of its own. ``trailer_bytes`` follow.
        """


payloads: Payloads = PurePayload if native is None else cast("Payloads", native.Payload)
"""What this process uses."""


def outgoing(buffers: Sequence[ReadableBuffer], *, sums: bool = False, trailer: bool = False) -> Payload:
    """A payload to send. ``sums``: hash it; ``trailer``: and send the sums behind it, 8 bytes a buffer."""
    return payloads(buffers, sums=sums, trailer=trailer)


def incoming(buffers: Sequence[WriteableBuffer], *, sums: bool = False) -> Payload:
    """A payload to receive into buffers. ``sums``: hash it."""
    return payloads(buffers, incoming=True, sums=sums)


def landing(
    buffer: WriteableBuffer,
    targets: Sequence[tuple[int | None, int]],
    offsets: ReadableBuffer,
    sizes: ReadableBuffer,
    trailer_bytes: int = 0,
) -> Payload:
    """A payload to receive into runs of one buffer; see `Payloads.landing`."""
    return payloads.landing(buffer, targets, offsets, sizes, trailer_bytes)


def dropping(size: int) -> Payload:
    """A payload that nobody wants."""
    return landing(_NOTHING, [(None, size)], b"", b"")


def move(payload: Payload, sock: socket.socket | TlsSocket, max_bytes: int, low_water: int = 0) -> int:
    """Move up to about ``max_bytes`` over a non-blocking socket; how many. 0 of an incoming one: the peer has closed.

    Fewer than there were: the socket has no more, or takes no more, for now. ``low_water``: a plain socket that has no
    more need not be readable again before it has so many bytes, or all that is left.

    Raises:
        BlockingIOError: none at all.
        OSError: the connection is broken.
    """
    if native is not None and isinstance(sock, socket.socket) and isinstance(payload, native.Payload):
        return cast("_Native", payload).move(sock.fileno(), max_bytes, low_water)
    plain = isinstance(payload, PurePayload) and not payload.is_summed
    moved = 0
    while moved < max_bytes and payload.left:
        window = payload.window(WINDOW_BYTES if plain else SUM_WINDOW_BYTES)
        try:
            count = sock.recvmsg_into(window)[0] if payload.incoming else sock.sendmsg(window)
        except BlockingIOError:
            if not moved:
                raise
            break
        if not count:
            break
        payload.advance(count)
        moved += count
    return moved
