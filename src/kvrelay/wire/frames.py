"""Frames: how messages and the raw bytes behind them travel.

A frame is a 16-byte header, a body (one msgpack message) and a payload (raw bytes, possibly none)::

    offset  size  field
    0       2     magic, b"KV"
    2       1     frame format, 1
    3       1     flags, 0
    4       4     body length, little-endian
    8       8     payload length, little-endian

The decoder is fed whatever arrived and never holds more than one body: the payload goes past it, straight to where it
belongs, so that a peer which announces a gigabyte makes nobody allocate one.
"""

from __future__ import annotations

import operator
import struct
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar, get_args

import msgspec
from msgspec import Struct

from kvrelay.errors import BadRequestError, ProtocolError
from kvrelay.wire import limits
from kvrelay.wire.base import Id, Message

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

MAGIC = b"KV"
FORMAT = 1
_HEADER = struct.Struct("<2sBBIQ")

M = TypeVar("M", bound=Message)


def _plain(value: Any) -> object:
    """What a value of another library's number or bytes type is. TypeError, ValueError: it is none."""
    if isinstance(value, bytes):
        return bytes(value)
    return operator.index(value) if hasattr(value, "__index__") else float(value)


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)


def encode(message: Message, payload_bytes: int = 0) -> bytes:
    """Header and body of a frame whose payload, ``payload_bytes`` long, the caller sends right behind.

    Raises:
        BadRequestError: it is over the limits of a frame, or holds what cannot be encoded.
    """
    try:
        body = _encoder.encode(message)
    except (TypeError, ValueError, OverflowError) as error:
        raise BadRequestError(f"a {type(message).__name__} message cannot be sent: {error}") from None
    if len(body) > limits.MAX_BODY_BYTES:
        raise BadRequestError(
            f"a {type(message).__name__} message of {len(body)} bytes is over the limit of {limits.MAX_BODY_BYTES}: "
            "send fewer keys or parts at once"
        )
    if payload_bytes > limits.MAX_PAYLOAD_BYTES:
        raise BadRequestError(
            f"a payload of {payload_bytes} bytes is over the limit of {limits.MAX_PAYLOAD_BYTES}: send less at once"
        )
    return _HEADER.pack(MAGIC, FORMAT, 0, len(body), payload_bytes) + body


class Frame(NamedTuple, Generic[M]):
    """A decoded message and how many payload bytes follow it."""

    message: M
    payload_bytes: int


class _Envelope(Struct, array_like=True):
    """What every message begins with."""

    tag: str
    id: Id


_open_envelope = msgspec.msgpack.Decoder(_Envelope).decode


class FrameDecoder(Generic[M]):
    """Turns a byte stream into messages of ``kind`` (a union of message classes).

    ``invalid`` makes the message that stands for one of ``kind`` whose content breaks a bound, from its id and what is
    wrong: the stream is sound and goes on. Without it, that is a protocol error as well.

    After `next` returned a frame with a payload, its bytes must be consumed, by `take` (those already fed) and `skip`
    (those the caller received elsewhere), before `next` is called again. After an error every call raises it again.
    """

    def __init__(self, kind: Any, invalid: Callable[[int, str], M] | None = None) -> None:
        self._decode = msgspec.msgpack.Decoder(kind).decode
        self._invalid = invalid
        self._tags = {message.__struct_config__.tag for message in get_args(kind)}
        self._buffer = bytearray()
        self._start = 0
        self._body_bytes: int | None = None
        self._announced_payload = 0
        self._failure: str | None = None
        self.max_body_bytes = limits.MAX_BODY_BYTES
        """Larger messages are refused before they are taken in."""
        self.payload_left = 0
        """Payload bytes of the current frame not consumed yet."""

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        """Append what arrived."""
        if self._start:
            del self._buffer[: self._start]
            self._start = 0
        self._buffer += data

    @property
    def buffered(self) -> int:
        """Bytes fed and not consumed yet."""
        return len(self._buffer) - self._start

    @property
    def missing(self) -> int:
        """Bytes to come of a message whose header is there; 0 if there is none."""
        return 0 if self._body_bytes is None else self._body_bytes - self.buffered

    def next(self) -> Frame[M] | None:
        """The next message, or None until more is fed.

        Raises:
            ProtocolError: the stream is not our protocol, or breaks its limits.
        """
        if self._failure is not None:
            raise ProtocolError(self._failure)
        if self.payload_left:
            raise RuntimeError(f"next() with {self.payload_left} payload bytes not consumed")
        try:
            return self._next()
        except ProtocolError as error:
            self._failure = str(error)
            raise

    def _next(self) -> Frame[M] | None:
        if self._body_bytes is None:
            if self.buffered < limits.HEADER_BYTES:
                return None
            self._read_header()
        body_bytes = self._body_bytes
        assert body_bytes is not None
        if self.buffered < body_bytes:
            return None
        body = memoryview(self._buffer)[self._start : self._start + body_bytes]
        try:
            message: M = self._decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            message = self._stand_in(body, error)
        finally:
            body.release()
        self._start += body_bytes
        self._body_bytes = None
        self.payload_left = self._announced_payload
        return Frame(message, self._announced_payload)

    def _stand_in(self, body: memoryview, error: Exception) -> M:
        if self._invalid is not None and isinstance(error, msgspec.ValidationError):
            try:
                envelope = _open_envelope(body)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                pass
            else:
                if envelope.tag in self._tags:
                    return self._invalid(envelope.id, f"{envelope.tag}: {error}")
        raise ProtocolError(f"undecodable message of {body.nbytes} bytes: {error}") from None

    def _read_header(self) -> None:
        magic, frame_format, flags, body_bytes, payload_bytes = _HEADER.unpack_from(self._buffer, self._start)
        if magic != MAGIC:
            raise ProtocolError(f"not a kvrelay peer: the stream starts with {magic!r}, not {MAGIC!r}")
        if frame_format != FORMAT:
            raise ProtocolError(f"frame format {frame_format} is not {FORMAT}: the peer is of another kvrelay version")
        if flags:
            raise ProtocolError(f"unknown frame flags {flags:#04x}")
        if not 0 < body_bytes <= self.max_body_bytes:
            raise ProtocolError(f"a message of {body_bytes} bytes: legal are 1 to {self.max_body_bytes}")
        if payload_bytes > limits.MAX_PAYLOAD_BYTES:
            raise ProtocolError(f"a payload of {payload_bytes} bytes: legal are 0 to {limits.MAX_PAYLOAD_BYTES}")
        self._start += limits.HEADER_BYTES
        self._body_bytes = body_bytes
        self._announced_payload = payload_bytes

    def take(self, into: memoryview) -> int:
        """Copy payload bytes that were fed already into ``into``; how many."""
        count = min(len(into), self.payload_left, self.buffered)
        if count:
            with memoryview(self._buffer) as buffer, buffer[self._start : self._start + count] as piece:
                into[:count] = piece
            self._start += count
            self.payload_left -= count
        return count

    def skip(self, count: int) -> None:
        """Account for ``count`` payload bytes that the caller received itself."""
        if not 0 <= count <= self.payload_left:
            raise RuntimeError(f"skip({count}) with {self.payload_left} payload bytes left")
        self.payload_left -= count
