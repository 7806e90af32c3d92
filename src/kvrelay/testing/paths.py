"""Every way bytes can travel between a client and a pool, and both shells behind one face: for tests."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any, NamedTuple

from kvrelay.client.aio import AsyncPoolClient
from kvrelay.client.blocking import PoolClient
from kvrelay.client.striped import AsyncStripedPoolClient, StripedPoolClient

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kvrelay.testing.certificates import Authority
    from kvrelay.testing.pool import PoolProcess


class Way(NamedTuple):
    """One way. ``ucx_tls``: which of UCX's transports NIXL may use; None: no NIXL. ``tls``: the TCP port speaks TLS."""

    name: str
    transport: str
    unix: bool = False
    connections: int = 1
    ucx_tls: str | None = None
    tls: bool = False

    @property
    def direct(self) -> bool:
        """Whether the client reaches the arena itself."""
        return self.transport != "tcp"


WAYS = {
    way.name: way
    for way in (
        Way("shm", "shm", unix=True),
        Way("unix", "tcp", unix=True),
        Way("tcp", "tcp"),
        Way("tls", "tcp", tls=True),
        Way("striped", "tcp", connections=3),
        Way("nixl-shm", "nixl", ucx_tls="tcp,cma,sysv,posix,self"),
        Way("nixl-tcp", "nixl", ucx_tls="tcp,self"),
    )
}


class Blocking:
    """A blocking client, striped or not."""

    def __init__(self, address: str, way: Way) -> None:
        self.client: PoolClient | StripedPoolClient
        if way.connections > 1:
            self.client = StripedPoolClient.connect(
                address, connections=way.connections, name="test", transport=way.transport
            )
            self.one = self.client.one
        else:
            self.client = self.one = PoolClient.connect(address, name="test", transport=way.transport)

    def do(self, name: str, *args: Any, **named: Any) -> Any:
        """Call a method of the client, or of one of its connections."""
        owner = self.client if hasattr(self.client, name) else self.one
        return getattr(owner, name)(*args, **named)

    def close(self) -> None:
        """End it."""
        self.client.close()


class Looped:
    """An asyncio client, striped or not, in a loop of its own that runs while a method does."""

    def __init__(self, address: str, way: Way) -> None:
        self._runner = asyncio.Runner()
        self.client: AsyncPoolClient | AsyncStripedPoolClient
        if way.connections > 1:
            self.client = self._runner.run(
                AsyncStripedPoolClient.connect(
                    address, connections=way.connections, name="test", transport=way.transport
                )
            )
            self.one = self.client.one
        else:
            self.client = self.one = self._runner.run(
                AsyncPoolClient.connect(address, name="test", transport=way.transport)
            )

    def do(self, name: str, *args: Any, **named: Any) -> Any:
        """Call a method of the client, or of one of its connections."""
        owner = self.client if hasattr(self.client, name) else self.one
        return self._runner.run(getattr(owner, name)(*args, **named))

    def close(self) -> None:
        """End it, and the loop."""
        self._runner.run(self.client.close())
        self._runner.close()


SHELLS: dict[str, Callable[[str, Way], Blocking | Looped]] = {"blocking": Blocking, "asyncio": Looped}


class Pools:
    """Pool processes, started when they are first wanted: a plain one, one with TLS, and one for every ``UCX_TLS``."""

    def __init__(self, directory: Path, start: Callable[..., PoolProcess]) -> None:
        self._directory = directory
        self._start = start
        self._running: dict[tuple[str | None, bool], PoolProcess] = {}
        self.authority: Authority | None = None

    def of(self, way: Way) -> PoolProcess:
        """The pool for a way."""
        kind = (way.ucx_tls, way.tls)
        if kind not in self._running:
            self._running[kind] = self.fresh(way, self._directory / f"pool{len(self._running)}")
        return self._running[kind]

    def address(self, pool: PoolProcess, way: Way) -> str:
        """Where a client connects to for a way."""
        if way.unix:
            return pool.unix
        if not way.tls:
            return pool.tcp
        assert self.authority is not None
        return f"{pool.tcp}?ca={self.authority.ca}"

    def fresh(self, way: Way, directory: Path, *, size: str = "64MiB") -> PoolProcess:
        """A pool of its own for a way, to be ended by who asked."""
        directory.mkdir(exist_ok=True)
        if way.tls:
            if self.authority is None:
                from kvrelay.testing.certificates import Authority

                self.authority = Authority(directory)
            pair = self.authority.server("127.0.0.1")
            return self._start(directory, size=size, options=["--tls-cert", str(pair.cert), "--tls-key", str(pair.key)])
        if way.ucx_tls is None:
            return self._start(directory, size=size)
        return self._start(directory, size=size, options=["--nixl"], environ={**os.environ, "UCX_TLS": way.ucx_tls})

    def __iter__(self) -> Iterator[PoolProcess]:
        return iter(self._running.values())
