"""A stream over a socket pair: turns, pauses, payloads."""

from __future__ import annotations

import gc
import random
import select
import socket
import weakref
from typing import TYPE_CHECKING, cast

import pytest

from kvrelay.errors import PoolUnavailableError, ProtocolError
from kvrelay.native import native
from kvrelay.transport import payload as payloads
from kvrelay.transport.pure_payload import PurePayload
from kvrelay.transport.stream import HEAD_BYTES, LOCAL_BUFFER_BYTES, MESSAGE_COST, REST_BYTES, SCRATCH_BYTES, Stream
from kvrelay.wire import messages as m
from kvrelay.wire.frames import FrameDecoder, encode

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvrelay.transport.payload import Payloads
    from kvrelay.wire.payload import Payload


class Recorder:
    """Takes messages; their payloads go to ``targets``."""

    def __init__(self) -> None:
        self.messages: list[m.Request] = []
        self.complete: list[m.Request] = []
        self.targets: Payload | Sequence[memoryview] | None = None

    def on_message(self, message: m.Request, payload_bytes: int) -> Payload | Sequence[memoryview] | None:
        self.messages.append(message)
        return self.targets if payload_bytes else None

    def on_payload(self, message: m.Request) -> None:
        self.complete.append(message)


class Pair:
    """A stream and the socket at its other end."""

    def __init__(self) -> None:
        ours, self.far = socket.socketpair()
        self.handler = Recorder()
        self.stream: Stream[m.Request] = Stream(ours, m.AnyRequest, self.handler)

    def close(self) -> None:
        self.stream.close()
        self.far.close()


