"""What a crowd over TCP can reach at all here: many processes that exchange batches with one, over bare sockets.

A client sends a batch, waits for a byte, asks with a byte, and gets the batch back: what a put and a get move.
"""

from __future__ import annotations

import multiprocessing
import select
import socket
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pool_bench.floors import receive_all, send_all

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

START_S = 60.0


class _Served:
    """One client of the server: it puts, asks, is given, and puts again."""

    def __init__(self, sock: socket.socket, batch_bytes: int) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.memory = memoryview(bytearray(batch_bytes))
        self.at = 0
        self.gives = False
        self.waits = select.EPOLLIN

    def readable(self) -> bool:
        """Take what is there, unless it is being given; False: it has left."""
        if self.gives:
            return True
        if self.at == len(self.memory):
            if not self.sock.recv(1):
                return False
            self.at, self.gives = 0, True
            return True
        got = self.sock.recv_into(self.memory[self.at :])
        self.at += got
        if self.at == len(self.memory):
            self.sock.send(b"k")
        return got > 0

    def give(self) -> int:
        """Send as much as the socket takes of what was asked for; what to wait for now."""
        try:
            while self.gives and self.at < len(self.memory):
                self.at += self.sock.send(self.memory[self.at :])
        except BlockingIOError:
            return select.EPOLLOUT
        if self.gives:
            self.at, self.gives = 0, False
        return select.EPOLLIN


def _serve(port: multiprocessing.Queue[int], batch_bytes: int) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=1_024) as listener, select.epoll() as poll:
        port.put(listener.getsockname()[1])
        poll.register(listener, select.EPOLLIN)
        served: dict[int, _Served] = {}
        while True:
            for number, _ in poll.poll():
                if number == listener.fileno():
                    sock, _ = listener.accept()
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    served[sock.fileno()] = _Served(sock, batch_bytes)
                    poll.register(sock, select.EPOLLIN)
                    continue
                client = served[number]
                try:
                    alive = client.readable()
                except BlockingIOError:
                    alive = True
                except ConnectionError:
                    alive = False
                if alive:
                    before, client.waits = client.waits, client.give()
                    if client.waits != before:
                        poll.modify(number, client.waits)
                else:
                    poll.unregister(number)
                    served.pop(number).sock.close()


@contextmanager
def raw_server(batch_bytes: int) -> Iterator[str]:
    """The one everybody exchanges with; its port."""
    port: multiprocessing.Queue[int] = multiprocessing.Queue()
    process = multiprocessing.Process(target=_serve, args=(port, batch_bytes), daemon=True)
    process.start()
    try:
        yield str(port.get(timeout=START_S))
    finally:
        process.terminate()
        process.join(START_S)


@contextmanager
def raw_client(port: str) -> Iterator[socket.socket]:
    """A connection to it."""
    with socket.create_connection(("127.0.0.1", int(port)), START_S) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield sock


def exchange(sock: socket.socket, source: Sequence[memoryview], target: Sequence[memoryview]) -> None:
    """Put a batch and get it back."""
    send_all(sock, source)
    if sock.recv(1) != b"k":
        raise EOFError("the raw server closed")
    sock.send(b"g")
    receive_all(sock, target)
