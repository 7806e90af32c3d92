"""Connections that are reset while the pool still has bytes of theirs to read.

An event loop may tell of a broken connection once and never again (uvloop does): whoever is told must read to the end.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
import time
from typing import TYPE_CHECKING

import pytest

from kvrelay.client.blocking import PoolClient
from kvrelay.testing.pool import pool_process
from kvrelay.transport.address import parse_address
from kvrelay.wire import messages as m
from kvrelay.wire.frames import encode

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvrelay.testing.pool import PoolProcess

WITHIN_S = 10.0


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[PoolProcess]:
    with pool_process(tmp_path) as running:
        yield running


def half_a_put(sent: int) -> bytes:
    size = 1 << 20
    u64 = size.to_bytes(8, "little")
    return encode(m.Put(2, [b"key"], u64, u64), size) + bytes(sent)


def many_messages() -> bytes:
    return b"".join(encode(m.Exists(number, [bytes(64)] * 32)) for number in range(2, 200))


@pytest.mark.parametrize("stream", [half_a_put(0), half_a_put(1000), half_a_put(700_000), many_messages()])
def test_a_connection_reset_amid_what_it_sends_is_noticed_at_once(pool: PoolProcess, stream: bytes) -> None:
    """1. a client sends part of a transfer, 2. and resets its connection, 3. both before the pool gets to run."""
    with PoolClient.connect(pool.unix, name="watcher") as watcher:
        sock, target = parse_address(pool.tcp).new_socket()
        with sock:
            sock.settimeout(WITHIN_S)
            sock.connect(target)
            sock.sendall(encode(m.Hello(1, [1], "resetter")))
            assert sock.recv(1 << 16)
            os.kill(pool.process.pid, signal.SIGSTOP)
            try:
                sock.sendall(stream[: 400 << 10])
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                sock.close()
            finally:
                os.kill(pool.process.pid, signal.SIGCONT)
        end = time.monotonic() + WITHIN_S
        while (stat := watcher.stat())["connections"] > 1 or stat["unsealed"]:
            assert time.monotonic() < end, stat
