"""Mooncake Store over its TCP transport on loopback.

Three processes: its master with the HTTP metadata server, one client that lends the segment of memory (this file run
with ``hold``), and the client that is measured. The measured one lends no memory, so that bytes travel over TCP and are
not copied inside one process. It uses the calls without extra copies: `batch_put_from` and `batch_get_into` on
registered buffers.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from children import Child, answers, free_ports
from driver import Driver

if TYPE_CHECKING:
    from collections.abc import Sequence

LOCAL_BUFFER_BYTES = 64 << 20
SETTINGS = {"MC_TCP_BIND_ADDRESS": "127.0.0.1", "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "16384"}
"""The second: 0.3.13 refuses batches of more transfers than its queue holds (its issue 4209); the default is 1,024."""
LEASE_MS = 5_000
"""Long enough to read a batch; batches are removed by force after it."""


def _connect(metadata_port: int, master_port: int, own_port: int, segment_bytes: int) -> Any:
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    status = store.setup(
        f"127.0.0.1:{own_port}",
        f"http://127.0.0.1:{metadata_port}/metadata",
        segment_bytes,
        LOCAL_BUFFER_BYTES,
        "tcp",
        "",
        f"127.0.0.1:{master_port}",
    )
    if status != 0:
        raise RuntimeError(f"Mooncake's setup failed with {status}")
    return store


class Mooncake(Driver):
    name = "Mooncake Store"

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="bench-mooncake-")
        self._children: list[Child] = []
        self._store: Any = None

    def start(self, batch_bytes: int, join: str = "", **_: Any) -> dict[str, str]:
        """``join``: the ``ports`` of another driver's store, to be one more client of it."""
        self.allocate(batch_bytes)
        os.environ.update(SETTINGS)  # the measured client is in this process
        master, metadata, metrics, holder, own = free_ports(5)
        if join:
            master, metadata = map(int, join.split(","))
        else:
            self._serve(master, metadata, metrics, holder, 8 * batch_bytes)
        self._store = _connect(metadata, master, own, 0)
        for buffer in (self.source, self.target):
            if self._store.register_buffer(buffer.ctypes.data, buffer.nbytes) != 0:
                raise RuntimeError("Mooncake did not register a buffer")
        return {"mooncake": version("mooncake-transfer-engine-non-cuda"), "ports": f"{master},{metadata}"}

    def _serve(self, master: int, metadata: int, metrics: int, holder: int, segment_bytes: int) -> None:
        program = Path(sys.executable).parent / "mooncake_master"
        environment = dict(os.environ)
        self._child(
            [
                str(program),
                f"-rpc_port={master}",
                "-rpc_address=127.0.0.1",
                "-enable_http_metadata_server=true",
                "-http_metadata_server_host=127.0.0.1",
                f"-http_metadata_server_port={metadata}",
                "-metrics_host=127.0.0.1",
                f"-metrics_port={metrics}",
                f"-default_kv_lease_ttl={LEASE_MS}",
                "-client_ttl=3600",  # processes are stopped while others are timed
            ],
            environment,
        ).wait_until(lambda: answers(master) and answers(metadata), "mooncake_master")
        ready = Path(self._directory.name) / "holding"
        hold = [sys.executable, __file__, "hold", *map(str, (metadata, master, holder, segment_bytes)), str(ready)]
        self._child(hold, environment).wait_until(ready.exists, "the client that lends the segment")

    def _child(self, command: list[str], environment: dict[str, str]) -> Child:
        child = Child(command, self._directory.name, environment=environment)
        self._children.append(child)
        return child

    def put(self, keys: Sequence[str], size: int) -> None:
        base = self.source.ctypes.data
        codes = self._store.batch_put_from(
            list(keys), [base + index * size for index in range(len(keys))], [size] * len(keys)
        )
        if any(codes):
            raise RuntimeError(f"Mooncake refused a put: {next(code for code in codes if code)}")

    def get(self, keys: Sequence[str], size: int) -> None:
        base = self.target.ctypes.data
        sizes = self._store.batch_get_into(
            list(keys), [base + index * size for index in range(len(keys))], [size] * len(keys)
        )
        if any(got != size for got in sizes):
            raise RuntimeError(f"Mooncake did not deliver: {next(got for got in sizes if got != size)}")

    def exists(self, keys: Sequence[str]) -> int:
        return sum(code == 1 for code in self._store.batch_is_exist(list(keys)))

    def delete(self, keys: Sequence[str]) -> None:
        self._store.batch_remove(list(keys), True)

    def stop(self) -> None:
        for child in reversed(self._children):
            child.stop()
        self._children = []
        self._directory.cleanup()


def driver() -> Driver:
    """The driver of this module."""
    import mooncake.store  # noqa: F401 - whether it is there is known before anything starts

    return Mooncake()


def hold() -> None:
    """Lend a segment of memory until ended."""
    metadata, master, own, segment = map(int, sys.argv[2:6])
    store = _connect(metadata, master, own, segment)
    Path(sys.argv[6]).touch()
    threading.Event().wait()
    del store


if __name__ == "__main__":
    hold()
