"""Coverage-guided fuzzing of the router's HTTP front: ``make fuzz-http ARGS=-max_total_time=300``.

Needs the extra ``fuzz``.

The first byte says how many follow that say how the rest, the stream, is cut. Arguments are libFuzzer's. What must hold
of every stream is in `kvrelay.testing.http_stream`. A finding makes the process end with a traceback and leaves the
input in a file ``crash-...``.
"""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["kvrelay.router.http", "kvrelay.router.core.framing", "kvrelay.testing"]):
    from kvrelay.testing.http_stream import SEEDS, Mutator, check

NUM_DAMAGED = 200
loop = asyncio.new_event_loop()


def one(data: bytes) -> None:
    count = data[0] % 8 if data else 0
    loop.run_until_complete(check(data[1 + count :], [1 + size for size in data[1 : 1 + count]]))


def write_seeds(directory: Path) -> None:
    """Valid streams to start from, and damaged ones."""
    mutator = Mutator(random.Random(1))
    streams = [*SEEDS, b"".join(SEEDS), *(mutator.stream() for _ in range(NUM_DAMAGED))]
    for number, stream in enumerate(streams):
        (directory / f"seed-{number}").write_bytes(b"\x02\x03\x11" + stream)


def main() -> None:
    with tempfile.TemporaryDirectory() as corpus:
        write_seeds(Path(corpus))
        atheris.Setup([*sys.argv, "-max_len=4096", corpus], one)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
