"""What a prompt's KV is called in the pool, as the engines' connector calls it, where a router can know that.

It can where all engines of the router share one namespace, and their model keeps one kind of KV, over the whole prompt;
and of prompts of nothing but tokens, for the model itself. An adapter's identity takes its weights, and what images
become is the engine's business: their prompts have no names here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

from kvrelay.identity.core.chunks import chain_seed, prompt_chunks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvrelay.wire.messages import Engine

MAX_TOKENS = 1 << 15
"""Longer prompts are not looked up: their names take milliseconds to make."""
MIN_CHUNK, MAX_CHUNK = 16, 1 << 16


class Naming(Struct, frozen=True):
    """How keys are made."""

    namespace: str
    chunk_tokens: int


def naming_of(engines: Sequence[Engine]) -> Naming | None:
    """What the registered engines agree on; None if they do not, or a router cannot follow."""
    if len({engine.namespace for engine in engines}) != 1:
        return None
    facts = engines[0].facts
    groups, chunk = facts.get("kv_groups", ""), facts.get("chunk_tokens", "")
    if not groups or not takes_parts(engines[0]) or not (chunk.isascii() and chunk.isdigit()):
        return None
    size = int(chunk)
    return Naming(engines[0].namespace, size) if MIN_CHUNK <= size <= MAX_CHUNK else None


def takes_parts(engine: Engine) -> bool:
    """Whether it can load part of a prompt: with windows, or layers of several kinds, it loads all or nothing."""
    groups = engine.facts.get("kv_groups", "")
    return ";" not in groups and "(" not in groups


class Names(Struct, frozen=True):
    """A prompt's chunks: their keys, and up to which token each goes."""

    keys: list[bytes]
    ends: list[int]

    def tokens(self, found: int) -> int:
        """Tokens in the first ``found`` chunks."""
        return self.ends[found - 1] if found else 0


def names_of(naming: Naming, token_ids: Sequence[int], salt: str) -> Names | None:
    """Of a prompt; None for one that is empty or too long."""
    if not 0 < len(token_ids) <= MAX_TOKENS:
        return None
    chunks = prompt_chunks(chain_seed(naming.namespace, salt=salt or None), token_ids, naming.chunk_tokens)
    return Names([chunk.key for chunk in chunks], [chunk.end for chunk in chunks])
