"""Certificates, and `kvrelay pool serve` as a process of its own."""

from __future__ import annotations

import re
import subprocess
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING, Protocol

import pytest

from kvrelay.client.blocking import PoolClient
from kvrelay.testing.certificates import Authority
from kvrelay.transport.address import parse_address

if TYPE_CHECKING:
    import signal
    from collections.abc import Iterator
    from pathlib import Path

    from kvrelay.transport.tls import TlsConfig

WAIT_S = 30.0


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"))


class Served:
    """A pool process. ``ready``: the line it printed; ``log``: what it logged so far."""

    def __init__(self, directory: Path, *arguments: str) -> None:
        self._log = directory / "pool.log"
        self.unix = f"unix:{directory / 'pool.sock'}"
        command = [sys.executable, "-m", "kvrelay", "pool", "serve", "--listen", "127.0.0.1:0", "--size", "64MiB"]
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [*command, "--unix", str(directory / "pool.sock"), *arguments],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        assert self.process.stdout is not None
        self.ready = self.process.stdout.readline()
        while self.ready and not self.ready.startswith("kvrelay pool ready"):  # NIXL talks before it
            self.ready = self.process.stdout.readline()
        if not self.ready:
            self.close()
            raise RuntimeError(f"the pool did not start: {self.log}")
        self.tcp = next(word.rstrip(",") for word in self.ready.split() if word.startswith(("tcp:", "tls:")))
        found = re.search(r"http://\S+", self.ready)
        self.admin = found[0] if found else ""

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def port(self) -> int:
        return parse_address(self.tcp).port

    def connect(self, address: str = "", *, token: str | None = None, tls: TlsConfig | None = None) -> PoolClient:
        return PoolClient.connect(address or self.unix, name="test", token=token, tls=tls)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        return self.process.wait(WAIT_S)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(WAIT_S)
        assert self.process.stdout is not None
        self.process.stdout.close()


class Serve(Protocol):
    def __call__(self, *arguments: str) -> Served: ...


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Start a pool; it ends with the test."""
    with ExitStack() as stack:

        def start(*arguments: str) -> Served:
            pool = Served(tmp_path, *arguments)
            stack.callback(pool.close)
            return pool

        yield start


@pytest.fixture
def kvrelay() -> Command:
    """Run a command line; what it printed and its status."""
    return Command()


class Command:
    def __call__(self, *words: str, given: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "kvrelay", *words],
            input=given,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
