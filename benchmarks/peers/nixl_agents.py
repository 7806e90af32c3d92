"""NIXL with UCX between two processes on one host: one-sided writes and reads of many blocks in one transfer.

The far process (this file run with ``hold``) registers memory and does nothing else; the near one writes a batch of
blocks to it and reads them back. There are no names, no allocation and no checksums in it: keys are only counted, and
block ``i`` goes to place ``i``. Descriptor lists and the transfer's handle are prepared outside what is timed.
``transports``: UCX's ``UCX_TLS``.
"""

from __future__ import annotations

import base64
import os
import sys
import tempfile
import threading
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from children import Child
from driver import Driver

if TYPE_CHECKING:
    from collections.abc import Sequence


def _agent(name: str) -> Any:
    from nixl._api import nixl_agent, nixl_agent_config

    return nixl_agent(name, nixl_agent_config(backends=["UCX"]))


def _blocks(base: int, count: int, size: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
    rows = np.zeros((count, 3), dtype=np.uint64)
    rows[:, 0] = base + np.arange(count, dtype=np.uint64) * np.uint64(size)
    rows[:, 1] = size
    return rows


class Nixl(Driver):
    name = "NIXL"

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="bench-nixl-")
        self._child: Child | None = None
        self._agent: Any = None
        self._far_base = 0
        self._far_name = ""
        self._shape: tuple[int, int] | None = None
        self._handles: dict[str, Any] = {}

    def start(self, batch_bytes: int, transports: str = "sm,tcp", **_: Any) -> dict[str, str]:
        os.environ["UCX_TLS"] = transports
        self.allocate(batch_bytes)
        where = Path(self._directory.name) / "metadata"
        hold = [sys.executable, __file__, "hold", str(batch_bytes), str(where)]
        self._child = Child(hold, self._directory.name, environment=dict(os.environ))
        self._child.wait_until(where.exists, "the far NIXL agent")
        base, metadata = where.read_text().split()
        self._far_base = int(base)
        self._agent = _agent("near")
        self._agent.register_memory(
            [(buffer.ctypes.data, buffer.nbytes, 0, "") for buffer in (self.source, self.target)], "DRAM"
        )
        name = self._agent.add_remote_agent(base64.b64decode(metadata))
        self._far_name = name.decode() if isinstance(name, bytes) else str(name)
        return {"nixl": version("nixl-cu12"), "UCX_TLS": transports}

    def prepare(self, keys: Sequence[str], size: int) -> None:
        """Make the two transfers' handles, once a shape."""
        if self._shape == (len(keys), size):
            return
        self._shape = (len(keys), size)
        count = len(keys)
        agent = self._agent
        far = agent.get_xfer_descs(_blocks(self._far_base, count, size), "DRAM")
        for what, buffer in (("WRITE", self.source), ("READ", self.target)):
            near = agent.get_xfer_descs(_blocks(buffer.ctypes.data, count, size), "DRAM")
            self._handles[what] = agent.initialize_xfer(what, near, far, self._far_name)

    def _run(self, what: str) -> None:
        handle = self._handles[what]
        state = self._agent.transfer(handle)
        while state == "PROC":
            state = self._agent.check_xfer_state(handle)
        if state != "DONE":
            raise RuntimeError(f"a NIXL {what} ended in state {state}")

    def put(self, keys: Sequence[str], size: int) -> None:  # noqa: ARG002 - places are prepared
        self._run("WRITE")

    def get(self, keys: Sequence[str], size: int) -> None:  # noqa: ARG002 - places are prepared
        self._run("READ")

    def exists(self, keys: Sequence[str]) -> int:  # noqa: ARG002 - it has none
        raise RuntimeError("NIXL knows no names")

    def delete(self, keys: Sequence[str]) -> None:
        """Nothing to forget."""

    def stop(self) -> None:
        if self._child is not None:
            self._child.stop()
            self._child = None
        self._directory.cleanup()


def driver() -> Driver:
    """The driver of this module."""
    import nixl._api  # noqa: F401 - whether it is there is known before anything starts

    return Nixl()


def hold() -> None:
    """Register memory and wait until ended."""
    batch_bytes, where = int(sys.argv[2]), Path(sys.argv[3])
    memory = np.zeros(batch_bytes, dtype=np.uint8)
    memory[:] = 0
    agent = _agent("far")
    agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
    metadata = base64.b64encode(agent.get_agent_metadata()).decode()
    part = where.with_suffix(".part")
    part.write_text(f"{memory.ctypes.data} {metadata}")
    part.rename(where)
    threading.Event().wait()


if __name__ == "__main__":
    hold()
