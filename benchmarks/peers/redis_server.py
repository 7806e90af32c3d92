"""Redis over TCP on loopback, spoken to in two ways.

``client="redis-py"``: its Python client with hiredis, a pipeline of SET and one MGET. ``client="raw"``: the same
commands written by hand with gather and scatter calls straight from and to the blocks, which is about as fast as a
client can be. Nothing is written to disk.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
from typing import TYPE_CHECKING, Any

from children import Child, answers, free_ports
from driver import Driver

if TYPE_CHECKING:
    from collections.abc import Sequence

IOV_MAX = 1024


def _send(sock: socket.socket, buffers: list[memoryview]) -> None:
    at = 0
    while at < len(buffers):
        sent = sock.sendmsg(buffers[at : at + IOV_MAX])
        while at < len(buffers) and sent >= buffers[at].nbytes:
            sent -= buffers[at].nbytes
            at += 1
        if sent:
            buffers[at] = buffers[at][sent:]


def _receive(sock: socket.socket, buffers: list[memoryview]) -> None:
    at = 0
    while at < len(buffers):
        got = sock.recvmsg_into(buffers[at : at + IOV_MAX])[0]
        if not got:
            raise EOFError("redis closed the connection")
        while at < len(buffers) and got >= buffers[at].nbytes:
            got -= buffers[at].nbytes
            at += 1
        if got:
            buffers[at] = buffers[at][got:]


class Redis(Driver):
    name = "Redis"

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="bench-redis-")
        self._server: Child | None = None
        self._raw: socket.socket | None = None
        self._client: Any = None
        self._kind = "redis-py"

    def start(self, batch_bytes: int, client: str = "redis-py", **_: Any) -> dict[str, str]:
        import redis

        if shutil.which("redis-server") is None:
            raise RuntimeError("there is no redis-server: apt-get install redis-server, or make peers")
        self.allocate(batch_bytes)
        self._kind = client
        (port,) = free_ports(1)
        self._server = Child(
            ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"],
            self._directory.name,
        )
        self._server.wait_until(lambda: answers(port), "redis-server")
        self._client = redis.Redis("127.0.0.1", port)
        self._raw = socket.create_connection(("127.0.0.1", port))
        self._raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        version = subprocess.run(["redis-server", "--version"], capture_output=True, text=True, check=True).stdout
        return {"redis": version.split("v=")[1].split()[0], "redis-py": redis.__version__, "client": client}

    def put(self, keys: Sequence[str], size: int) -> None:
        source = self.source.data
        if self._kind == "raw":
            self._put_raw(keys, size, source)
            return
        pipeline = self._client.pipeline(transaction=False)
        for index, key in enumerate(keys):
            pipeline.set(key, source[index * size : (index + 1) * size])
        pipeline.execute()

    def _put_raw(self, keys: Sequence[str], size: int, source: memoryview) -> None:
        assert self._raw is not None
        buffers: list[memoryview] = []
        for index, key in enumerate(keys):
            head = f"{'' if not index else chr(13) + chr(10)}*3\r\n$3\r\nSET\r\n${len(key)}\r\n{key}\r\n${size}\r\n"
            buffers += [memoryview(head.encode()), source[index * size : (index + 1) * size]]
        _send(self._raw, [*buffers, memoryview(b"\r\n")])
        replies = bytearray(5 * len(keys))
        _receive(self._raw, [memoryview(replies)])
        if replies != b"+OK\r\n" * len(keys):
            raise RuntimeError(f"redis refused a SET: {bytes(replies[:80])!r}")

    def get(self, keys: Sequence[str], size: int) -> None:
        target = self.target.data
        if self._kind == "raw":
            self._get_raw(keys, size, target)
            return
        for index, value in enumerate(self._client.mget(keys)):
            target[index * size : (index + 1) * size] = value

    def _get_raw(self, keys: Sequence[str], size: int, target: memoryview) -> None:
        assert self._raw is not None
        parts = [f"${len(key)}\r\n{key}\r\n" for key in keys]
        self._raw.sendall(f"*{len(keys) + 1}\r\n$4\r\nMGET\r\n{''.join(parts)}".encode())
        head = f"${size}\r\n".encode()
        heads = memoryview(bytearray((len(head) + 2) * len(keys)))
        step = len(head) + 2
        first = f"*{len(keys)}\r\n".encode()
        front = memoryview(bytearray(len(first)))
        buffers = [front]
        for index in range(len(keys)):
            mine = heads[index * step : (index + 1) * step]
            buffers += [mine[: len(head)], target[index * size : (index + 1) * size], mine[len(head) :]]
        _receive(self._raw, buffers)
        if bytes(front) != first or bytes(heads) != (head + b"\r\n") * len(keys):
            raise RuntimeError("redis did not answer MGET with values of the size that was stored")

    def exists(self, keys: Sequence[str]) -> int:
        return int(self._client.exists(*keys))

    def delete(self, keys: Sequence[str]) -> None:
        self._client.delete(*keys)

    def stop(self) -> None:
        if self._raw is not None:
            self._raw.close()
        if self._server is not None:
            self._server.stop()
        self._directory.cleanup()


def driver() -> Driver:
    """The driver of this module."""
    import redis  # noqa: F401 - whether it is there is known before anything starts

    return Redis()
