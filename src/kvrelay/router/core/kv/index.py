"""Which engine holds which prefixes, by the events that engines publish.

A *source* is one data-parallel rank of one engine: each publishes events of its own, and holds blocks of its own. The
index is a copy of what they hold, never the truth: it may lag, and it may know less than there is. It never keeps what
a source has said to be gone, and when it cannot know what a source holds it is told to `forget` it.

What is indexed: blocks of full-attention KV groups (the first such group of a source speaks for the rest: where a model
has sliding-window or state groups too, a hit needs little of those), in any medium the source says is its own. What is
not: blocks with images, audio or embeddings in them, what follows on such blocks or on blocks the index has not seen,
and what is stored in a place shared by all (`locality` REMOTE). Those are counted by reason.

Bounds: at most ``max_blocks`` nodes and as many holdings (a source's word for one of its blocks). Over that, what is
new is not indexed, and counted.
"""

from __future__ import annotations

import sys
from array import array
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec import Struct

from kvrelay.router.core.kv.events import AllBlocksCleared, BlockRemoved, BlockStored
from kvrelay.router.core.kv.table import Table

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvrelay.router.core.kv.events import CacheEvent
    from kvrelay.router.core.kv.table import Node

MAX_BLOCKS = 2_000_000
MAX_BLOCK_TOKENS = 1 << 16
MAX_BLOCK_SIZES = 16
"""Different ones at a time: each costs a look-up of its own."""
MAX_ADAPTERS = 10_000
"""Names of adapters that are remembered."""
FULL_ATTENTION = frozenset({None, "full_attention", "mla_attention", "sink_full_attention"})
"""Kinds of KV group in which a prefix's blocks stay and are all needed. None: the publisher does not say."""
_HASH = (1 << 64) - 1


class Source(NamedTuple):
    """Who publishes: a data-parallel rank of an engine."""

    engine: str
    rank: int = 0


class Count(Struct):
    """What became of events. Of one source."""

    stored: int = 0
    """Blocks indexed, those it was known to hold among them."""
    removed: int = 0
    """Blocks that were indexed and are not any more."""
    cleared: int = 0
    """Times its whole cache was emptied."""
    skipped: Counter[str] = Counter()
    """Blocks that are not indexed, by reason."""


class _Cache:
    """What one source holds: by medium, its names for blocks, and the prefixes they end."""

    __slots__ = ("bit", "count", "group", "media")

    def __init__(self, bit: int) -> None:
        self.bit = bit
        self.group: int | None = None
        self.media: dict[str | None, dict[int, tuple[Table, Node]]] = {}
        self.count = Count(skipped=Counter())

    @property
    def num_blocks(self) -> int:
        """Holdings."""
        return sum(map(len, self.media.values()))

    def find(self, name: int) -> tuple[Table, Node] | None:
        """What a name stands for, if the source holds it."""
        for blocks in self.media.values():
            held = blocks.get(name)
            if held is not None and held[1].held & self.bit:
                return held
        return None


def scope_of(lora: str | None, salt: str | None) -> bytes:
    """What separates prompts of the same tokens: the adapter's name, the tenant's salt."""
    named = (lora or "").encode()
    return b"%d:%b%b" % (len(named), named, (salt or "").encode()) if lora or salt else b""


def pack(token_ids: Sequence[int]) -> memoryview | None:
    """Token ids as the index reads them; None if one is no token's. An `array` of unsigned 32-bit is taken as it is."""
    if not isinstance(token_ids, array) or token_ids.typecode != "I":
        try:
            token_ids = array("I", token_ids)
        except (OverflowError, TypeError):
            return None
    return memoryview(token_ids).cast("B")


assert array("I").itemsize == 4, sys.platform


