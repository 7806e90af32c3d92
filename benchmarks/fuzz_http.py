"""Coverage-guided fuzzing of the router's HTTP front: ``make fuzz-http ARGS=-max_total_time=300``.

Needs the extra ``fuzz``. What must hold of every stream is in `kvrelay.testing.http_stream`; the rest in `fuzzing`.
"""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

import atheris

from fuzzing import fuzz

with atheris.instrument_imports(include=["kvrelay.router.http", "kvrelay.router.core.framing", "kvrelay.testing"]):
    from kvrelay.testing.http_stream import SEEDS, Mutator, check

if TYPE_CHECKING:
    from collections.abc import Iterator

NUM_DAMAGED = 200


def seeds() -> Iterator[bytes]:
    """Valid streams, and damaged ones."""
    yield from SEEDS
    yield b"".join(SEEDS)
    mutator = Mutator(random.Random(1))
    for _ in range(NUM_DAMAGED):
        yield mutator.stream()


def main() -> None:
    loop = asyncio.new_event_loop()
    fuzz(lambda stream, sizes: loop.run_until_complete(check(stream, sizes)), seeds())


if __name__ == "__main__":
    main()
