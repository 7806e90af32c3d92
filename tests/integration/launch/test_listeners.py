"""What Linux says about who listens where."""

from __future__ import annotations

import os
import socket

import pytest

from kvrelay.launch.listeners import listening, open_sockets


def inode_of(sock: socket.socket) -> int:
    return os.fstat(sock.fileno()).st_ino


@pytest.mark.parametrize(("family", "address", "asked", "others"), [
    (socket.AF_INET, "127.0.0.1", ("127.0.0.1",), ("127.0.0.2", "::1")),
    (socket.AF_INET, "0.0.0.0", ("127.0.0.1", "127.0.0.2"), ("::1",)),
    (socket.AF_INET6, "::1", ("::1",), ("127.0.0.1",)),
    (socket.AF_INET6, "::", ("::1", "127.0.0.1"), ()),
    (socket.AF_INET6, "::ffff:127.0.0.1", ("127.0.0.1", "::ffff:127.0.0.1"), ("127.0.0.2", "::1")),
])  # fmt: skip
def test_a_listener_is_found_by_the_addresses_at_which_it_can_be_reached(
    family: socket.AddressFamily, address: str, asked: tuple[str, ...], others: tuple[str, ...]
) -> None:
    with socket.socket(family) as sock:
        sock.bind((address, 0))
        sock.listen()
        port = sock.getsockname()[1]
        for reached in asked:
            assert listening(reached, port) == {inode_of(sock)}
        for unreached in others:
            assert listening(unreached, port) == set()


def test_connections_over_ipv4_do_not_come_to_an_ipv6_socket_beside_one_of_ipv4() -> None:
    with socket.socket() as sock, socket.socket(socket.AF_INET6) as other:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        port = sock.getsockname()[1]
        other.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        other.bind(("::", port))
        other.listen()
        assert listening("127.0.0.1", port) == {inode_of(sock)}
        assert listening("::1", port) == {inode_of(other)}


def test_sockets_of_a_process_are_those_it_has_open() -> None:
    with socket.socket() as sock:
        inode = inode_of(sock)
        assert inode in open_sockets([os.getpid()])
    assert inode not in open_sockets([os.getpid()])
