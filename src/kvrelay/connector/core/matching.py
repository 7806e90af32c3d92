"""How much of a prompt the pool holds, where not every group's KV is needed from the first token on.

The pool answers for prefixes of a list of keys, and knows nothing of groups. Of a group without a window every chunk up
to the end is needed; of one with a window only those that hold a token the engine still reaches from there (see
`Tables.needed_from`). So the longest end is found in at most three questions:

1. Is all of it there that the whole prompt needs? A hand-over ends here; so does a prompt nobody computed.
2. If not: which chunks are there of the groups with windows, as far as the other groups go?
3. Everything that the longest end needs, under one lease. What was evicted meanwhile is a miss.

A model whose groups have no windows needs the first question only, and part of the answer will do.
"""

from __future__ import annotations

from array import array
from itertools import takewhile
from typing import TYPE_CHECKING

from msgspec import Struct

from kvrelay.wire import messages as m

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvrelay.connector.core.geometry import KvGeometry
    from kvrelay.connector.core.tables import Tables
    from kvrelay.identity.core.chunks import Chunk


class Found(Struct, frozen=True):
    """The pool holds what is needed of the first ``chunks`` chunks, under ``lease``; 0: nothing."""

    chunks: int
    lease: int
    fresh: tuple[int, ...] = ()
    """Chunks of which something was written for the hand-over asked for."""
    sealed: int = 0
    """How many chunks, from the first on, are sealed, where that is known."""
    size_bytes: int = 0
    """Of all of them, where ``sealed`` is known."""
    offsets: bytes = b""
    """Packed u64: where each begins in the pool's arena, where ``sums`` is known."""
    sums: bytes = b""
    """Packed u64: the checksums of all segments of all, sealed chunks of one group."""


NOTHING = Found(0, 0)


def load_end(chunk_end: int, prompt_tokens: int, tables: Tables) -> int:
    """Up to which token to load when chunks up to ``chunk_end`` are there.

    The engine computes a prompt's last token itself, also when all is there. Told of all, it gives blocks for the
    window *behind* the last token, and that token reaches one further back. So with a window it is told of one less.
    """
    return min(chunk_end, prompt_tokens - 1) if tables.windowed else chunk_end


class Search:
    """The questions for one prompt, one at a time: `ask`, then `take` the answer, until that is `Found`."""

    def __init__(
        self, chunks: Sequence[Chunk], prompt_tokens: int, geometry: KvGeometry, tables: Tables, *, sums: int = 0
    ) -> None:
        """``sums``: so many checksums at most are to come with the answer."""
        self._sums = sums
        self._chunks = chunks
        self._prompt_tokens = prompt_tokens
        self._geometry = geometry
        self._tables = tables
        self.restart()
        groups = range(len(geometry.groups))
        self._dense = [group for group in groups if not tables.windows[group]]
        self._windowed = [group for group in groups if tables.windows[group]]

    def restart(self) -> None:
        """Begin again with the first question."""
        self._flags: list[tuple[int, int]] = []
        """(chunk, group) asked about in the second question."""
        self._count = len(self._chunks)
        """Chunks that the question under way is about."""
        self._exact = False

    def ask(self, lease_s: float, ticket: str | None = None) -> m.Match | m.Exists:
        """The next question. ``ticket``: of the hand-over the prompt belongs to, if any."""
        if self._flags:
            return m.Exists(0, [self._key(*item) for item in self._flags])
        keys = [self._key(*item) for item in self._needed(self._count)]
        return m.Match(0, keys, lease_s, unsealed=True, ticket=ticket, sums=self._sums if self._alone else 0)

    def take(self, answer: m.Matched | m.Existing) -> tuple[Found | None, int]:
        """What was found, or ``None``: ask on; and a lease to release, or 0."""
        if isinstance(answer, m.Existing):
            present = {item for item, there in zip(self._flags, answer.flags, strict=True) if there}
            self._flags = []
            self._count = next((end for end in range(self._count, 0, -1) if self._whole(end, present)), 0)
            self._exact = True
            return (None if self._count else NOTHING), 0
        there, needed = len(answer.views), self._needed(self._count)
        fresh = self._fresh(needed, answer.fresh)
        if not self._windowed:
            chunks = there // len(self._dense)
            if not chunks:
                return NOTHING, answer.lease
            sealed = answer.sealed // len(self._dense)
            size = sum(view.size for view in answer.views)
            if not (answer.sums and self._alone and self._as_named(answer)):
                return Found(chunks, answer.lease, fresh, sealed, size), 0
            offsets = array("Q", (view.offset for view in answer.views)).tobytes()
            return Found(chunks, answer.lease, fresh, sealed, size, offsets, answer.sums), 0
        if there == len(needed):
            return Found(self._count, answer.lease, fresh), 0
        if self._exact:
            return NOTHING, answer.lease
        if self._dense:
            self._count = min(self._count, there // len(self._dense))
        self._flags = [(at, group) for at in range(self._count) for group in self._windowed]
        return (None if self._count else NOTHING), answer.lease

    @property
    def _alone(self) -> bool:
        """Whether one chunk is one object."""
        return len(self._dense) == 1 and not self._windowed

    def _as_named(self, answer: m.Matched) -> bool:
        """Whether objects and checksums are what the keys say."""
        group = self._geometry.groups[0]
        shape = len(group.layers), group.heads
        return len(answer.sums) == 8 * shape[0] * shape[1] * len(answer.views) and all(
            (view.layers, view.segments) == shape and view.size == group.object_bytes(chunk.tokens)
            for view, chunk in zip(answer.views, self._chunks, strict=False)
        )

    @staticmethod
    def _fresh(needed: Sequence[tuple[int, int]], indices: Sequence[int]) -> tuple[int, ...]:
        """Chunks written for the hand-over. Those before the first that any window needs came from where it did."""
        fresh = {needed[index][0] for index in indices}
        first = min((chunk for chunk, _ in needed), default=0)
        return tuple(sorted(fresh.union(range(first)) if first in fresh else fresh))

    def _key(self, chunk: int, group: int) -> bytes:
        return self._geometry.groups[group].key(self._chunks[chunk].key)

    def _needed(self, count: int) -> list[tuple[int, int]]:
        """(chunk, group) of everything that ``count`` chunks need: first what makes the prefix, then the windows."""
        dense = [(at, group) for at in range(count) for group in self._dense]
        return dense + [(at, group) for group in self._windowed for at in self._window(group, count)]

    def _window(self, group: int, count: int) -> list[int]:
        """The last chunks, those of ``count`` that a group with a window needs, in order."""
        end = load_end(self._chunks[count - 1].end, self._prompt_tokens, self._tables)
        first = self._tables.needed_from(group, end)
        back = takewhile(lambda at: self._chunks[at].end > first, range(count - 1, -1, -1))
        return list(back)[::-1]

    def _whole(self, count: int, present: set[tuple[int, int]]) -> bool:
        return all((at, group) in present for group in self._windowed for at in self._window(group, count))
