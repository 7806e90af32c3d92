"""Sizes of objects, in bytes, drawn at random."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

KIB = 1 << 10
MIB = 1 << 20
POWERS = [16 * KIB << shift for shift in range(7)]
CHUNKS = [47_185_920 // parts for parts in (16, 18, 20, 24, 30, 32, 36, 40, 45, 48, 60, 64, 72, 80, 90, 96, 120, 128)]
"""A model's KV of 512 tokens, cut into chunks in many ways: 360 KiB to 2.8 MiB, few of them round."""


def _any(rng: random.Random) -> int:
    return MIXES[rng.choice(("powers", "chunks", "uniform"))](rng)


MIXES: dict[str, Callable[[random.Random], int]] = {
    "16 KiB": lambda _: 16 * KIB,
    "64 KiB": lambda _: 64 * KIB,
    "1 MiB": lambda _: MIB,
    "powers": lambda rng: rng.choice(POWERS),
    "chunks": lambda rng: rng.choice(CHUNKS),
    "uniform": lambda rng: rng.randrange(16 * KIB, MIB),
    "mixed": _any,
    "small": lambda rng: rng.randrange(64, 4 * KIB),
    "mixed and small": lambda rng: MIXES["small" if rng.random() < 0.5 else "mixed"](rng),
}
"""``powers``: 16 KiB to 1 MiB, each as often; ``uniform``: any number of bytes in that range; ``mixed``: all three."""
