"""What the fuzz targets share: inputs that say how they are cut into reads, streams to start from, the fuzzer's loop.

An input's first byte says how many follow that say how the rest, the stream, is cut. Arguments are libFuzzer's. A
finding makes the process end with a traceback and leaves the input in a file ``crash-...``.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import atheris

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


def fuzz(check: Callable[[bytes, Sequence[int]], object], seeds: Iterable[bytes]) -> None:
    """Call ``check`` with streams and the sizes of their pieces; ``seeds`` are streams to start from."""

    def one(data: bytes) -> None:
        count = data[0] % 8 if data else 0
        check(data[1 + count :], [1 + size for size in data[1 : 1 + count]])

    with tempfile.TemporaryDirectory() as corpus:
        for number, stream in enumerate(seeds):
            (Path(corpus) / f"seed-{number}").write_bytes(b"\x02\x03\x11" + stream)
        atheris.Setup([*sys.argv, "-max_len=4096", corpus], one)
        atheris.Fuzz()