class KvIndex:
    """The index. Not thread-safe."""

    def __init__(self, *, seed: int = 0, max_blocks: int = MAX_BLOCKS) -> None:
        """``seed``: unpredictable to clients, who could make prompts collide otherwise."""
        self._seed = seed
        self._max_blocks = max_blocks
        self._tables: dict[int, Table] = {}
        self._caches: dict[Source, _Cache] = {}
        self._by_bit: dict[int, Source] = {}
        self._ranks: dict[str, int] = {}
        self._adapters: set[str] = set()
        self._num_holdings = 0
        self._version = 0
        self._last: tuple[object, str, str, int, dict[str, int]] | None = None

    # --- what sources say ---

    def join(self, source: Source) -> None:
        """A source, of which nothing is known yet."""
        if source in self._caches:
            return
        number = next(number for number in range(len(self._by_bit) + 1) if number not in self._by_bit)
        self._by_bit[number] = source
        self._caches[source] = _Cache(1 << number)
        self._ranks[source.engine] = self._ranks.get(source.engine, 0) + 1
        self._version += 1

    def leave(self, source: Source) -> None:
        """A source is gone for good."""
        cache = self._caches.get(source)
        if cache is None:
            return
        self.forget(source)
        del self._caches[source], self._by_bit[cache.bit.bit_length() - 1]
        self._ranks[source.engine] -= 1
        if not self._ranks[source.engine]:
            del self._ranks[source.engine]

    def forget(self, source: Source) -> None:
        """What the source holds is not known any more."""
        cache = self._caches[source]
        for blocks in cache.media.values():
            self._num_holdings -= len(blocks)
            for table, node in blocks.values():
                if node.held & cache.bit:
                    table.drop(node, cache.bit)
        cache.media.clear()
        cache.group = None
        self._tables = {size: table for size, table in self._tables.items() if table.nodes}
        self._version += 1

    def apply(self, source: Source, events: Iterable[CacheEvent]) -> None:
        """Take what a source says has changed, in its order."""
        cache = self._caches[source]
        self._version += 1
        for event in events:
            if isinstance(event, BlockStored):
                self._stored(cache, event)
            elif isinstance(event, BlockRemoved):
                self._removed(cache, event)
            elif isinstance(event, AllBlocksCleared):
                self.forget(source)
                cache.count.cleared += 1

    def _stored(self, cache: _Cache, event: BlockStored) -> None:
        why = self._not_indexed(cache, event)
        if why:
            cache.count.skipped[why] += len(event.block_hashes)
            return
        if not event.token_ids:  # a lower tier that does not know what it stores: the engine's memory may
            for name in event.block_hashes:
                known = cache.find(_name(name))
                if known is None or not self._note(cache, event.medium, _name(name), *known):
                    cache.count.skipped["no_tokens"] += 1
            return
        table = self._table(event.block_size)
        parent = None if table is None else self._parent(cache, table, event)
        if table is None or parent is None:
            cache.count.skipped["index_full" if table is None else "no_parent"] += len(event.block_hashes)
        else:
            self._run(cache, table, parent, event)

    def _table(self, block_tokens: int) -> Table | None:
        table = self._tables.get(block_tokens)
        if table is None and len(self._tables) < MAX_BLOCK_SIZES:
            table = self._tables[block_tokens] = Table(block_tokens, self._seed)
        return table

    def _not_indexed(self, cache: _Cache, event: BlockStored) -> str:
        """Why none of the event's blocks are; empty if they are."""
        if event.locality == "REMOTE":
            return "remote"
        if event.kv_cache_spec_kind not in FULL_ATTENTION:
            return "other_group"
        if cache.group is None:
            cache.group = event.group_idx
        if event.group_idx is not None and event.group_idx != cache.group:
            return "other_group"
        if not event.token_ids:
            return ""
        if not 0 < event.block_size <= MAX_BLOCK_TOKENS:
            return "malformed"
        if len(event.token_ids) != event.block_size * len(event.block_hashes):
            return "malformed"
        return ""

    def _parent(self, cache: _Cache, table: Table, event: BlockStored) -> Node | None:
        if event.parent_block_hash is not None:
            known = cache.find(_name(event.parent_block_hash))
            return known[1] if known is not None and known[0] is table else None
        if event.lora_name and len(self._adapters) < MAX_ADAPTERS:
            self._adapters.add(event.lora_name)
        salt = _salt(event.extra_keys[0], event.lora_name) if event.extra_keys else None
        return table.root(scope_of(event.lora_name, salt))

    def _run(self, cache: _Cache, table: Table, parent: Node, event: BlockStored) -> None:
        """Index blocks of which each is the next one's parent, as far as that is possible."""
        packed, size = pack(event.token_ids), 4 * event.block_size
        num_plain, why = (_num_plain(event), "media") if packed is not None else (0, "malformed")
        indexed = 0
        for name in event.block_hashes[:num_plain]:
            assert packed is not None
            key, state, node = table.find(parent, packed[indexed * size : (indexed + 1) * size])
            if node is None and self.num_nodes < self._max_blocks:
                node = table.add(key, parent, state)
            if node is None or not self._note(cache, event.medium, _name(name), table, node):
                parent = node or parent
                why = "index_full"
                break
            parent = node
            indexed += 1
        table.prune(parent)
        if indexed < len(event.block_hashes):
            cache.count.skipped[why] += len(event.block_hashes) - indexed

    def _note(self, cache: _Cache, medium: str | None, name: int, table: Table, node: Node) -> bool:
        """A source holds a node's block under this name; False if there is no room to say so."""
        blocks = cache.media.setdefault(medium, {})
        before = blocks.get(name)
        if before is None:
            if self._num_holdings >= self._max_blocks:
                return False
            self._num_holdings += 1
        elif before[1] is not node:  # a name of something else now
            del blocks[name]
            self._release(cache, name, before)
        blocks[name] = (table, node)
        table.hold(node, cache.bit)
        cache.count.stored += 1
        return True

    def _removed(self, cache: _Cache, event: BlockRemoved) -> None:
        if event.locality == "REMOTE" or (event.group_idx is not None and event.group_idx != cache.group):
            return
        blocks = cache.media.get(event.medium)
        if blocks is None:
            return
        for name in map(_name, event.block_hashes):
            if (held := blocks.pop(name, None)) is not None:
                self._num_holdings -= 1
                cache.count.removed += 1
                self._release(cache, name, held)

    def _release(self, cache: _Cache, name: int, held: tuple[Table, Node]) -> None:
        """One medium has lost a block; whether the source has, depends on its others."""
        table, node = held
        if (elsewhere := cache.find(name)) is None or elsewhere[1] is not node:
            table.drop(node, cache.bit)

    # --- what the router asks ---

    def cached(self, token_ids: Sequence[int], *, model: str = "", salt: str = "") -> dict[str, int]:
        """How many of a prompt's first tokens each engine holds; engines that hold none are left out.

        Of an engine with several ranks it is the mean: which of them gets the request is the engine's own choice. At
        least the last token is always computed, so it never counts. ``model`` counts where it names an adapter.
        """
        last = self._last
        if last is not None and last[0] is token_ids and last[1:4] == (model, salt, self._version):
            return last[4]
        found = self._cached(token_ids, model, salt)
        self._last = (token_ids, model, salt, self._version, found)
        return found

    def _cached(self, token_ids: Sequence[int], model: str, salt: str) -> dict[str, int]:
        if not self._tables or (packed := pack(token_ids)) is None:
            return {}
        scope = scope_of(model if self.is_adapter(model) else None, salt)
        most: dict[int, int] = {}
        for block_tokens, table in self._tables.items():
            for sources, blocks in table.reaches(scope, packed, (len(token_ids) - 1) // block_tokens):
                tokens, left = blocks * block_tokens, sources
                while left:
                    number = left.bit_length() - 1
                    left ^= 1 << number
                    if tokens > most.get(number, 0):
                        most[number] = tokens
        sums: dict[str, int] = {}
        for number, tokens in most.items():
            engine = self._by_bit[number].engine
            sums[engine] = sums.get(engine, 0) + tokens
        ranks = self._ranks
        return sums if len(ranks) == len(self._by_bit) else {name: sums[name] // ranks[name] for name in sums}

    def is_adapter(self, model: str) -> bool:
        """Whether events named an adapter so."""
        return model in self._adapters

    # --- what is known of it ---

    @property
    def sources(self) -> tuple[Source, ...]:
        """Who has joined."""
        return tuple(self._caches)

    @property
    def num_nodes(self) -> int:
        """Prefixes."""
        return sum(len(table.nodes) for table in self._tables.values())

    def num_blocks(self, source: Source) -> int:
        """Holdings of a source."""
        return self._caches[source].num_blocks

    def count(self, source: Source) -> Count:
        """What became of its events, since it joined."""
        return self._caches[source].count

    def take_skipped(self, source: Source) -> list[tuple[str, int]]:
        """Blocks of the source that were not indexed since this was asked last, by reason."""
        skipped = self._caches[source].count.skipped
        taken = [*skipped.items()]
        skipped.clear()
        return taken

    def check_integrity(self) -> None:
        """Assert that holdings and prefixes agree."""
        held: Counter[int] = Counter()
        for cache in self._caches.values():
            nodes = {
                id(node) for blocks in cache.media.values() for _, node in blocks.values() if node.held & cache.bit
            }
            held[cache.bit] = len(nodes)
        for table in self._tables.values():
            table.check_integrity()
            for node in table.nodes.values():
                for cache in self._caches.values():
                    held[cache.bit] -= bool(node.held & cache.bit)
        assert not any(held.values()), f"holdings that are no prefix's, or the reverse: {held}"
        assert self._num_holdings == sum(cache.num_blocks for cache in self._caches.values())
        assert self.num_nodes <= self._max_blocks
        assert self._num_holdings <= self._max_blocks


def _name(block_hash: int | bytes) -> int:
    """The last 64 bits of a block's name: what vLLM publishes where names are to be numbers."""
    return int.from_bytes(block_hash[-8:], "big") if isinstance(block_hash, bytes) else block_hash & _HASH


def _salt(keys: list[Any] | None, lora: str | None) -> str | None:
    """The salt among the extra keys of a prompt's first block: what is text, and not the adapter's name before it."""
    texts = [key for key in keys or () if isinstance(key, str)]
    if lora and texts and texts[0] == lora:
        del texts[0]
    return texts[0] if texts else None


def _num_plain(event: BlockStored) -> int:
    """How many of the event's first blocks depend on their tokens, the adapter and the salt alone."""
    for at, keys in enumerate(event.extra_keys or ()):
        others = list(keys or ())
        if event.lora_name in others:
            others.remove(event.lora_name)
        if at == 0 and event.parent_block_hash is None and len(others) == 1 and isinstance(others[0], str):
            continue  # the salt
        if others:
            return at
    return len(event.block_hashes)
