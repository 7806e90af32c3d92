"""TLS on a pool's TCP connections: a handshake that never blocks, and a socket that `Stream` can move.

`TlsSocket` has the calls of a socket that `Stream` makes, ``sendmsg`` and ``recvmsg_into`` among them. What differs
under it: TLS cuts the bytes into records of up to 16 KiB, so part of one may have been decrypted and not asked for yet
while the socket itself has nothing to read; `TlsSocket.pending` tells. TLS 1.3 only: both ends are ours.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from kvrelay.errors import PoolUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

RECORD_BYTES = 16 << 10
"""What one TLS record holds at most."""
MAX_MOVED_BYTES = 1 << 20
"""What one call moves at most, in either direction."""
_PLAIN = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG")
_ALERTS = {
    "CERTIFICATE_REQUIRED": "the pool asks its clients for a certificate: give cert and key",
    "ALERT_UNKNOWN_CA": "the pool does not know who signed this client's certificate: give one its client_ca signed",
    "ALERT_BAD_CERTIFICATE": "the pool refused this client's certificate",
    "ALERT_CERTIFICATE_EXPIRED": "this client's certificate has expired: renew it",
    "ALERT_DECRYPT_ERROR": "the pool refused this client's certificate",
}


class TlsConfig(Struct, frozen=True, kw_only=True):
    """How a client speaks TLS. Paths of PEM files."""

    ca: str | None = None
    """Authorities a pool's certificate must come from; None: those of the system."""
    cert: str | None = None
    """The client's own certificate chain, where the pool asks for one."""
    key: str | None = None
    """Its private key; None: it is in ``cert``."""
    server_name: str | None = None
    """The name in the pool's certificate; None: the host of its address."""


class TlsSocket:
    """A connected socket that speaks TLS, with the calls that `Stream` makes of a socket.

    `recvmsg_into` and `sendmsg` raise BlockingIOError where a socket would, and OSError with a reason in words where
    TLS fails.
    """

    def __init__(self, context: ssl.SSLContext, sock: socket.socket, *, server_hostname: str | None = None) -> None:
        """Take ``sock`` over; ``server_hostname``: this is the client's side, and whom it expects there."""
        self._sock = context.wrap_socket(
            sock,
            server_side=server_hostname is None,
            server_hostname=server_hostname,
            do_handshake_on_connect=False,
        )
        self.family = self._sock.family
        self._stuck = 0
        """Bytes of the record that waits for room in the socket: OpenSSL must be given the same ones again."""

    def fileno(self) -> int:
        """The socket's descriptor, -1 once closed."""
        return self._sock.fileno()

    def setblocking(self, flag: bool) -> None:
        """As of a socket."""
        self._sock.setblocking(flag)

    def settimeout(self, timeout_s: float | None) -> None:
        """As of a socket."""
        self._sock.settimeout(timeout_s)

    def setsockopt(self, level: int, option: int, value: int) -> None:
        """As of a socket."""
        self._sock.setsockopt(level, option, value)

    def getpeername(self) -> Any:
        """As of a socket."""
        return self._sock.getpeername()

    def shutdown(self, how: int) -> None:
        """As of a socket: without a word of TLS."""
        self._sock.shutdown(how)

    def detach(self) -> socket.socket:
        """Give the socket back as it was: what is said on it from here is not TLS."""
        return socket.socket(fileno=self._sock.detach())

    def close(self) -> None:
        """Close the socket. The other end sees the end of the stream; frames tell it whether that was amid one."""
        self._sock.close()

    def do_handshake(self) -> None:
        """Take the handshake as far as it goes. Raises ssl.SSLWantReadError or SSLWantWriteError where it waits."""
        self._sock.do_handshake()

    def peer_names(self) -> list[str]:
        """The common name and the DNS names in the other end's certificate; none where it showed none."""
        shown: Any = self._sock.getpeercert() or {}
        names = [value for part in shown.get("subject", ()) for kind, value in part if kind == "commonName"]
        return names + [value for kind, value in shown.get("subjectAltName", ()) if kind == "DNS"]

    def pending(self) -> int:
        """Bytes decrypted and not taken yet: the socket need not become readable for them."""
        return self._sock.pending()

    def recv_into(self, buffer: memoryview) -> int:
        """Receive up to one record's bytes; 0 at the end of the stream."""
        try:
            return self._sock.recv_into(buffer)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None
        except ssl.SSLError as error:
            raise OSError(explain(error)) from error

    def recvmsg_into(
        self, buffers: Sequence[memoryview], _ancillary_bytes: int = 0, _flags: int = 0
    ) -> tuple[int, list[Any], int, None]:
        """Fill ``buffers`` in order, as far as there is something; descriptors never come this way."""
        moved = 0
        try:
            for buffer in buffers:
                at = 0
                while at < buffer.nbytes and moved < MAX_MOVED_BYTES:
                    got = self.recv_into(buffer[at:])
                    if not got:
                        return moved, [], 0, None
                    at += got
                    moved += got
        except BlockingIOError:
            if not moved:
                raise
        return moved, [], 0, None

    def sendmsg(self, buffers: Sequence[memoryview]) -> int:
        """Send from ``buffers`` in order, as far as the socket takes it; how many bytes.

        After a BlockingIOError the next call begins with the same bytes, as it does of anybody who sends a stream.
        """
        moved = 0
        records = _Records(buffers)
        try:
            while moved < MAX_MOVED_BYTES and (record := records.take(self._stuck or RECORD_BYTES)):
                self._stuck = len(record)
                sent = self._sock.send(record)
                self._stuck = 0
                records.advance(sent)
                moved += sent
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            if not moved:
                raise BlockingIOError from None
        except OSError as error:
            raise self._last_words(error) from error
        return moved

    def _last_words(self, error: OSError) -> OSError:
        """Why the other end takes nothing any more: what it sent before it closed, rather than that it closed."""
        try:
            self._sock.recv(1)
        except ssl.SSLError as alert:
            if not isinstance(alert, ssl.SSLWantReadError | ssl.SSLWantWriteError):
                return OSError(explain(alert))
        except OSError:
            pass
        return OSError(explain(error)) if isinstance(error, ssl.SSLError) else error


