"""The mock engines, and loads put on whatever stands in front of them."""

from __future__ import annotations

import json
import subprocess
import urllib.request
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from children import free_ports
from router_bench.processes import LOAD_CORE, Process, on_core

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from router_bench.messages import Hop

SLACK_S = 120.0


class Load(Struct, frozen=True):
    """What the load generator prints. Times in microseconds from the request: to the last byte, to the first."""

    seconds: float
    requests: int
    errors: int
    p50_us: float
    p90_us: float
    p99_us: float
    first_p50_us: float
    first_p99_us: float

    @property
    def rate(self) -> float:
        """Requests a second."""
        return self.requests / self.seconds


class Counts(Struct, frozen=True):
    """What the mock engines saw. ``carried``: decode requests with the parameters of the prefill's answer."""

    prefills: int
    decodes: int
    carried: int
    bytes: int


class Bench(Struct, frozen=True):
    """What every section needs."""

    directory: Path
    programs: dict[str, Path]
    priority: int
    chunks: int

    def command(self, connections: int, hops: Sequence[Hop], *, requests: int = 0, seconds: float = 0.0) -> list[str]:
        """The load generator's command line."""
        arguments = [str(connections), str(requests), f"{seconds:g}", *(hop.argument for hop in hops)]
        return [str(self.programs["load"]), *arguments]

    def load(self, connections: int, hops: Sequence[Hop], *, requests: int = 0, seconds: float = 0.0) -> Load:
        """Put on a load and wait for its end.

        Raises:
            RuntimeError: an answer was wrong, or did not come.
        """
        done = subprocess.run(
            self.command(connections, hops, requests=requests, seconds=seconds),
            capture_output=True,
            timeout=None if requests else seconds + SLACK_S,
            check=True,
            preexec_fn=on_core(LOAD_CORE, self.priority),
        )
        return self.judge(done.stdout, done.stderr)

    @staticmethod
    def judge(output: bytes, complaints: bytes = b"") -> Load:
        """Read what the load generator printed.

        Raises:
            RuntimeError: an answer was wrong.
        """
        load = msgspec.json.decode(output, type=Load)
        if load.errors:
            raise RuntimeError(f"{load.errors} of {load.errors + load.requests} answers were wrong: {complaints!r}")
        return load


class Engines:
    """The running pair of mock engines."""

    def __init__(self, bench: Bench, mode: str) -> None:
        self.prefill_port, self.decode_port = free_ports(2)
        command = [
            str(bench.programs["engines"]),
            str(self.prefill_port),
            str(self.decode_port),
            str(bench.chunks),
            mode,
        ]
        self.process = Process(command, bench.directory, place=LOAD_CORE, priority=bench.priority)

    @property
    def urls(self) -> tuple[str, str]:
        """Prefill, decode."""
        return f"http://127.0.0.1:{self.prefill_port}", f"http://127.0.0.1:{self.decode_port}"

    def answers(self) -> bool:
        """Whether both listen."""
        try:
            for url in self.urls:
                urllib.request.urlopen(f"{url}/health", timeout=5).close()
        except OSError:
            return False
        return True

    def counts(self) -> Counts:
        """So far."""
        with urllib.request.urlopen(f"{self.urls[0]}/counts", timeout=5) as answer:
            return msgspec.convert(json.load(answer), Counts)


@contextmanager
def running_engines(bench: Bench, mode: str) -> Iterator[Engines]:
    """``mode``: as the program takes it."""
    engines = Engines(bench, mode)
    try:
        engines.process.wait_until(engines.answers, "the mock engines")
        yield engines
    finally:
        engines.process.stop()
