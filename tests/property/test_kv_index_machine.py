"""The index of prefixes against a model that keeps what each source holds and walks every prompt block by block."""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvrelay.router.core.kv.events import AllBlocksCleared, BlockRemoved, BlockStored
from kvrelay.router.core.kv.index import KvIndex, Source

if TYPE_CHECKING:
    from collections.abc import Iterator

Block = tuple[str, str, int, tuple[int, ...]]
"""Adapter, salt, block size, all tokens up to the block's end."""

SOURCES = [Source("P0"), Source("D0", 0), Source("D0", 1)]
SIZES = (1, 2)
MEDIA = ("GPU", "CPU")
tokens = st.lists(st.sampled_from([0, 0, 0, 1]), max_size=6)
sources = st.sampled_from(SOURCES)
adapters = st.sampled_from(["", "", "", "", "lora"])
salts = st.sampled_from(["", "", "", "", "tenant"])


def hash_of(block: Block) -> bytes:
    """What an engine would call it: here, a name of its own that says nothing of its content."""
    return sha256(repr(block).encode()).digest()


class Machine(RuleBasedStateMachine):
    """Sources store, remove and clear in any order, with gaps that no engine would have."""

    def __init__(self) -> None:
        super().__init__()
        self.index = KvIndex(seed=1)
        self.held: dict[Source, set[tuple[str, Block]]] = {source: set() for source in SOURCES}
        self.known: set[str] = set()
        for source in SOURCES:
            self.index.join(source)

    def has(self, source: Source, block: Block) -> bool:
        return any((medium, block) in self.held[source] for medium in MEDIA)

    @rule(
        source=sources, prompt=tokens, size=st.sampled_from(SIZES), medium=st.sampled_from(MEDIA), lora=adapters,
        salt=salts, skip=st.integers(0, 3),
    )  # fmt: skip
    def stores(
        self, source: Source, prompt: list[int], size: int, medium: str, lora: str, salt: str, skip: int
    ) -> None:
        blocks = [(lora, salt, size, tuple(prompt[:end])) for end in range(size, len(prompt) + 1, size)]
        new = blocks[skip:]
        if not new:
            return
        first = ([lora] if lora else []) + ([salt] if salt and not skip else [])
        others = [lora] if lora else None
        event = BlockStored(
            block_hashes=[hash_of(block) for block in new],
            parent_block_hash=hash_of(blocks[skip - 1]) if skip else None,
            token_ids=prompt[skip * size : len(blocks) * size],
            block_size=size,
            medium=medium,
            lora_name=lora or None,
            extra_keys=[list(first) or None] + [others] * (len(new) - 1),
            group_idx=0,
        )
        self.index.apply(source, [event])
        if not skip and lora:
            self.known.add(lora)
        if not skip or self.has(source, blocks[skip - 1]):
            self.held[source] |= {(medium, block) for block in new}

    @precondition(lambda self: any(self.held.values()))
    @rule(source=sources, data=st.data())
    def removes(self, source: Source, data: st.DataObject) -> None:
        if not self.held[source]:
            return
        medium, block = data.draw(st.sampled_from(sorted(self.held[source])))
        self.index.apply(source, [BlockRemoved(block_hashes=[hash_of(block)], medium=medium, group_idx=0)])
        self.held[source].discard((medium, block))

    @precondition(lambda self: any(self.held.values()))
    @rule(source=sources, data=st.data())
    def has_a_hole_and_fills_it(self, source: Source, data: st.DataObject) -> None:
        if not self.held[source]:
            return
        medium, block = data.draw(st.sampled_from(sorted(self.held[source])))
        lora, salt, size, prefix = block
        self.removes(source, data)
        self.stores(source, list(prefix), size, medium, lora, salt, 0)
        self.is_asked([*prefix, 0, 0, 0], lora, salt)

    @rule(source=sources)
    def removes_what_it_never_had(self, source: Source) -> None:
        self.index.apply(source, [BlockRemoved(block_hashes=[b"?" * 32, 7], medium="GPU", group_idx=0)])

    @rule(source=sources, how=st.sampled_from(["clears", "is forgotten", "leaves and comes back"]))
    def loses_all(self, source: Source, how: str) -> None:
        if how == "clears":
            self.index.apply(source, [AllBlocksCleared()])
        elif how == "is forgotten":
            self.index.forget(source)
        else:
            self.index.leave(source)
            self.index.join(source)
        self.held[source].clear()

    @rule(prompt=tokens, lora=adapters, salt=salts)
    def is_asked(self, prompt: list[int], lora: str, salt: str) -> None:
        lora = lora if lora in self.known else ""
        expected: dict[str, int] = {}
        for source in SOURCES:
            reach = max(self.reach(source, prompt, size, lora, salt) for size in SIZES)
            if reach:
                expected[source.engine] = expected.get(source.engine, 0) + reach
        ranks = {"P0": 1, "D0": 2}
        wanted = {engine: total // ranks[engine] for engine, total in expected.items()}
        assert self.index.cached(prompt, model=lora, salt=salt) == wanted

    def reach(self, source: Source, prompt: list[int], size: int, lora: str, salt: str) -> int:
        reached = 0
        for end in self.ends(prompt, size):
            if not self.has(source, (lora, salt, size, tuple(prompt[:end]))):
                break
            reached = end
        return reached

    @staticmethod
    def ends(prompt: list[int], size: int) -> Iterator[int]:
        yield from range(size, len(prompt), size)

    @invariant()
    def agrees_with_itself(self) -> None:
        self.index.check_integrity()
        for source in SOURCES:
            assert self.index.num_blocks(source) == len(self.held[source])
        if not any(self.held.values()):
            assert self.index.num_nodes == 0


TestKvIndex = Machine.TestCase
TestKvIndex.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
