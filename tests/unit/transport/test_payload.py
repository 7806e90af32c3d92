"""Payloads, native and in Python: whatever the pieces and wherever a call stops, the same bytes and the same sums."""

from __future__ import annotations

import random
import select
import socket
from array import array
from typing import TYPE_CHECKING, cast

import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvrelay.errors import BadRequestError
from kvrelay.native import native
from kvrelay.transport.payload import dropping, move
from kvrelay.transport.pure_payload import PurePayload

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvrelay.transport.payload import Payloads
    from kvrelay.wire.payload import Payload

KINDS: list[Payloads] = [PurePayload, *([] if native is None else [cast("Payloads", native.Payload)])]
SIZES = st.lists(st.sampled_from((0, 1, 16, 17, 240, 241, 1_023, 1_024, 1_025, 1_100, 4_096, 70_000)), max_size=12)
RELAXED = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(params=KINDS, ids=lambda kind: str(kind.__module__))
def kind(request: pytest.FixtureRequest) -> Payloads:
    return cast("Payloads", request.param)


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two non-blocking ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as near:
        far, _ = listener.accept()
        with far:
            near.setblocking(False)
            far.setblocking(False)
            yield near, far


def buffers_of(sizes: Sequence[int], seed: int = 1) -> list[bytearray]:
    rng = random.Random(seed)
    return [bytearray(rng.randbytes(size)) for size in sizes]


def column(values: Sequence[int]) -> bytes:
    return array("Q", values).tobytes()


def sums_of(buffers: Sequence[bytes | bytearray]) -> bytes:
    return column([xxhash.xxh3_64_intdigest(buffer) for buffer in buffers])


def move_all(payload: Payload, sock: socket.socket) -> None:
    while payload.left:
        move(payload, sock, 1 << 20)


def wait_for(sock: socket.socket, event: int) -> None:
    poll = select.poll()
    poll.register(sock, event)
    assert poll.poll(10_000), "nothing moved for 10 s"


@RELAXED
@given(sizes=SIZES, steps=st.lists(st.integers(1, 50_000), min_size=1), most=st.integers(1, 200_000))
def test_a_payload_sent_in_any_steps_is_its_buffers_in_order_and_knows_their_sums(
    kind: Payloads, sizes: list[int], steps: list[int], most: int
) -> None:
    buffers = buffers_of(sizes)
    payload = kind(buffers, sums=True)
    out = b""
    while payload.left:
        window = b"".join(payload.window(most))
        step = min(steps[len(out) % len(steps)], len(window))
        payload.advance(step)
        out += window[:step]
    assert out == b"".join(buffers)
    assert payload.sums == sums_of(buffers)


@RELAXED
@given(sizes=SIZES, most=st.integers(1, 200_000))
def test_a_trailer_is_the_sums_behind_the_bytes(kind: Payloads, sizes: list[int], most: int) -> None:
    buffers = buffers_of(sizes)
    payload = kind(buffers, sums=True, trailer=True)
    assert payload.left == sum(sizes) + 8 * len(sizes)
    out = b""
    while payload.left:
        window = b"".join(payload.window(most))
        payload.advance(len(window))
        out += window
    assert out == b"".join(buffers) + sums_of(buffers)


@RELAXED
@given(sizes=SIZES, fed=st.integers(0, 300_000), steps=st.lists(st.integers(1, 50_000), min_size=1))
def test_a_payload_received_in_any_steps_lands_in_its_buffers_and_knows_their_sums(
    kind: Payloads, sizes: list[int], fed: int, steps: list[int]
) -> None:
    sent = buffers_of(sizes)
    data = b"".join(sent)
    landed = [bytearray(size) for size in sizes]
    payload = kind(landed, incoming=True, sums=True)
    at = payload.fill(data[:fed])
    assert at == min(fed, len(data))
    while payload.left:
        for piece in payload.window(steps[at % len(steps)]):
            piece[:] = data[at : at + piece.nbytes]
            payload.advance(piece.nbytes)
            at += piece.nbytes
    assert landed == sent
    assert payload.sums == sums_of(sent)


