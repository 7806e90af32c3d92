"""Real pools for tests: in a thread of this process, or as a process of their own that can be killed."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Self

from kvrelay.pool.server import PoolServer
from kvrelay.transport.address import Address
from kvrelay.transport.shm import Arena

if TYPE_CHECKING:
    import ssl
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from kvrelay.pool.core.tenants import Tenant

START_S = 30.0
STOP_S = 10.0


class PoolThread:
    """A pool served by a thread. ``unix`` and ``tcp`` are its addresses; with ``tls``, the latter speaks TLS."""

    def __init__(
        self,
        directory: Path,
        *,
        size: int = 16 << 20,
        token: str | None = None,
        tenants: Sequence[Tenant] = (),
        tls: ssl.SSLContext | None = None,
        index: bool = True,
    ) -> None:
        self._tls = tls
        self._index = index
        self._arena = Arena.create(size)
        self.unix = f"unix:{directory / 'pool.sock'}"
        self.tcp = ""
        self._token = token
        self._tenants = tenants
        self._directory = directory
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="pool", daemon=True)

    async def _serve(self) -> None:
        self.server = PoolServer(self._arena, token=self._token, tenants=self._tenants, index=self._index)
        self.server.listen(Address(path=str(self._directory / "pool.sock")))
        self.server.listen(Address(host="127.0.0.1", port=0), self._tls)
        self.tcp = str(self.server.addresses[1])
        self._loop = asyncio.get_running_loop()
        self._ready.set()
        await self.server.run()

    def __enter__(self) -> Self:
        self._thread.start()
        if not self._ready.wait(START_S):
            raise TimeoutError("the pool's thread did not start")
        return self

    def __exit__(self, *exc: object) -> None:
        self._loop.call_soon_threadsafe(self.server.stop)
        self._thread.join(STOP_S)
        self._arena.close()


class PoolProcess:
    """``kvrelay pool serve`` as a child process. ``unix`` and ``tcp`` are its addresses once it is ready.

    ``options``: more of its flags. ``environ``: its environment, if not this process's.
    """

    def __init__(
        self,
        directory: Path,
        *,
        size: str = "64MiB",
        listen: str = "127.0.0.1:0",
        options: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.socket = directory / "pool.sock"
        self.unix = f"unix:{self.socket}"
        command = [sys.executable, "-m", "kvrelay", "pool", "serve", "--listen", listen, "--size", size, *options]
        command += ["--unix", str(self.socket)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ)
        assert self.process.stdout is not None
        ready = self.process.stdout.readline()
        while ready and not ready.startswith("kvrelay pool ready"):  # NIXL talks before it
            ready = self.process.stdout.readline()
        if not ready:
            self.process.wait(STOP_S)
            self.process.stdout.close()
            raise RuntimeError(f"the pool did not start: {ready!r}")
        words = [word.rstrip(",") for word in ready.split()]
        self.tcp = next(word for word in words if word.startswith(("tcp:", "tls:")))
        self.admin = next((word for word in words if word.startswith("http")), None)
        """The admin API's address, if it has one."""

    def kill(self) -> None:
        """End it as a crash would."""
        self.process.kill()
        self.process.wait(STOP_S)

    def terminate(self) -> int:
        """Ask it to end; its exit status."""
        self.process.terminate()
        return self.process.wait(STOP_S)


@contextmanager
def pool_process(directory: Path, *, size: str = "64MiB", options: Sequence[str] = ()) -> Iterator[PoolProcess]:
    """Run a pool process for the length of a ``with`` block."""
    pool = PoolProcess(directory, size=size, options=options)
    try:
        yield pool
    finally:
        if pool.process.poll() is None:
            pool.terminate()
        assert pool.process.stdout is not None
        pool.process.stdout.close()
