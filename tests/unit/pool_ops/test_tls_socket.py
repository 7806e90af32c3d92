"""A TLS socket moves bytes as a plain one does, whatever the buffers and however little the socket takes."""

from __future__ import annotations

import random
import socket
import ssl
from typing import TYPE_CHECKING

import pytest

from kvrelay.errors import ConfigError
from kvrelay.testing.certificates import Authority
from kvrelay.transport.certificates import client_context, server_context
from kvrelay.transport.tls import RECORD_BYTES, TlsConfig, TlsSocket
from kvrelay.wire.scatter import Scatter

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

Pair = tuple[TlsSocket, TlsSocket]


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"))


def shake(*socks: TlsSocket) -> None:
    waiting = list(socks)
    for _ in range(20):
        for sock in list(waiting):
            try:
                sock.do_handshake()
                waiting.remove(sock)
            except ssl.SSLWantReadError:
                pass
        if not waiting:
            return
    raise AssertionError("the handshake does not end")


@pytest.fixture
def ends(authority: Authority) -> Iterator[Pair]:
    """Both ends of a connection whose sockets take little at a time."""
    left, right = socket.socketpair()
    for sock in (left, right):
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 24 << 10)
    pair = authority.server("localhost")
    server = TlsSocket(server_context(pair.cert, pair.key), left)
    client = TlsSocket(client_context(authority.trusting()), right, server_hostname="localhost")
    shake(client, server)
    yield client, server
    client.close()
    server.close()


def cut(data: memoryview, sizes: list[int]) -> list[memoryview]:
    pieces: list[memoryview] = []
    at = 0
    while at < len(data):
        pieces.append(data[at : at + sizes[len(pieces) % len(sizes)]])
        at += len(pieces[-1])
    return pieces


@pytest.mark.parametrize("sizes", [[1 << 20], [100, 16 << 10], [16 << 10], [7, 5_000, 1], [16_383, 2]])
def test_bytes_arrive_whole_and_in_order_however_they_are_cut(ends: Pair, sizes: list[int]) -> None:
    sender, receiver = ends
    data = random.Random(1).randbytes(1_000_003)
    target = bytearray(len(data))
    out, into = Scatter(cut(memoryview(data), sizes)), Scatter(cut(memoryview(target), sizes[::-1]))
    stuck = 0
    for _ in range(100_000):
        if not into.left:
            break
        try:
            while out.left:
                out.advance(sender.sendmsg(out.window()))
        except BlockingIOError:
            stuck += 1
        try:
            while into.left:
                into.advance(receiver.recvmsg_into(into.window())[0])
        except BlockingIOError:
            pass
    assert stuck > 1, "the socket took everything at once: nothing was tried again"
    assert bytes(target) == data


def test_small_buffers_travel_in_one_record(ends: Pair) -> None:
    sender, receiver = ends
    assert sender.sendmsg([memoryview(bytes([number]) * 100) for number in range(50)]) == 5_000
    first = memoryview(bytearray(1))
    assert receiver.recv_into(first) == 1
    assert receiver.pending() == 4_999


def test_the_rest_of_a_record_is_pending_until_it_is_taken(ends: Pair) -> None:
    sender, receiver = ends
    sender.sendmsg([memoryview(bytes(RECORD_BYTES))])
    assert receiver.recvmsg_into([memoryview(bytearray(1_000))])[0] == 1_000
    assert receiver.pending() == RECORD_BYTES - 1_000
    assert receiver.recvmsg_into([memoryview(bytearray(RECORD_BYTES))])[0] == RECORD_BYTES - 1_000
    assert receiver.pending() == 0
    with pytest.raises(BlockingIOError):
        receiver.recvmsg_into([memoryview(bytearray(1))])


def test_the_end_of_the_stream_is_zero_bytes_after_what_came_before(ends: Pair) -> None:
    sender, receiver = ends
    sender.sendmsg([memoryview(b"last words")])
    sender.close()
    buffer = memoryview(bytearray(100))
    assert receiver.recvmsg_into([buffer])[0] == 10
    assert receiver.recvmsg_into([buffer])[0] == 0


def test_a_server_knows_the_names_in_a_clients_certificate(authority: Authority) -> None:
    left, right = socket.socketpair()
    left.setblocking(False)
    right.setblocking(False)
    pair = authority.server("localhost")
    server = TlsSocket(server_context(pair.cert, pair.key, authority.ca), left)
    config = authority.trusting(authority.client("tenant-a"))
    client = TlsSocket(client_context(config), right, server_hostname="localhost")
    shake(client, server)
    assert server.peer_names() == ["tenant-a", "tenant-a.test"]
    client.close()
    server.close()


@pytest.mark.parametrize("name", ["missing.pem", "nonsense.pem"])
def test_files_that_cannot_be_used_are_named(authority: Authority, tmp_path: Path, name: str) -> None:
    (tmp_path / "nonsense.pem").write_text("nonsense")
    bad, good = tmp_path / name, authority.server("localhost")
    with pytest.raises(ConfigError, match=f"{name}.* cannot be used"):
        server_context(bad)
    with pytest.raises(ConfigError, match=f"client_ca .*{name}"):
        server_context(good.cert, good.key, bad)
    with pytest.raises(ConfigError, match=f"ca .*{name}"):
        client_context(TlsConfig(ca=str(bad)))
    with pytest.raises(ConfigError, match=f"{name}.* cannot be used"):
        client_context(TlsConfig(ca=str(authority.ca), cert=str(bad)))
    with pytest.raises(ConfigError, match="has no effect without cert"):
        client_context(TlsConfig(key=str(good.key)))
