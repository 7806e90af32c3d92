"""The frame decoder fed a byte stream in pieces, as the shells feed it: for property tests and for fuzzing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from kvrelay.errors import ProtocolError
from kvrelay.wire import limits
from kvrelay.wire import messages as m
from kvrelay.wire.frames import FrameDecoder

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvrelay.wire.base import Message


class Decoded(NamedTuple):
    """What came of a stream: whole frames with their payloads, the bytes of an unfinished payload, the error."""

    frames: list[tuple[Message, bytes]]
    unfinished: int
    error: str | None


def decode(kind: Any, pieces: Iterable[bytes], *, stand_in: bool) -> Decoded:
    """Decode a stream that arrives in ``pieces``. ``stand_in``: requests that break a bound become `Invalid`.

    Checks on the way what a decoder must keep whatever it is fed: it holds no more than one body and what arrived, an
    error stays, and no other exception than `ProtocolError` leaves it.
    """
    decoder: FrameDecoder[Any] = FrameDecoder(kind, m.Invalid if stand_in else None)
    frames: list[tuple[Message, bytes]] = []
    message: Message | None = None
    payload = bytearray()
    for piece in pieces:
        decoder.feed(piece)
        try:
            while True:
                if message is None:
                    frame = decoder.next()
                    if frame is None:
                        break
                    message = frame.message
                    if frame.payload_bytes > limits.MAX_PAYLOAD_BYTES:
                        raise AssertionError(f"a payload of {frame.payload_bytes} bytes was let through")
                scratch = memoryview(bytearray(min(decoder.payload_left, decoder.buffered)))
                taken = decoder.take(scratch)
                payload += scratch[:taken]
                if decoder.payload_left:
                    break
                frames.append((message, bytes(payload)))
                message, payload = None, bytearray()
        except ProtocolError as error:
            _must_stay(decoder, str(error))
            return Decoded(frames, len(payload), str(error))
        if decoder.buffered > limits.HEADER_BYTES + limits.MAX_BODY_BYTES + len(piece):
            raise AssertionError(f"the decoder holds {decoder.buffered} bytes")
    return Decoded(frames, len(payload), None)


def _must_stay(decoder: FrameDecoder[Any], error: str) -> None:
    try:
        decoder.next()
    except ProtocolError as again:
        if str(again) == error:
            return
    raise AssertionError(f"after {error!r} the decoder went on")


def cut(stream: bytes, sizes: Sequence[int]) -> list[bytes]:
    """A stream in pieces of ``sizes`` bytes, used again and again; whole if there are none."""
    if not sizes:
        return [stream]
    pieces: list[bytes] = []
    at = index = 0
    while at < len(stream):
        pieces.append(stream[at : at + sizes[index % len(sizes)]])
        at += sizes[index % len(sizes)]
        index += 1
    return pieces


def check(stream: bytes, sizes: Sequence[int]) -> None:
    """Decode a stream whole and in pieces, as requests and as replies: how it was cut must make no difference.

    Raises:
        AssertionError: it did, or the decoder broke one of its promises.
    """
    for kind, stand_in in ((m.AnyRequest, True), (m.AnyRequest, False), (m.AnyReply, False)):
        whole = decode(kind, [stream], stand_in=stand_in)
        pieces = decode(kind, cut(stream, sizes), stand_in=stand_in)
        if whole != pieces:
            raise AssertionError(f"whole: {whole}\nin pieces of {sizes}: {pieces}")
