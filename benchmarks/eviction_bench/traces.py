"""What the pool is asked for: a list of requests, each the chunks of one prompt, first to last, as numbers."""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from pathlib import Path


Requests = list[list[int]]


class _Line(msgspec.Struct):
    hash_ids: list[int]


def conversation(path: Path) -> Requests:
    """The Mooncake conversation trace (FAST'25): ``hash_ids`` name the 512-token blocks of a prompt, in a chain.

    Raises:
        OSError: the file cannot be read.
        msgspec.ValidationError: a line is not a request.
    """
    decoder = msgspec.json.Decoder(_Line)
    return [decoder.decode(line).hash_ids for line in path.read_bytes().splitlines()]


class _Chunks:
    def __init__(self) -> None:
        self._numbers = itertools.count()

    def new(self, count: int) -> list[int]:
        return list(itertools.islice(self._numbers, count))


def scans(requests: int, seed: int) -> Requests:
    """A synthetic trace that is hard on recency: conversations, one-off documents and a loop.

    78 % are turns of conversations chosen by Zipf's law, each a system prompt that a twentieth of them shares and all
    turns so far; 15 % are documents of 50 to 200 chunks that nobody asks for again; 7 % go round 30 documents of 100
    chunks, so that each comes again after all others.
    """
    rng = random.Random(seed)
    chunks = _Chunks()
    systems = [chunks.new(rng.randint(2, 12)) for _ in range(20)]
    loop = itertools.cycle([chunks.new(100) for _ in range(30)])
    turns: list[list[int]] = [[] for _ in range(max(20, requests // 3))]
    weights = list(itertools.accumulate(1 / rank for rank in range(1, len(turns) + 1)))
    trace: Requests = []
    for _ in range(requests):
        kind = rng.random()
        if kind < 0.15:
            trace.append(rng.choice(systems)[:2] + chunks.new(rng.randint(50, 200)))
        elif kind < 0.22:
            trace.append(list(next(loop)))
        else:
            (which,) = rng.choices(range(len(turns)), cum_weights=weights)
            so_far = turns[which]
            if not so_far or len(so_far) > 150:
                so_far = list(rng.choice(systems))
            turns[which] = so_far + chunks.new(rng.randint(1, 6))
            trace.append(turns[which])
    return trace


def footprint(requests: Requests) -> int:
    """How many different chunks there are."""
    return len({chunk for request in requests for chunk in request})
