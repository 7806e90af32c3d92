"""Chunks that generation completes: the keys under which the KV of a finished turn is found by the next one.

A prompt's last chunk may be short; its successor here is the full chunk that begins at the same token. Only tokens the
engine has accepted count: `Growth` reads them from the engine's own list, which grows as they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvrelay.identity.core.chunks import Chunk, ChunkChain


class Growth:
    """Full chunks of one request that hold a generated token, made when they are asked for. Not thread-safe."""

    __slots__ = ("_chain", "_first", "_size", "_tokens")

    def __init__(self, chain: ChunkChain, tokens: Sequence[int], prompt_tokens: int) -> None:
        """``chain``: fed with the prompt. ``tokens``: prompt and accepted tokens, the engine's own growing list."""
        self._chain = chain
        self._tokens = tokens
        self._size = chain.chunk_tokens
        self._first = prompt_tokens // self._size

    @property
    def known_tokens(self) -> int:
        """How many tokens of the sequence are certain."""
        return len(self._tokens)

    def end(self, number: int) -> int:
        """Where the ``number``-th of these chunks ends, in tokens of the sequence."""
        return (self._first + number + 1) * self._size

    def chunk(self, number: int) -> Chunk:
        """The ``number``-th chunk, from 0. Raises `IndexError` unless all its tokens are known."""
        have, end = self._chain.tokens, self.end(number)
        if have < end:
            self._chain.extend(self._tokens[have:end])
        return self._chain.chunks[self._first + number]