@pytest.fixture(params=["pure"] if native is None else ["pure", "native"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Payloads:
    """Every implementation of payloads that there is."""
    chosen: Payloads = PurePayload
    if request.param == "native":
        assert native is not None
        chosen = cast("Payloads", native.Payload)
    monkeypatch.setattr(payloads, "payloads", chosen)
    return chosen


@pytest.fixture
def pair(kind: Payloads) -> Iterator[Pair]:  # noqa: ARG001 - which payloads the stream uses
    made = Pair()
    yield made
    made.close()


def test_one_turn_takes_few_messages_and_the_next_goes_on(pair: Pair) -> None:
    """Acting on a message costs more than moving as many bytes: a flood of them must not hold up other peers."""
    message = encode(m.Stat(1))
    count = 2 * SCRATCH_BYTES // len(message)
    pair.far.setblocking(False)
    sent = pair.far.send(message * count)
    assert sent == len(message) * count
    turns = 0
    while len(pair.handler.messages) < count:
        before = len(pair.handler.messages)
        assert pair.stream.receive(MESSAGE_COST * SCRATCH_BYTES)
        turns += 1
        assert 0 < len(pair.handler.messages) - before <= SCRATCH_BYTES // len(message) + 1
    assert turns == 2


def test_a_paused_stream_hands_nothing_on_until_it_is_resumed(pair: Pair) -> None:
    pair.far.send(encode(m.Stat(1)) * 5)
    pair.stream.paused = True
    assert pair.stream.receive()
    assert pair.handler.messages == []
    pair.stream.resume()
    assert pair.stream.receive()
    assert len(pair.handler.messages) == 5


@pytest.mark.parametrize("wanted", [True, False])
def test_a_payload_lands_where_the_handler_says_or_nowhere_and_the_stream_goes_on(pair: Pair, wanted: bool) -> None:
    landing = bytearray(10_000)
    pair.handler.targets = [memoryview(landing)[:3000], memoryview(landing)[3000:]] if wanted else None
    payload = bytes(range(250)) * 40
    pair.far.send(encode(m.Write(1, [m.Part(1, 0, [1])]), len(payload)) + payload + encode(m.Stat(2)))
    while len(pair.handler.messages) < 2:
        assert pair.stream.receive(1)
    assert bytes(landing) == (payload if wanted else bytes(10_000))
    assert len(pair.handler.complete) == wanted
    assert not pair.stream.amid_message


def test_a_message_cut_short_is_noticed(pair: Pair) -> None:
    pair.far.send(encode(m.Stat(1))[:-1])
    assert pair.stream.receive()
    assert pair.stream.amid_message


def test_whatever_is_queued_is_reported_as_gone_once_whether_sent_or_dropped(pair: Pair) -> None:
    gone: list[int] = []
    big = memoryview(bytes(8 << 20))
    for number in range(3):
        pair.stream.send(m.Stat(number), [big], on_sent=lambda number=number: gone.append(number))  # type: ignore[misc]
    assert not pair.stream.flush()
    assert pair.stream.queued_bytes > 0
    pair.stream.close()
    pair.stream.close()
    assert (sorted(gone), pair.stream.queued_bytes) == ([0, 1, 2], 0)


def test_a_peer_that_left_is_an_error_of_its_own(pair: Pair) -> None:
    pair.far.close()
    assert not pair.stream.receive()
    pair.stream.send(m.Stat(1))
    with pytest.raises(PoolUnavailableError):
        pair.stream.flush()


def write_of(size: int) -> bytes:
    return encode(m.Write(1, [m.Part(1, 0, [1])]), size)


def test_a_payload_of_the_handlers_own_knows_its_sums_when_it_is_complete(pair: Pair) -> None:
    landing = bytearray(300_000)
    arriving = payloads.incoming([memoryview(landing)[:100_000], memoryview(landing)[100_000:]], sums=True)
    data = random.Random(1).randbytes(300_000)
    expected = payloads.outgoing([data[:100_000], data[100_000:]], sums=True)
    expected.advance(expected.left)
    pair.handler.targets = arriving
    pair.far.setblocking(False)
    to_send = memoryview(write_of(len(data)) + data)
    while not pair.handler.complete:
        if to_send and select.select([], [pair.far], [], 0)[1]:
            to_send = to_send[pair.far.send(to_send) :]
        assert pair.stream.receive(70_000)
    assert landing == data
    assert arriving.sums == expected.sums


def test_targets_of_another_size_than_the_payload_are_an_error(pair: Pair) -> None:
    pair.handler.targets = [memoryview(bytearray(9))]
    pair.far.send(write_of(10) + bytes(10))
    with pytest.raises(ProtocolError, match="came with 10 payload bytes, not the 9"):
        pair.stream.receive()


def test_frames_of_all_kinds_queued_together_arrive_in_order_and_whole(pair: Pair) -> None:
    """Small ones share a system call, the large and the scattered ones do not fit into one."""
    rng = random.Random(2)
    payload_pieces = [
        *([rng.randbytes(rng.choice((1, 40)))] for _ in range(100)),
        [bytes([number % 256]) * 3 for number in range(3_000)],
        [],
        [rng.randbytes(1 << 20), rng.randbytes(5)],
        [],
        [rng.randbytes(SCRATCH_BYTES)],
        *([] for _ in range(100)),
    ]
    for number, pieces in enumerate(payload_pieces):
        pair.stream.send(m.Stat(number), [memoryview(piece) for piece in pieces])
    expected_bytes = pair.stream.queued_bytes
    pair.far.setblocking(False)
    received = bytearray()
    while len(received) < expected_bytes:
        pair.stream.flush(100_000)
        if select.select([pair.far], [], [], 0)[0]:
            received += pair.far.recv(1 << 20)
    assert pair.stream.queued_bytes == 0
    decoder: FrameDecoder[m.Request] = FrameDecoder(m.AnyRequest)
    decoder.feed(received)
    for number, pieces in enumerate(payload_pieces):
        frame = decoder.next()
        assert frame is not None
        assert (frame.message, frame.payload_bytes) == (m.Stat(number), sum(map(len, pieces)))
        payload = bytearray(frame.payload_bytes)
        while decoder.payload_left:
            done = frame.payload_bytes - decoder.payload_left
            decoder.take(memoryview(payload)[done:])
        assert payload == b"".join(pieces)


def test_one_flush_sends_about_as_much_as_it_may(pair: Pair) -> None:
    pair.stream.send(m.Stat(1), payloads.outgoing([bytes(50_000)] * 4, sums=True))
    pair.stream.send(m.Stat(2))
    before = pair.stream.queued_bytes
    assert not pair.stream.flush(1)
    assert pair.stream.queued_bytes > before - 100_000


def test_only_connections_within_a_host_get_buffers_of_a_fixed_size() -> None:
    """Between hosts the kernel lets them grow with the distance."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        stream: Stream[m.Request] = Stream(socket.create_connection(listener.getsockname()), m.AnyRequest, Recorder())
        assert isinstance(stream.sock, socket.socket)
        size = stream.sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
        stream.close()
    assert size in {LOCAL_BUFFER_BYTES, 2 * LOCAL_BUFFER_BYTES}  # the kernel doubles it
    for family, address in ((socket.AF_INET, ("192.0.2.1", 9)), (socket.AF_INET6, ("2001:db8::1", 9, 0, 0))):
        far = FarSocket(family, address)
        Stream(far, m.AnyRequest, Recorder()).close()
        assert far.options
        assert not {socket.SO_SNDBUF, socket.SO_RCVBUF} & far.options


class FarSocket(socket.socket):
    """A socket that says it is connected to ``address``, and notes the options set at the socket level."""

    def __init__(self, family: socket.AddressFamily, address: tuple[object, ...]) -> None:
        super().__init__(family)
        self.address = address
        self.options: set[int] = set()

    def getpeername(self) -> tuple[object, ...]:
        return self.address

    def setsockopt(self, level: int, option: int, value: int) -> None:  # type: ignore[override]
        if level == socket.SOL_SOCKET:
            self.options.add(option)
        super().setsockopt(level, option, value)


def test_a_closed_stream_is_freed_at_once_with_its_buffers_and_its_handler_hears_no_more() -> None:
    class Owner(Recorder):
        """Has the stream that it handles, as a pool's connection does."""

        stream: Stream[m.Request]

        def on_message(self, message: m.Request, payload_bytes: int) -> Payload | Sequence[memoryview] | None:
            self.stream.close()
            return super().on_message(message, payload_bytes)

    ours, far = socket.socketpair()
    owner = Owner()
    owner.stream = Stream(ours, m.AnyRequest, owner)
    far.sendall(encode(m.Stat(1)) + encode(m.Stat(2)))
    owner.stream.receive()
    assert owner.messages == [m.Stat(1)]
    gone = weakref.ref(owner)
    gc.disable()
    try:
        del owner
        assert gone() is None
    finally:
        gc.enable()
        far.close()


def test_the_end_behind_a_short_read_is_seen_in_the_same_turn(pair: Pair) -> None:
    """1. A message arrives. 2. So does a part of its payload. 3. The peer is gone. 4. The event loop gives one call."""
    target = memoryview(bytearray(4 * SCRATCH_BYTES))
    pair.handler.targets = [target]
    pair.far.sendall(encode(m.Put(1, [b"key"], bytes(8), bytes(8)), target.nbytes))
    assert pair.stream.receive()
    pair.far.sendall(bytes(SCRATCH_BYTES))
    pair.far.close()
    assert not pair.stream.receive()


def test_a_short_read_is_enough_for_who_polls_again(pair: Pair) -> None:
    """1. A message arrives. 2. The peer is gone. 3. The first look takes the message, the second sees the end."""
    pair.far.sendall(encode(m.Stat(1)))
    pair.far.close()
    assert pair.stream.receive(until_empty=False)
    assert pair.handler.messages == [m.Stat(1)]
    assert not pair.stream.receive(until_empty=False)


def test_bytes_of_a_payload_cost_no_more_for_coming_with_their_message(pair: Pair) -> None:
    target = memoryview(bytearray(HEAD_BYTES))
    pair.handler.targets = [target]
    message = encode(m.Put(1, [b"key"], bytes(8), bytes(8)), target.nbytes)
    pair.far.sendall(message + bytes(target.nbytes))
    assert pair.stream.receive(MESSAGE_COST * len(message) + target.nbytes + 1)
    assert not pair.stream.sated
    assert pair.handler.complete


def test_a_payload_that_ends_soon_behind_the_bound_of_a_turn_is_moved_whole(pair: Pair) -> None:
    bound = 16 << 10
    size = bound + REST_BYTES
    pair.handler.targets = [memoryview(bytearray(size))]
    pair.far.sendall(encode(m.Put(1, [b"key"], bytes(8), bytes(8)), size))
    assert pair.stream.receive()
    pair.far.sendall(bytes(size))
    assert pair.stream.receive(bound)
    assert pair.handler.complete
    pair.stream.send(m.Stat(1), [memoryview(bytes(size))])
    assert pair.stream.flush(len(encode(m.Stat(1), size)) + bound)
