"""What prompts have in common, and which engine has seen it: approximate, since it goes by text and not by tokens.

A prompt's bytes are cut at fixed places, and a running hash is taken at each: two prompts that agree up to a cut agree
in the hashes up to there. Pieces grow with the distance from the beginning, so that a long prompt has few hundred.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

PIECE_BYTES = 256
"""Of the first pieces."""
DOUBLE_EVERY = 64
"""Pieces, after which they are twice as long: 16 KiB in the first 64, 48 KiB in 128, 112, 240, 496, ..."""
MAX_PIECES = 384
"""About 1 MiB; what comes behind it does not count."""


def chain(seed: bytes, parts: Iterable[bytes | memoryview]) -> tuple[int, ...]:
    """Hashes at the cuts of ``parts``, put one behind the other; ``seed``: what else must agree."""
    data = b"".join(parts)
    running = xxhash.xxh3_64_intdigest(seed)
    hashes: list[int] = []
    size, start = PIECE_BYTES, 0
    digest = xxhash.xxh3_64_intdigest
    view = memoryview(data)
    while start + size <= len(data) and len(hashes) < MAX_PIECES:
        running = digest(view[start : start + size], running)
        hashes.append(running)
        start += size
        if len(hashes) % DOUBLE_EVERY == 0:
            size *= 2
    return tuple(hashes)


def bytes_up_to(count: int) -> int:
    """How many bytes the first ``count`` pieces have."""
    doublings, rest = divmod(count, DOUBLE_EVERY)
    longest = 1 << doublings
    return PIECE_BYTES * (DOUBLE_EVERY * (longest - 1) + rest * longest)


class PrefixTracker:
    """Which engines have seen which prefixes: the last ``capacity`` of them, the longest unseen giving way first."""

    __slots__ = ("_bits", "_capacity", "_counts", "_free", "_num_bits", "_retired", "_seen")

    MAX_RETIRED = 64
    """Engines that were forgotten, before what is remembered of them is looked for and dropped."""

    def __init__(self, capacity: int) -> None:
        """``capacity``: hashes remembered, of all engines together; some 150 bytes each."""
        self._capacity = capacity
        self._seen: OrderedDict[int, int] = OrderedDict()
        """Of a hash, the engines that have seen it, a bit each; least recently used first."""
        self._bits: dict[str, int] = {}
        self._counts: dict[int, int] = {}
        self._num_bits = 0
        self._retired = 0
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self._seen)

    def depths(self, prefix: Sequence[int], engines: Sequence[str]) -> list[int]:
        """How many of the prefix's pieces each engine has seen, from the first on."""
        bits = [self._bits.get(engine, 0) for engine in engines]
        found = [0] * len(bits)
        alive = 0
        for bit in bits:
            alive |= bit
        seen = self._seen
        for depth, value in enumerate(prefix):
            still = alive & seen.get(value, 0)
            if still != alive:
                for index, bit in enumerate(bits):
                    if bit & alive and not bit & still:
                        found[index] = depth
                alive = still
                if not alive:
                    return found
        for index, bit in enumerate(bits):
            if bit & alive:
                found[index] = len(prefix)
        return found

    def add(self, prefix: Sequence[int], engine: str) -> None:
        """The engine sees a prompt."""
        bit = self._bits.get(engine)
        if bit is None:
            bit = self._bits[engine] = self._new_bit()
            self._counts[bit] = 0
        seen = self._seen
        fresh = 0
        # The beginning last: it is in use as long as anything behind it is.
        for value in reversed(prefix):
            known = seen.get(value, 0)
            if not known & bit:
                fresh += 1
                seen[value] = known | bit
            seen.move_to_end(value)
        self._counts[bit] += fresh
        while len(seen) > self._capacity:
            self._drop(seen.popitem(last=False)[1])

    def remove(self, prefix: Sequence[int], engine: str, depth: int) -> None:
        """The engine turned out to have no more than the first ``depth`` pieces."""
        bit = self._bits.get(engine, 0)
        for value in prefix[depth:]:
            known = self._seen.get(value, 0)
            if not known & bit:
                return
            self._counts[bit] -= 1
            if known == bit:
                del self._seen[value]
            else:
                self._seen[value] = known ^ bit

    def size(self, engine: str) -> int:
        """How many hashes the engine has seen, of those that are remembered."""
        return self._counts.get(self._bits.get(engine, 0), 0)

    def forget(self, engine: str) -> None:
        """The engine has nothing any more. What is remembered of it gives way in its time."""
        bit = self._bits.pop(engine, 0)
        if bit:
            del self._counts[bit]
            self._retired |= bit
        if self._retired.bit_count() >= self.MAX_RETIRED:
            self._sweep()

    def _new_bit(self) -> int:
        if self._free:
            return self._free.pop()
        self._num_bits += 1
        return 1 << (self._num_bits - 1)

    def _sweep(self) -> None:
        keep = ~self._retired
        for value, bits in list(self._seen.items()):
            if bits & keep:
                self._seen[value] = bits & keep
            else:
                del self._seen[value]
        while self._retired:
            bit = self._retired & -self._retired
            self._retired ^= bit
            self._free.append(bit)

    def _drop(self, bits: int) -> None:
        while bits:
            bit = bits & -bits
            bits ^= bit
            if bit in self._counts:
                self._counts[bit] -= 1
