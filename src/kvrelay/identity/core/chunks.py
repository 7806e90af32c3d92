"""Chunk keys: what the KV of a run of tokens is called.

A prompt is cut into chunks of ``chunk_tokens`` tokens; the last one may be shorter. Keys form a chain,

    key[i] = SHA-256(key[i-1] or seed, number of tokens, token ids, extra keys that fall in the chunk)

so a key stands for all tokens up to the end of its chunk. The seed carries what is not a token: the namespace, the LoRA
adapter, the tenant's salt. The number of tokens is hashed, so a short last chunk never collides with a full one.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

SEED = b"kvrelay.seed.1\x00"
MAX_TOKEN_ID = (1 << 32) - 1


def _field(raw: bytes | None) -> bytes:
    """Length-prefixed bytes; absent differs from empty."""
    return b"\x00" if raw is None else b"\x01" + len(raw).to_bytes(4, "little") + raw


def chain_seed(namespace: str, *, lora: str | None = None, salt: str | None = None) -> bytes:
    """Where a chain starts. ``lora``: identity of the adapter, its weights' digest included; ``salt``: the tenant's."""
    encoded = (None if text is None else text.encode() for text in (namespace, lora, salt))
    return sha256(SEED + b"".join(map(_field, encoded))).digest()


@dataclass(frozen=True, slots=True)
class Extra:
    """Input that is not token ids, such as an image: tokens ``[start, end)`` stand for content with this digest."""

    start: int
    end: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens ``[start, end)`` of a prompt and the key of their KV."""

    key: bytes
    start: int
    end: int

    @property
    def tokens(self) -> int:
        """How many tokens the chunk holds."""
        return self.end - self.start

    def __reduce__(self) -> tuple[type[Chunk], tuple[bytes, int, int]]:
        """Pickled as a call: every step's orders are full of chunks, and go to the workers before its forward pass."""
        return Chunk, (self.key, self.start, self.end)


class ChunkChain:
    """Chunks of a token sequence that grows at its end.

    ``chunks`` are the complete ones; `tail` is the incomplete last one, if any. Not thread-safe.
    """

    __slots__ = ("_chunk_tokens", "_extras", "_last", "_pending", "chunks")

    def __init__(self, seed: bytes, chunk_tokens: int, extras: Iterable[Extra] = ()) -> None:
        """``extras``: all non-token inputs of the sequence, known beforehand."""
        if chunk_tokens < 1:
            raise ValueError(f"chunk_tokens must be at least 1, not {chunk_tokens}")
        self._last = seed
        self._chunk_tokens = chunk_tokens
        self._extras = tuple(sorted(extras, key=lambda extra: (extra.start, extra.end, extra.digest)))
        self._pending: list[int] = []
        self.chunks: list[Chunk] = []

    @property
    def chunk_tokens(self) -> int:
        """Tokens in a complete chunk."""
        return self._chunk_tokens

    @property
    def tokens(self) -> int:
        """How many tokens the sequence has so far."""
        return len(self.chunks) * self._chunk_tokens + len(self._pending)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append tokens. Raises `ValueError` for an id outside 0..2**32-1."""
        self._pending.extend(token_ids)
        size = self._chunk_tokens
        whole = len(self._pending) // size * size
        for at in range(0, whole, size):
            chunk = self._chunk(self._pending[at : at + size])
            self.chunks.append(chunk)
            self._last = chunk.key
        del self._pending[:whole]

    def tail(self) -> Chunk | None:
        """The incomplete last chunk, ``None`` when the sequence ends with a complete one."""
        return self._chunk(self._pending) if self._pending else None

    def all(self) -> list[Chunk]:
        """Every chunk, the incomplete last one included."""
        tail = self.tail()
        return self.chunks + ([tail] if tail else [])

    def _chunk(self, token_ids: list[int]) -> Chunk:
        start = len(self.chunks) * self._chunk_tokens
        end = start + len(token_ids)
        try:
            packed = struct.pack(f"<{len(token_ids)}I", *token_ids)
        except struct.error:
            bad = next(token for token in token_ids if not 0 <= token <= MAX_TOKEN_ID)
            raise ValueError(f"token id {bad} is outside 0..{MAX_TOKEN_ID}") from None
        parts = [self._last, len(token_ids).to_bytes(4, "little"), packed]
        for extra in self._extras:
            if extra.start < end and extra.end > start:
                parts += (struct.pack("<qq", extra.start - start, extra.end - start), _field(extra.digest))
        return Chunk(sha256(b"".join(parts)).digest(), start, end)


def prompt_chunks(
    seed: bytes, token_ids: Sequence[int], chunk_tokens: int, extras: Iterable[Extra] = ()
) -> tuple[Chunk, ...]:
    """All chunks of one prompt, in order; the last may be shorter than ``chunk_tokens``."""
    chain = ChunkChain(seed, chunk_tokens, extras)
    chain.extend(token_ids)
    return tuple(chain.all())
