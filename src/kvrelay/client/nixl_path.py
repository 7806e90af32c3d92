"""The way to an arena over NIXL: one-sided, from and to registered memory or a staging buffer."""

from __future__ import annotations

import contextlib
import threading
from array import array
from typing import TYPE_CHECKING

from kvrelay.client.core.blocks import BATCH_BYTES, Blocks
from kvrelay.client.core.mapped import check_places
from kvrelay.client.core.steps import Transfer
from kvrelay.errors import KvRelayError, PoolUnavailableError
from kvrelay.transport.nixl import NixlPeer, address_of

if TYPE_CHECKING:
    from kvrelay.client.core.blocks import Mover
    from kvrelay.client.core.steps import Operation
    from kvrelay.transport.nixl import NixlCopy
    from kvrelay.wire import messages as m

MAX_IDLE = 4
"""Staging buffers kept for the next batch."""
MAX_IDLE_BYTES = 64 << 20
"""Bigger ones are not."""


def runs(starts: array[int], sizes: array[int], others: array[int]) -> list[tuple[int, int, int]]:
    """Pieces ``(start, other, size)`` of pairs of places, those that adjoin on both sides joined."""
    joined: list[tuple[int, int, int]] = []
    start = other = size = 0
    for here, length, there in zip(starts, sizes, others, strict=True):
        if size and here == start + size and there == other + size:
            size += length
            continue
        if size:
            joined.append((start, other, size))
        start, other, size = here, there, length
    if size:
        joined.append((start, other, size))
    return joined


class NixlPath:
    """A `Direct` over NIXL. Memory that `register` was given is read and written in place; other memory is staged."""

    def __init__(self, name: str, mapped: m.NixlMapped, mover: Mover) -> None:
        """ConfigError: NIXL cannot be used here. PoolUnavailableError: the pool's agent cannot be reached."""
        self._peer = NixlPeer(name, mapped.agent, mapped.metadata)
        self._base = mapped.base
        self._size = mapped.size
        self._mover = mover
        self._lock = threading.Lock()
        self._idle: list[memoryview] = []
        self._under_way = 0
        self._broken = False
        self._closed = False

    def register(self, view: memoryview) -> None:
        """Let blocks of this writable memory travel without staging. It is held until the client is closed."""
        with self._lock:
            self._check()
            self._peer.register(view)

    def write(self, blocks: Blocks, offsets: bytes) -> Operation[bytes]:
        """Bring blocks to their offsets of the arena; the checksums of what was brought there."""
        check_places(blocks, offsets, self._size)
        base = self._registered_base(blocks)
        if base is not None and blocks.offsets is not None:
            sums = self._mover.sums(blocks)
            local = array("Q", [base + offset for offset in blocks.offsets])
            yield from self._copy(local, blocks.sizes, offsets, write=True)
            return sums
        staging, places = self._staging(blocks)
        sums = self._mover.copy_in(blocks, staging, places.tobytes())
        first = address_of(staging)
        yield from self._copy(array("Q", [first + place for place in places]), blocks.sizes, offsets, write=True)
        self._give_back(staging)
        return sums

    def read(self, offsets: bytes, blocks: Blocks, sums: bytes) -> Operation[int]:
        """Bring blocks from their offsets of the arena; the first that does not match its checksum, else -1."""
        check_places(blocks, offsets, self._size)
        base = self._registered_base(blocks)
        if base is not None and blocks.offsets is not None:
            local = array("Q", [base + offset for offset in blocks.offsets])
            yield from self._copy(local, blocks.sizes, offsets, write=False)
            return self._mover.check(blocks, sums)
        staging, places = self._staging(blocks)
        first = address_of(staging)
        yield from self._copy(array("Q", [first + place for place in places]), blocks.sizes, offsets, write=False)
        bad = self._mover.copy_out(staging, places.tobytes(), blocks, sums)
        self._give_back(staging)
        return bad

    def _registered_base(self, blocks: Blocks) -> int | None:
        """Where the blocks' one buffer is, if it is registered."""
        source = blocks.source
        if source is None or source.readonly:
            return None
        base = address_of(source)
        return base if self._peer.covers(base, source.nbytes) else None

    def _copy(self, local: array[int], sizes: array[int], offsets: bytes, *, write: bool) -> Operation[None]:
        remote = array("Q")
        remote.frombytes(offsets)
        pieces = runs(local, sizes, remote)
        with self._lock:
            self._check()
            copy = self._peer.begin(
                write=write,
                local=[(here, size) for here, _, size in pieces],
                remote=[(self._base + there, size) for _, there, size in pieces],
            )
            self._under_way += 1
        try:
            yield Transfer(lambda: self._finished(copy))
        except KvRelayError as error:
            self._stop(copy)
            raise PoolUnavailableError(f"a copy by NIXL was broken off: {error}") from error
        except BaseException:
            self._stop(copy)
            raise
        self._end(copy)

    def _finished(self, copy: NixlCopy) -> bool:
        with self._lock:
            if self._closed:
                raise PoolUnavailableError("the client was closed")
            return copy.finished()

    def _end(self, copy: NixlCopy) -> None:
        """Release a copy. After `close`, the last of them takes memory and pool along."""
        with self._lock:
            try:
                copy.release()
            finally:
                self._under_way -= 1
                if self._closed and not self._under_way:
                    self._peer.close()

    def _stop(self, copy: NixlCopy) -> None:
        """Bytes may still move: neither these buffers, which stay registered, nor this connection are used again."""
        self._broken = True
        with contextlib.suppress(KvRelayError):
            self._end(copy)

    def _check(self) -> None:
        """PoolUnavailableError: this way is not used any more."""
        if self._closed or self._broken:
            raise PoolUnavailableError("the client was closed, or a copy by NIXL broken off: connect anew")

    def _staging(self, blocks: Blocks) -> tuple[memoryview, array[int]]:
        """A registered buffer that holds all blocks, and where each goes in it."""
        places = array("Q", bytes(8 * len(blocks)))
        at = 0
        for index, size in enumerate(blocks.sizes):
            places[index] = at
            at += size
        with self._lock:
            self._check()
            for index, idle in enumerate(self._idle):
                if idle.nbytes >= at:
                    return self._idle.pop(index), places
            staging = memoryview(bytearray(max(at, BATCH_BYTES)))
            self._peer.register(staging)
            return staging, places

    def _give_back(self, staging: memoryview) -> None:
        with self._lock:
            if self._closed or self._broken:
                return
            if len(self._idle) < MAX_IDLE and staging.nbytes <= MAX_IDLE_BYTES:
                self._idle.append(staging)
                self._idle.sort(key=len)
            else:
                self._peer.deregister(staging)

    def close(self) -> None:
        """Forget the memory and the pool, once no copy is under way: those that are end soon. By any thread."""
        with self._lock:
            self._closed = True
            self._idle = []
            if not self._under_way:
                self._peer.close()