@RELAXED
@given(
    runs=st.lists(st.tuples(st.booleans(), st.lists(st.integers(1, 5_000), min_size=1, max_size=4)), max_size=6),
    trailer_bytes=st.sampled_from((0, 8, 64)),
    fed=st.integers(0, 40_000),
)
def test_runs_of_a_buffer_are_filled_piece_by_piece_and_what_is_unwanted_is_dropped(
    kind: Payloads, runs: list[tuple[bool, list[int]]], trailer_bytes: int, fed: int
) -> None:
    memory = bytearray(200_000)
    expected = bytearray(memory)
    targets: list[tuple[int | None, int]] = []
    offsets: list[int] = []
    pieces: list[bytes] = []
    data, at = b"", 0
    rng = random.Random(2)
    for wanted, sizes in runs:
        run = [rng.randbytes(size) for size in sizes]
        whole = b"".join(run)
        data += whole
        targets.append((at if wanted else None, len(whole)))
        if wanted:
            expected[at : at + len(whole)] = whole
            offsets += [at + sum(sizes[:index]) for index in range(len(sizes))]
            pieces += run
            at += len(whole) + 64
    trailer = rng.randbytes(trailer_bytes)
    data += trailer
    payload = kind.landing(memory, targets, column(offsets), column([len(piece) for piece in pieces]), trailer_bytes)
    assert payload.left == len(data)
    done = payload.fill(data[:fed])
    while payload.left:
        for piece in payload.window(3_000):
            piece[:] = data[done : done + piece.nbytes]
            payload.advance(piece.nbytes)
            done += piece.nbytes
    assert memory == expected
    assert (payload.sums, payload.trailer) == (sums_of(pieces), trailer)


@pytest.mark.parametrize(
    ("targets", "offsets", "sizes", "named"),
    [
        ([(900, 200)], [900], [200], "200 bytes at offset 900 are not within a buffer of 1000"),
        ([(2**64 - 1, 2)], [2**64 - 1], [2], "not within a buffer of 1000"),
        ([(0, 100)], [0], [50], "piece 1 is not at offset 50"),
        ([(0, 100)], [0], [101], "piece 0 is not at offset 0 and within 100"),
        ([(0, 100)], [8], [92], "piece 0 is not at offset 0"),
        ([(0, 100)], [0, 0], [0, 100], "piece 0 is not at offset 0"),
        ([(None, 100)], [0], [100], "targets hold 0 pieces, not 1"),
        ([(0, 100)], [0], [100, 1], "8 bytes of offsets and 16 of sizes"),
    ],
)
def test_pieces_that_are_not_the_runs_are_refused(
    kind: Payloads, targets: list[tuple[int | None, int]], offsets: list[int], sizes: list[int], named: str
) -> None:
    with pytest.raises(BadRequestError, match=named):
        kind.landing(bytearray(1_000), targets, column(offsets), column(sizes))


def test_what_cannot_be_moved_is_refused(kind: Payloads) -> None:
    with pytest.raises(BufferError):
        kind([b"read-only"], incoming=True)
    with pytest.raises(BufferError):
        kind([memoryview(bytes(10))[::2]])
    with pytest.raises(TypeError):
        kind(cast("list[bytes]", [object()]))
    with pytest.raises(ValueError, match="trailer"):
        kind([b"x"], trailer=True)
    payload = kind([b"abc"], sums=True)
    with pytest.raises(ValueError, match="advance\\(4\\) with 3 bytes left"):
        payload.advance(4)
    with pytest.raises(ValueError, match="advance\\(-1\\)"):
        payload.advance(-1)
    with pytest.raises(ValueError, match="fill"):
        payload.fill(b"x")


def test_sums_and_trailer_are_not_to_be_had_before_everything_was_moved(kind: Payloads) -> None:
    payload = kind.landing(bytearray(100), [(0, 100)], column([0]), column([100]), 8)
    payload.advance(99)
    with pytest.raises(RuntimeError, match="9 bytes have not been moved"):
        _ = payload.sums
    with pytest.raises(RuntimeError, match="9 bytes have not been moved"):
        _ = payload.trailer


