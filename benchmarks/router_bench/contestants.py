"""The routers that are compared, how each is started, and whether it does what it is timed for."""

from __future__ import annotations

import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

from children import free_ports
from router_bench.messages import Hop, ask
from router_bench.processes import ROUTER_CORE, Process

if TYPE_CHECKING:
    from collections.abc import Sequence

    from router_bench.loading import Bench, Engines

PEERS = Path(__file__).resolve().parents[2] / ".peers" / "bin"
OURS, PEER = "kvrelay", "vllm-router"


class Absent(Exception):  # noqa: N818 - a state of affairs
    """The peer does not run here; the message says why."""


class Router:
    """One running router in front of the mock engines."""

    def __init__(
        self, name: str, bench: Bench, engines: Engines, extra: Sequence[str] = (), *, place: int | None = ROUTER_CORE
    ) -> None:
        self.name = name
        self.port, spare = free_ports(2)
        prefill, decode = engines.urls
        legs = ["--prefill", prefill, "--decode", decode, "--port", str(self.port)]
        if name == OURS:
            command = [
                sys.executable,
                "-m",
                "kvrelay",
                "router",
                "serve",
                "--connector",
                "nixl",
                "--log-level",
                "warning",
            ]
        else:
            if not (PEERS / PEER).exists():
                raise Absent("it is not installed: make peers-router")
            command = [str(PEERS / PEER), "--vllm-pd-disaggregation", "--policy", "round_robin", "--log-level", "error"]
            legs += ["--prometheus-port", str(spare)]
        self._bench = bench
        self.process = Process([*command, *legs, *extra], bench.directory, place=place, priority=bench.priority)
        try:
            self.process.wait_until(self._healthy, name)
        except BaseException as error:
            self.process.stop()
            if isinstance(error, RuntimeError) and name != OURS:
                raise Absent(str(error)) from None
            raise

    def hop(self, body: bytes, engines: Engines) -> Hop:
        """A request through the router, its answer verified: both legs took place, and the bytes are the engine's.

        Raises:
            RuntimeError: they are not.
        """
        before = engines.counts()
        said = ask(self.port, body)
        after = engines.counts()
        legs = (after.prefills - before.prefills, after.decodes - before.decodes, after.carried - before.carried)
        if legs != (1, 1, 1):
            raise RuntimeError(f"{self.name}: prefills, decodes, hand-overs of one request are {legs}")
        if said != ask(engines.decode_port, body):
            raise RuntimeError(f"{self.name}: the answer is not the engine's, byte for byte")
        return Hop.make(self._bench.directory, f"{self.name}-{len(body)}", self.port, body, said)

    def _healthy(self) -> bool:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5).close()
        except OSError:
            return False
        return True


def version_of_peer() -> str:
    """As installed; empty if it is not."""
    python = PEERS / "python"
    if not python.exists():
        return ""
    code = "import importlib.metadata as m; print(m.version('vllm-router'))"
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=False)
    return done.stdout.strip()
