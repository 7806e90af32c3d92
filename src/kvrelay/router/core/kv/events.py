"""vLLM's KV cache events as they come over the wire: MessagePack, one batch a step (`vllm/distributed/kv_events.py`).

Events are maps in vLLM 0.32 and were arrays before; SGLang's still are. Both are read. What an index has no use for is
left out of the structs and skipped by the decoder.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec
from msgspec import Struct

from kvrelay.errors import ProtocolError

MAX_BATCH_BYTES = 256 << 20
"""Longer messages are not read: a million blocks in one step."""


class BlockStored(Struct, tag=True, gc=False, frozen=True):
    """Blocks that are in a cache now: a run, each the next one's parent."""

    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    """Of all the blocks; none where the publisher does not know them."""
    block_size: int
    """In tokens."""
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    """Of each block, what its content depends on beside tokens: adapter, salt, images with their place."""
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None


class BlockRemoved(Struct, tag=True, gc=False, frozen=True):
    """Blocks that are there no longer."""

    block_hashes: list[int | bytes]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None


class AllBlocksCleared(Struct, tag=True, gc=False, frozen=True):
    """The whole cache is empty."""


CacheEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class _StoredArray(BlockStored, tag="BlockStored", array_like=True, gc=False, frozen=True):
    pass


class _RemovedArray(BlockRemoved, tag="BlockRemoved", array_like=True, gc=False, frozen=True):
    pass


class _ClearedArray(AllBlocksCleared, tag="AllBlocksCleared", array_like=True, gc=False, frozen=True):
    pass


class Batch(Struct, array_like=True, gc=False):
    """What one engine step changed."""

    ts: float
    """The publisher's clock, Unix seconds."""
    events: list[CacheEvent]
    rank: int | None = None
    """Which of an engine's data-parallel ranks, if it says."""


class _Arrays(Struct, array_like=True, gc=False):
    ts: float
    events: list[_StoredArray | _RemovedArray | _ClearedArray]
    rank: int | None = None


_decode_maps = msgspec.msgpack.Decoder(Batch).decode
_decode_arrays = msgspec.msgpack.Decoder(_Arrays).decode


def decode_batch(payload: bytes) -> Batch:
    """Read one message's payload.

    Raises:
        ProtocolError: it is none of ours, or of a kind that is not known here.
    """
    try:
        return _decode_maps(payload)
    except msgspec.MsgspecError as problem:
        try:
            arrays = _decode_arrays(payload)
        except msgspec.MsgspecError:
            raise ProtocolError(f"not a batch of KV cache events: {problem}") from None
    return Batch(arrays.ts, [*arrays.events], arrays.rank)
