from __future__ import annotations

import struct
import tracemalloc
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.errors import BadRequestError, ProtocolError
from kvrelay.wire import limits
from kvrelay.wire import messages as m
from kvrelay.wire.frames import FrameDecoder, encode

if TYPE_CHECKING:
    from kvrelay.wire.base import Message

HEADER = struct.Struct("<2sBBIQ")


def decoder() -> FrameDecoder[m.Request]:
    return FrameDecoder(m.AnyRequest)


REQUESTS = [
    m.Hello(1, [1], "somebody", "secret"),
    m.Announce(2, "group", [m.Spec(b"k" * 32, 4096, 2, 4)], 3.0, "ticket"),
    m.Write(3, [m.Part(7, 0, [1, 2**64 - 1])]),
    m.Match(4, [b"a", b"b"], 1.5),
    m.Stat(5),
]


@given(st.lists(st.sampled_from(REQUESTS), max_size=8), st.integers(0, 300), st.randoms(use_true_random=False))
def test_messages_survive_any_fragmentation(requests: list[m.Request], payload: int, random: object) -> None:
    stream = b"".join(encode(r, payload) + b"p" * payload for r in requests)
    subject = decoder()
    seen: list[m.Request] = []
    sink = memoryview(bytearray(64))
    at = 0
    while at < len(stream):
        step = random.randint(1, 80)  # type: ignore[attr-defined]
        subject.feed(stream[at : at + step])
        at += step
        while True:
            while subject.payload_left and subject.take(sink):
                assert bytes(sink[:1]) == b"p"
            if subject.payload_left:
                break
            frame = subject.next()
            if frame is None:
                break
            assert frame.payload_bytes == payload
            seen.append(frame.message)
    assert seen == requests


@given(st.binary(max_size=200))
def test_garbage_ends_in_a_protocol_error_or_waits_for_more(data: bytes) -> None:
    subject = decoder()
    subject.feed(data)
    failed = None
    try:
        while subject.next() is not None:
            subject.skip(subject.payload_left)
    except ProtocolError as error:
        failed = str(error)
    if failed is not None:
        with pytest.raises(ProtocolError) as again:
            subject.next()
        assert str(again.value) == failed


@given(st.sampled_from(REQUESTS), st.integers(0), st.binary(min_size=1, max_size=4))
def test_a_damaged_frame_is_an_error_or_another_valid_message(request: m.Request, place: int, damage: bytes) -> None:
    frame = bytearray(encode(request))
    place %= len(frame)
    frame[place : place + len(damage)] = damage
    subject = decoder()
    subject.feed(frame)
    try:
        decoded = subject.next()
    except ProtocolError:
        return
    assert decoded is None or isinstance(decoded.message, m.Request)


@pytest.mark.parametrize(
    ("magic", "version", "flags", "body", "payload", "named"),
    [
        (b"HT", 1, 0, 10, 0, "not a kvrelay peer"),
        (b"KV", 2, 0, 10, 0, "frame format 2"),
        (b"KV", 1, 1, 10, 0, "flags"),
        (b"KV", 1, 0, 0, 0, "message of 0 bytes"),
        (b"KV", 1, 0, limits.MAX_BODY_BYTES + 1, 0, str(limits.MAX_BODY_BYTES)),
        (b"KV", 1, 0, 10, limits.MAX_PAYLOAD_BYTES + 1, str(limits.MAX_PAYLOAD_BYTES)),
    ],
)
def test_a_bad_header_is_refused_by_name(
    magic: bytes, version: int, flags: int, body: int, payload: int, named: str
) -> None:
    subject = decoder()
    subject.feed(HEADER.pack(magic, version, flags, body, payload))
    with pytest.raises(ProtocolError, match=named):
        subject.next()


