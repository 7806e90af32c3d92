"""What it costs to bring a prompt's KV from a shared-memory arena into an engine's blocks, and back.

In one run, interleaved, on one core: kvrelay's native moves, in native and in canonical packing, checksums included;
their twin in NumPy; torch, block by block, raw and transposed, as one would write it first, without checksums; and a
plain memcpy of the same bytes, object by object. Blocks are those of vLLM's CPU backend (K transposed), scattered over
the cache, others at every turn; all contestants save, then all load, so that nobody finds its bytes in the processor's
caches. Everyone's bytes are verified before anything is timed.
"""

from __future__ import annotations

import argparse
import itertools
import mmap
import random
import time
from array import array
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from kvrelay.bench.report import closing_line, median, spread, table
from kvrelay.connector.codec import find_codec
from kvrelay.connector.layout import PagedLayer
from kvrelay.connector.pages import PurePages, Span, packed_spans
from kvrelay.native import native
from kvrelay.transport import copying
from kvrelay.transport.shm import Arena

try:
    import torch
except ImportError:
    torch = None

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvrelay.connector.pages import Pages

Items = np.ndarray[Any, Any]
PROMPTS = 5
"""An engine's cache holds so many."""


@dataclass(frozen=True)
class Shape:
    """A model's KV and an engine's blocks."""

    layers: int
    heads: int
    head_size: int
    item_bytes: int
    block_tokens: int
    chunk_tokens: int
    tokens: int

    @property
    def blocks(self) -> int:
        """Of the prompt."""
        return -(-self.tokens // self.block_tokens)

    @property
    def bytes(self) -> int:
        """Of the prompt's KV."""
        return 2 * self.layers * self.heads * self.head_size * self.item_bytes * self.tokens

    @property
    def spans(self) -> list[Span]:
        """The prompt's chunks."""
        step = self.chunk_tokens
        return [Span.whole(min(step, self.tokens - at), at) for at in range(0, self.tokens, step)]


class Cache:
    """An engine's blocks: one storage for all layers, as vLLM's LBHNC."""

    def __init__(self, shape: Shape, seed: int) -> None:
        size = (shape.layers, PROMPTS * shape.blocks, shape.heads, shape.block_tokens, 2 * shape.head_size)
        kind = np.dtype(f"u{shape.item_bytes}")
        # At a page's bound, as torch's allocations are at a cache line's.
        memory = mmap.mmap(-1, int(np.prod(size)) * shape.item_bytes)
        self.storage = np.frombuffer(memory, kind).reshape(size)
        self.storage[:] = np.random.default_rng(seed).integers(0, 1 << 15, size, dtype=kind)
        shuffled = random.Random(seed).sample(range(PROMPTS * shape.blocks), PROMPTS * shape.blocks)
        self._prompts = itertools.cycle(
            [tuple(shuffled[at : at + shape.blocks]) for at in range(0, len(shuffled), shape.blocks)]
        )

    def prompt(self) -> tuple[int, ...]:
        """Blocks of a prompt, others than last time."""
        return next(self._prompts)


class Objects:
    """A prompt's objects in the arena, one after the other, each beginning at a cache line."""

    def __init__(self, memory: memoryview, shape: Shape, segment_bytes: Callable[[int], int]) -> None:
        self._layers: list[list[memoryview]] = [[] for _ in range(shape.layers)]
        at = 0
        for span in shape.spans:
            size = shape.heads * segment_bytes(span.tokens)
            for layer in self._layers:
                layer.append(memory[at : at + size])
                at += size
            at = -(-at // 64) * 64

    def __iter__(self) -> Iterator[list[memoryview]]:
        return iter(self._layers)


class Ours:
    """kvrelay's moves, or their twin's."""

    def __init__(self, shape: Shape, cache: Cache, arena: memoryview, *, packing: str, pure: bool) -> None:
        codec = find_codec(
            "CPU_ATTN",
            "vec",
            block_tokens=shape.block_tokens,
            head_size=shape.head_size,
            item_bytes=shape.item_bytes,
        )
        whole = packing == "native"
        self._layers: list[Pages] = []
        for pages in cache.storage:
            layer = PagedLayer(pages, codec, block_tokens=shape.block_tokens, head_size=shape.head_size, native=whole)
            items = pages.reshape(*pages.shape[:2], -1)
            self._layers.append(
                PurePages(items, codec.planes, codec.planes if whole else None) if pure else layer._pages
            )
        self._objects = Objects(arena, shape, layer.segment_bytes)
        self._spans = packed_spans(shape.spans)
        self._sums: list[bytes] = []

    def save(self, ids: Sequence[int]) -> None:
        """Blocks to arena."""
        blocks = array("Q", ids)
        self._sums = [
            layer.save(blocks, self._spans, views) for layer, views in zip(self._layers, self._objects, strict=True)
        ]

    def load(self, ids: Sequence[int]) -> None:
        """Arena to blocks."""
        blocks = array("Q", ids)
        for layer, views, sums in zip(self._layers, self._objects, self._sums, strict=True):
            if layer.load(blocks, self._spans, views, sums) is not None:
                raise AssertionError("a checksum does not match")


class Torch:
    """Block by block: raw, or K transposed to ``[token][dim]``. No checksums."""

    def __init__(self, shape: Shape, cache: Cache, arena: memoryview, *, transposed: bool) -> None:
        kind = {2: torch.int16, 4: torch.int32}[shape.item_bytes]
        signed = f"i{shape.item_bytes}"
        count = shape.bytes // shape.tokens * shape.blocks * shape.block_tokens // shape.item_bytes
        self._cache = torch.from_numpy(cache.storage.view(signed))
        self._stored = torch.frombuffer(arena, dtype=kind, count=count).view(
            shape.layers, shape.blocks, *self._cache.shape[2:]
        )
        self._shape = shape
        self._transposed = transposed

    def _pairs(self, ids: Sequence[int]) -> Iterator[tuple[Any, Any]]:
        half = self._shape.block_tokens * self._shape.head_size
        for pages, stored in zip(self._cache, self._stored, strict=True):
            for at, block in enumerate(ids):
                if not self._transposed:
                    yield pages[block], stored[at]
                    continue
                paged, packed = pages[block].flatten(1), stored[at].flatten(1)
                sides = (self._shape.head_size, self._shape.block_tokens)
                yield paged[:, :half].unflatten(1, sides), packed[:, :half].unflatten(1, sides[::-1]).transpose(1, 2)
                yield paged[:, half:], packed[:, half:]

    def save(self, ids: Sequence[int]) -> None:
        """Blocks to arena."""
        for paged, stored in self._pairs(ids):
            stored.copy_(paged)

    def load(self, ids: Sequence[int]) -> None:
        """Arena to blocks."""
        for paged, stored in self._pairs(ids):
            paged.copy_(stored)


class Memcpy:
    """The same bytes, to and from one buffer, in pieces of a chunk's share of a layer."""

    def __init__(self, shape: Shape, cache: Cache, arena: memoryview) -> None:
        self._buffer = cache.storage.reshape(-1).view(np.uint8).data
        self._arena = arena
        self._size = shape.bytes // shape.layers // len(shape.spans)
        count = shape.bytes // self._size
        self._offsets = array("Q", range(0, count * self._size, self._size))
        self._places = [array("Q", (shape.bytes * at + offset for offset in self._offsets)) for at in range(PROMPTS)]

    def save(self, ids: Sequence[int]) -> None:
        """Buffer to arena."""
        places = self._places[ids[0] % PROMPTS]
        copying.copy(self._arena, self._offsets, self._buffer, places, self._size)

    def load(self, ids: Sequence[int]) -> None:
        """Arena to buffer."""
        places = self._places[ids[0] % PROMPTS]
        copying.copy(self._buffer, places, self._arena, self._offsets, self._size)


def contestants(shape: Shape, cache: Cache) -> dict[str, Any]:
    """Everyone with a part of the arena of their own, all pages touched."""
    made: dict[str, Callable[[Cache, memoryview], Any]] = {}
    for name, pure in (("kvrelay", False), ("NumPy twin", True)):
        if native is not None or pure:
            for packing in ("native", "canonical"):
                made[f"{name}, {packing}"] = partial(Ours, shape, packing=packing, pure=pure)
    if torch is not None:
        torch.set_num_threads(1)
        made["torch, raw blocks"] = partial(Torch, shape, transposed=False)
        made["torch, transposed"] = partial(Torch, shape, transposed=True)
    made["memcpy"] = partial(Memcpy, shape)
    size = (shape.bytes // shape.tokens * (shape.blocks * shape.block_tokens) + (1 << 20)) // 4096 * 4096
    arena = Arena.create(size * len(made)).view
    np.frombuffer(arena, np.uint8)[:] = 1
    return {name: make(cache, arena[at * size : (at + 1) * size]) for at, (name, make) in enumerate(made.items())}


def prompt_only(shape: Shape, held: Items) -> Items:
    """Blocks with what no token of the prompt lies in made zero: contestants need not bring it."""
    last = shape.tokens - (shape.blocks - 1) * shape.block_tokens
    out = held.copy()
    sides = (shape.head_size, shape.block_tokens)
    flat = out[:, -1].reshape(*out.shape[:1], shape.heads, 2, -1)
    flat[:, :, 0].reshape(*flat.shape[:2], *sides)[..., last:] = 0
    flat[:, :, 1].reshape(*flat.shape[:2], *sides[::-1])[..., last:, :] = 0
    return out


def verify(shape: Shape, mover: Any, cache: Cache) -> None:
    """What was saved comes back."""
    source, target = cache.prompt(), cache.prompt()
    before = prompt_only(shape, cache.storage[:, source])
    mover.save(source)
    mover.load(target)
    if not isinstance(mover, Memcpy) and not np.array_equal(prompt_only(shape, cache.storage[:, target]), before):
        raise AssertionError(f"{mover} brings back other bytes")


def timed(work: Callable[[Sequence[int]], None], ids: Sequence[int]) -> float:
    start = time.perf_counter()
    work(ids)
    return (time.perf_counter() - start) * 1e3


def measure(everyone: dict[str, Any], cache: Cache, repeats: int) -> dict[str, dict[str, list[float]]]:
    """Milliseconds of every turn."""
    times: dict[str, dict[str, list[float]]] = {name: {"save": [], "load": []} for name in everyone}
    for _ in range(repeats):
        for name, mover in everyone.items():
            times[name]["save"].append(timed(mover.save, cache.prompt()))
        for name, mover in everyone.items():
            times[name]["load"].append(timed(mover.load, cache.prompt()))
    return times


def report(shape: Shape, times: dict[str, dict[str, list[float]]]) -> dict[str, dict[str, float]]:
    """Print a table; the same as values."""
    floor = "torch, raw blocks" if torch is not None else "memcpy"
    rows: list[Sequence[str]] = []
    results: dict[str, dict[str, float]] = {}
    for name, ways in times.items():
        values = results[name] = {}
        row = [name]
        for way, taken in ways.items():
            against = median([mine / theirs for mine, theirs in zip(taken, times[floor][way], strict=True)])
            values[f"{way} ms"] = round(median(taken), 2)
            values[f"{way} / {floor}"] = round(against, 3)
            row += [
                f"{median(taken):.1f} ±{spread(taken):.0%}",
                f"{shape.bytes / median(taken) / 1e6:.1f}",
                f"{against:.2f}",
            ]
        rows.append(row)
    header = ["contestant", "save ms", "GB/s", f"of {floor}", "load ms", "GB/s", f"of {floor}"]
    print(f"{shape.bytes / 1e6:.1f} MB: {shape}")
    print(table(header, rows))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1025, help="of the prompt (default %(default)s)")
    parser.add_argument("--layers", type=int, default=30, help="default %(default)s")
    parser.add_argument("--heads", type=int, default=3, help="KV heads (default %(default)s)")
    parser.add_argument("--head-size", type=int, default=64, help="default %(default)s")
    parser.add_argument("--item-bytes", type=int, choices=(2, 4), default=4, help="default %(default)s")
    parser.add_argument("--block-tokens", default="32,128", help="block sizes (default %(default)s)")
    parser.add_argument("--chunk-tokens", type=int, default=128, help="tokens of an object (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=21, help="timed repeats of each (default %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of bytes and block ids (default %(default)s)")
    args = parser.parse_args()
    results = {}
    for block_tokens in map(int, args.block_tokens.split(",")):
        shape = Shape(
            args.layers, args.heads, args.head_size, args.item_bytes, block_tokens, args.chunk_tokens, args.tokens
        )
        cache = Cache(shape, args.seed)
        everyone = contestants(shape, cache)
        for mover in everyone.values():
            verify(shape, mover, cache)
        results[f"blocks of {block_tokens}"] = report(shape, measure(everyone, cache, args.repeats))
    print(closing_line("paged", results, **vars(args)))


if __name__ == "__main__":
    main()