def test_buffers_of_any_item_size_are_taken_as_bytes(kind: Payloads) -> None:
    numbers = array("Q", range(100))
    payload = kind([numbers], sums=True)
    assert b"".join(payload.window(1 << 20)) == numbers.tobytes()
    assert payload.left == 800


@pytest.mark.parametrize("low_water", [0, 100_000])
def test_payloads_cross_a_socket_whole_with_equal_sums_at_both_ends(
    kind: Payloads, sockets: tuple[socket.socket, socket.socket], low_water: int
) -> None:
    near, far = sockets
    rng = random.Random(3)
    sent = buffers_of([rng.choice((1, 100, 4_096, 70_000, 300_001)) for _ in range(100)])
    landed = [bytearray(len(buffer)) for buffer in sent]
    outgoing, arriving = kind(sent, sums=True), kind(landed, incoming=True, sums=True)
    while arriving.left:
        if outgoing.left:
            if select.select([], [near], [], 0)[1]:
                assert move(outgoing, near, 100_000) > 0
        else:
            wait_for(far, select.POLLIN)
        if select.select([far], [], [], 0)[0]:
            assert move(arriving, far, 200_000, low_water) > 0
    assert landed == sent
    assert arriving.sums == outgoing.sums == sums_of(sent)


def test_a_socket_is_readable_for_the_last_bytes_of_a_payload_however_the_turns_were_cut(
    kind: Payloads, sockets: tuple[socket.socket, socket.socket]
) -> None:
    """1. a turn ends for want of bytes, and asks to be woken late;
    2. more arrive, and the next turn ends at its bound with less than that many bytes missing;
    3. they arrive: the socket must be readable."""
    near, far = sockets
    landed = bytearray(200_000)
    payload = kind([landed], incoming=True)
    near.send(b"a" * 10_000)
    wait_for(far, select.POLLIN)
    assert move(payload, far, 1 << 20, 100_000) == 10_000
    near.send(b"b" * 120_000)
    wait_for(far, select.POLLIN)
    while payload.left > 150_000:
        move(payload, far, 1_000, 100_000)
    near.send(b"c" * 70_000)
    while payload.left:
        wait_for(far, select.POLLIN)
        move(payload, far, 30_000, 100_000)
    assert landed == b"a" * 10_000 + b"b" * 120_000 + b"c" * 70_000
    near.send(b"!")
    wait_for(far, select.POLLIN)
    assert far.recv(10) == b"!"


def test_a_socket_without_bytes_or_room_blocks_nobody(
    kind: Payloads, sockets: tuple[socket.socket, socket.socket]
) -> None:
    near, far = sockets
    arriving = kind([bytearray(10)], incoming=True)
    with pytest.raises(BlockingIOError):
        move(arriving, far, 10)
    outgoing = kind([bytes(1 << 20)] * 64)
    with pytest.raises(BlockingIOError):
        move_all(outgoing, near)
    assert 0 < outgoing.left < 64 << 20


def test_a_peer_that_left_is_nothing_received_and_an_error_when_sent_to(
    kind: Payloads, sockets: tuple[socket.socket, socket.socket]
) -> None:
    near, far = sockets
    far.send(b"abc")
    far.close()
    arriving = kind([bytearray(10)], incoming=True)
    wait_for(near, select.POLLIN)
    assert move(arriving, near, 10) == 3
    assert move(arriving, near, 10) == 0
    assert arriving.left == 7
    outgoing = kind([bytes(1 << 20)])
    with pytest.raises(OSError, match=r"reset|pipe"):
        move_all(outgoing, near)


def test_dropped_bytes_leave_the_socket_and_nothing_else(sockets: tuple[socket.socket, socket.socket]) -> None:
    near, far = sockets
    near.send(b"x" * 100_000 + b"rest")
    payload = dropping(100_000)
    while payload.left:
        wait_for(far, select.POLLIN)
        move(payload, far, 1 << 20)
    assert (payload.sums, far.recv(10)) == (b"", b"rest")