class _Records:
    """Cuts a sequence of buffers into records; small buffers travel in one."""

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        self._buffers = buffers
        self._index = 0
        self._at = 0

    def take(self, size: int) -> memoryview | bytes:
        """The next ``size`` bytes, fewer at the end."""
        buffers, index = self._buffers, self._index
        if index == len(buffers):
            return b""
        first = buffers[index][self._at : self._at + size]
        if first.nbytes == size or index + 1 == len(buffers):
            return first
        pieces, left = [first], size - first.nbytes
        for buffer in buffers[index + 1 :]:
            pieces.append(buffer[:left])
            left -= pieces[-1].nbytes
            if not left:
                break
        return b"".join(pieces)

    def advance(self, count: int) -> None:
        """Go past ``count`` bytes."""
        self._at += count
        while self._index < len(self._buffers) and self._at >= self._buffers[self._index].nbytes:
            self._at -= self._buffers[self._index].nbytes
            self._index += 1


async def shake_hands(sock: TlsSocket) -> None:
    """Do the handshake on a non-blocking socket, without blocking the loop. The caller sets a time limit.

    Raises:
        OSError: it failed (ssl.SSLError among them).
    """
    loop = asyncio.get_running_loop()
    while True:
        watch: Callable[..., None]
        try:
            sock.do_handshake()
        except ssl.SSLWantReadError:
            watch, ignore = loop.add_reader, loop.remove_reader
        except ssl.SSLWantWriteError:
            watch, ignore = loop.add_writer, loop.remove_writer
        else:
            return
        ready: asyncio.Future[None] = loop.create_future()
        descriptor = sock.fileno()
        watch(descriptor, _settle, ready)
        try:
            await ready
        finally:
            ignore(descriptor)


def _settle(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)


def refused(address: str, error: OSError) -> PoolUnavailableError:
    """The error of a client whose handshake failed, in words."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return PoolUnavailableError(
            f"the certificate of the pool at {address} is not accepted: {error.verify_message}; "
            "give the ca that signed it, and connect to a name or address that it names (or give server_name)"
        )
    if isinstance(error, ssl.SSLError):
        return PoolUnavailableError(f"no TLS with {address}: {explain(error)}")
    return PoolUnavailableError(
        f"no TLS with {address}: the other end closed the connection ({error.strerror or error}); "
        "if the pool serves without TLS, use tcp:HOST:PORT"
    )


def reason_of(error: OSError | ValueError) -> str:
    """The shortest that says what an error was."""
    if isinstance(error, ssl.SSLError):
        return (error.reason or str(error.args[-1])).replace("_", " ").lower()
    return getattr(error, "strerror", None) or str(error)


def does_not_speak(error: ssl.SSLError) -> bool:
    """Whether the other end answered something else than TLS."""
    return any(name in (error.reason or "") for name in _PLAIN)


def explain(error: ssl.SSLError) -> str:
    """What an error of TLS means, in words."""
    reason = error.reason or str(error)
    for name, words in _ALERTS.items():
        if name in reason:
            return words
    if does_not_speak(error):
        return (
            "the other end does not speak TLS: connect with tls:HOST:PORT to a pool with TLS, tcp:HOST:PORT to others"
        )
    if "UNEXPECTED_EOF" in reason:
        return "the other end closed the connection; if the pool serves without TLS, use tcp:HOST:PORT"
    return reason_of(error)