def test_an_announced_length_allocates_nothing() -> None:
    subject = decoder()
    tracemalloc.start()
    try:
        subject.feed(HEADER.pack(b"KV", 1, 0, limits.MAX_BODY_BYTES, limits.MAX_PAYLOAD_BYTES))
        assert subject.next() is None
        assert tracemalloc.get_traced_memory()[1] < 64 << 10
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "request_",
    [
        m.Match(1, [b"k" * (limits.MAX_KEY_BYTES + 1)]),
        m.Match(1, []),
        m.Match(1, [b""]),
        m.Match(1, [b"k"], limits.MAX_LEASE_S * 2),
        m.Match(1, [b"k"], float("nan")),
        m.Announce(1, "", [m.Spec(b"k", 1)], 1.0),
        m.Announce(1, "g", [m.Spec(b"k", 0)], 1.0),
        m.Announce(1, "g", [m.Spec(b"k", 1, 0)], 1.0),
        m.Announce(1, "g", [m.Spec(b"k", limits.MAX_OBJECT_BYTES + 1)], 1.0),
        m.Read(1, 1, [m.Range(0, 0, 0)]),
        m.Post(1, "t", b"n" * (limits.MAX_NOTE_BYTES + 1)),
        m.Write(1, [m.Part(1, 0, [])]),
        m.Welcome(1, 1, "", "", 1, shm=False),
    ],
    ids=lambda request: type(request).__name__,
)
def test_a_message_outside_its_bounds_is_a_protocol_error(request_: Message) -> None:
    subject = decoder()
    subject.feed(encode(request_))
    with pytest.raises(ProtocolError, match="undecodable"):
        subject.next()


def test_a_request_outside_its_bounds_can_be_answered_and_the_stream_goes_on() -> None:
    subject: FrameDecoder[m.Request] = FrameDecoder(m.AnyRequest, invalid=m.Invalid)
    subject.feed(encode(m.Match(7, [])) + encode(m.Stat(8)))
    first, second = subject.next(), subject.next()
    assert first is not None
    assert isinstance(first.message, m.Invalid)
    assert first.message.id == 7
    assert first.message.why.startswith("match: Expected `array` of length >= 1")
    assert second is not None
    assert second.message == m.Stat(8)


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(encode(m.Done(1))[16:], id="a reply"),
        pytest.param(b"\x92\xa4stat\xff", id="a negative id"),
        pytest.param(b"\x91\xa4stat", id="no id"),
        pytest.param(b"\x80", id="a map"),
        pytest.param(b"\x93\xa4stat\x01" + b"\x91" * 100_000 + b"\xc0", id="nested too deep"),
    ],
)
def test_what_is_no_request_at_all_is_a_protocol_error(body: bytes) -> None:
    subject: FrameDecoder[m.Request] = FrameDecoder(m.AnyRequest, invalid=m.Invalid)
    subject.feed(HEADER.pack(b"KV", 1, 0, len(body), 0) + body)
    with pytest.raises(ProtocolError, match="undecodable"):
        subject.next()


def test_an_oversized_message_is_refused_where_it_is_made() -> None:
    with pytest.raises(BadRequestError, match="fewer keys"):
        encode(m.Match(1, [b"k" * 4096] * 1100))
    with pytest.raises(BadRequestError, match="send less"):
        encode(m.Stat(1), limits.MAX_PAYLOAD_BYTES + 1)


def test_what_is_missing_of_a_message_is_known_once_its_header_is_there() -> None:
    subject = decoder()
    message = encode(m.Stat(1))
    subject.feed(message[: HEADER.size - 1])
    assert (subject.next(), subject.missing) == (None, 0)
    subject.feed(message[HEADER.size - 1 : -2])
    assert (subject.next(), subject.missing) == (None, 2)
    subject.feed(message[-2:])
    assert subject.next() is not None
    assert subject.missing == 0


def test_the_next_message_is_not_read_over_an_unconsumed_payload() -> None:
    subject = decoder()
    subject.feed(encode(m.Stat(1), 10))
    frame = subject.next()
    assert frame is not None
    with pytest.raises(RuntimeError, match="10 payload bytes"):
        subject.next()
