"""What the machine can do at all: a scattered copy of blocks, and a raw socket stream of them.

Every copy is a plain one of the C library, called in the way that costs least at that size: `memoryview` slices,
`ctypes.memmove` or NumPy. The stream uses gather and scatter calls of up to 1,024 buffers, two processes, no protocol.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import random
import socket
import statistics
import time
from typing import TYPE_CHECKING

import numpy as np

from kvrelay.wire.scatter import Scatter

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

CALIBRATION_ROUNDS = 5


def timed(work: Callable[[], object]) -> float:
    """Seconds that ``work`` takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def cut(memory: memoryview, size: int) -> list[memoryview]:
    """A buffer as blocks of ``size`` bytes."""
    return [memory[at : at + size] for at in range(0, memory.nbytes, size)]


class Memcpy:
    """A scattered copy of ``source`` blocks to as many places in a touched buffer, in another order."""

    def __init__(self, source: Sequence[memoryview], seed: int) -> None:
        size = source[0].nbytes
        self._memory = memoryview(bytearray(size * len(source)))
        self._memory[:] = b"\x01" * self._memory.nbytes
        places = cut(self._memory, size)
        random.Random(seed).shuffle(places)
        self._pairs = list(zip(places, source, strict=True))
        arrays = [(np.frombuffer(to, np.uint8), np.frombuffer(of, np.uint8)) for to, of in self._pairs]
        self._arrays = arrays
        self._addresses = [(to.ctypes.data, of.ctypes.data, size) for to, of in arrays]
        ways = {"memoryview": self._by_view, "ctypes.memmove": self._by_memmove, "numpy.copyto": self._by_numpy}
        costs = {name: statistics.median(timed(way) for _ in range(CALIBRATION_ROUNDS)) for name, way in ways.items()}
        self.way = min(costs, key=lambda name: costs[name])
        self.copy = ways[self.way]

    def _by_view(self) -> None:
        for place, block in self._pairs:
            place[:] = block

    def _by_memmove(self) -> None:
        move = ctypes.memmove
        for place, block, size in self._addresses:
            move(place, block, size)

    def _by_numpy(self) -> None:
        copy = np.copyto
        for place, block in self._arrays:
            copy(place, block)

    def check(self) -> None:
        """Raise AssertionError unless every block is where it belongs."""
        self.copy()
        if any(place != block for place, block in self._pairs):
            raise AssertionError("the floor copied wrong bytes")


def send_all(sock: socket.socket, buffers: Sequence[memoryview]) -> None:
    """Send buffers."""
    scatter = Scatter(buffers)
    while scatter.left:
        scatter.advance(sock.sendmsg(scatter.window()))


def receive_all(sock: socket.socket, buffers: Sequence[memoryview]) -> None:
    """Fill buffers."""
    scatter = Scatter(buffers)
    while scatter.left:
        got = sock.recvmsg_into(scatter.window())[0]
        if not got:
            raise EOFError("the raw peer closed")
        scatter.advance(got)


def _raw_peer(port: multiprocessing.Queue[int], batch_bytes: int) -> None:
    """The far end of the raw stream: takes a batch on ``p``, gives it back on ``g``."""
    memory = memoryview(bytearray(batch_bytes))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port.put(server.getsockname()[1])
        sock, _ = server.accept()
        with sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while command := sock.recv(5, socket.MSG_WAITALL):
                blocks = cut(memory, int.from_bytes(command[1:], "big"))
                if command[:1] == b"p":
                    receive_all(sock, blocks)
                    sock.sendall(b"k")
                else:
                    send_all(sock, blocks)


class RawStream:
    """The near end."""

    def __init__(self, batch_bytes: int) -> None:
        port: multiprocessing.Queue[int] = multiprocessing.Queue()
        self._process = multiprocessing.Process(target=_raw_peer, args=(port, batch_bytes), daemon=True)
        self._process.start()
        self._sock = socket.create_connection(("127.0.0.1", port.get(timeout=30)), 30)
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def put(self, blocks: Sequence[memoryview]) -> None:
        """Send blocks and wait for the word that they arrived."""
        self._sock.sendall(b"p" + blocks[0].nbytes.to_bytes(4, "big"))
        send_all(self._sock, blocks)
        if self._sock.recv(1) != b"k":
            raise EOFError("the raw peer closed")

    def get(self, blocks: Sequence[memoryview]) -> None:
        """Ask for blocks and receive them."""
        self._sock.sendall(b"g" + blocks[0].nbytes.to_bytes(4, "big"))
        receive_all(self._sock, blocks)

    def close(self) -> None:
        """End both ends."""
        self._sock.close()
        self._process.join(10)
