"""What the KV of a token sequence truly is, in a model that exists in tests only; and a small engine's blocks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from kvrelay.connector.core.geometry import KvGeometry

if TYPE_CHECKING:
    import random
    from collections.abc import Iterable, Sequence

GEOMETRY = KvGeometry.dense(layers=3, kv_heads=2, head_size=8, item_bytes=4)
(GROUP,) = GEOMETRY.groups
BLOCK, CHUNK, BLOCKS = 8, 12, 26
_MIX = np.uint64(0x9E3779B97F4A7C15)


def _mixed(value: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    value = (value ^ (value >> np.uint64(29))) * _MIX
    mixed: np.ndarray[Any, Any] = value ^ (value >> np.uint64(32))
    return mixed


class Truth:
    """The KV of one token sequence: ``kv[layer][head][K, V][token][dim]``."""

    def __init__(self, tokens: Sequence[int]) -> None:
        state, states = 1, np.empty(len(tokens), np.uint64)
        for at, token in enumerate(tokens):
            state = (state * 6364136223846793005 + token * 1442695040888963407 + 12345) % (1 << 64)
            states[at] = state
        shape = (GEOMETRY.layers, GROUP.heads, 2, 1, GROUP.head_size)
        salt = np.arange(np.prod(shape), dtype=np.uint64).reshape(shape) * np.uint64(0xD1342543DE82EF95)
        self.kv = (_mixed(states[:, None] + salt) >> np.uint64(16)).astype("u4")
        self.tokens = list(tokens)
        self.prefixes = states
        """A number that stands for all tokens up to each."""


class Sequenced(Protocol):
    """A request, as far as its blocks are concerned."""

    tokens: list[int]
    blocks: list[int]
    truth: Truth


@dataclass
class Request:
    """As the engine sees it."""

    name: str
    tokens: list[int]
    prompt: int
    new: int
    truth: Truth
    state: str = "waiting"
    computed: int = 0
    accepted: int = 0
    """Drafts of its current step that will turn out right."""
    blocks: list[int] = field(default_factory=list)
    left: set[int] = field(default_factory=set)
    """Ranks whose report is still to come, while loading or held."""
    received: bool = False


class Blocks:
    """Block ids, reference counts and a prefix cache. Free blocks are given out at random, to be reused soon."""

    def __init__(self, rng: random.Random, *, caching: bool) -> None:
        self._rng = rng
        self._caching = caching
        self.free = list(range(BLOCKS))
        self._users = [0] * BLOCKS
        self._cached: dict[int, int] = {}
        self._name: dict[int, int] = {}

    def __len__(self) -> int:
        return BLOCKS

    def users(self, block: int) -> int:
        """How many requests hold it."""
        return self._users[block]

    @property
    def meaningless(self) -> list[int]:
        """Blocks that are free, and whose bytes nobody will ever read."""
        return [block for block in self.free if block not in self._name]

    def hits(self, request: Sequenced) -> list[int]:
        """Blocks of the longest cached prefix, never all of it."""
        found: list[int] = []
        for end in range(BLOCK, len(request.tokens), BLOCK):
            block = self._cached.get(int(request.truth.prefixes[end - 1]))
            if block is None:
                break
            found.append(block)
        return found

    def take(self, count: int, hits: Sequence[int] = ()) -> list[int] | None:
        """Blocks that nobody uses, beside ``hits``; None if there are too few."""
        rest = [block for block in self.free if block not in hits]
        if len(rest) < count:
            return None
        new = self._rng.sample(rest, count)
        self.evict(new)
        for block in (*hits, *new):
            self._users[block] += 1
        self.free = [block for block in self.free if not self._users[block]]
        return [*hits, *new]

    def cache(self, request: Sequenced, computed: int) -> None:
        """Full blocks can be found from now on."""
        for at in range(computed // BLOCK if self._caching else 0):
            name = int(request.truth.prefixes[(at + 1) * BLOCK - 1])
            if name not in self._cached and request.blocks[at] not in self._name:
                self._cached[name] = request.blocks[at]
                self._name[request.blocks[at]] = name

    def give(self, blocks: Sequence[int]) -> list[int]:
        """Give blocks back; those whose bytes mean nothing any more."""
        for block in blocks:
            self._users[block] -= 1
            assert self._users[block] >= 0, "a block is freed twice"
        self.free = [block for block in range(BLOCKS) if not self._users[block]]
        return [block for block in blocks if not self._users[block] and block not in self._name]

    def evict(self, blocks: Iterable[int]) -> None:
        """Forget what these hold."""
        for block in blocks:
            self._cached.pop(self._name.pop(block, -1), None)

    def reset(self) -> None:
        """Forget the cache."""
        self._cached.clear()
        self._name.clear()


def stored(truth: Truth, start: int, end: int) -> bytes:
    """What a pool must hold of a chunk: ``[layer][head][K, V][token][dim]``."""
    return np.ascontiguousarray(truth.kv[:, :, :, start:end]).tobytes()


def true_object(tokens: Sequence[int], start: int, end: int) -> bytes:
    """`stored`, of a sequence."""
    return stored(Truth(tokens), start, end)
