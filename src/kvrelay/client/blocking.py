"""The blocking shell: a pool client for threads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvrelay.client.blocking_link import BlockingLink, PendingCall
from kvrelay.client.core import desk, names
from kvrelay.client.core.blocks import Blocks
from kvrelay.client.core.given import keys_of
from kvrelay.client.tensors import all_bytes_of, bytes_of_tensor, objects_of, pages_of, pieces_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvrelay.client.core.names import PrefixCount
    from kvrelay.client.core.operations import Prefix, StagePart
    from kvrelay.client.core.puts import Puts
    from kvrelay.client.tensors import Memory
    from kvrelay.wire import messages as m
    from kvrelay.wire.bulk import ObjectInfo, Stored

__all__ = ["PendingCall", "PoolClient"]

WAIT_S = 2.0
"""How long a read waits for what a lower tier holds."""


class PoolClient(BlockingLink):
    """A connection to one pool. After a `PoolUnavailableError` it is closed.

    Several threads may use it at once, but for `stage`, `commit` and `fetch`: without shared memory these share one
    buffer, so that only one thread at a time may be between them.
    """

    # --- whole objects ---

    def put(self, key: bytes, data: Memory, *, ttl_s: float = 0.0) -> Stored:
        """Store one whole object: `Stored.STORED`, `PRESENT` or `BUSY`. PoolFullError: no room. See `put_many`."""
        block = Blocks.of_buffers([bytes_of_tensor(data)])
        return self._run(self._ops.put_blocks([key], block, ttl_s, None, partly=False)).of(0)

    def put_many(
        self,
        items: Iterable[tuple[bytes, Memory]],
        *,
        ttl_s: float = 0.0,
        ticket: str | None = None,
        partly: bool = False,
    ) -> Puts:
        """Store whole objects, any number. What became of each key.

        Keys the pool holds, or another is writing, are left alone: an object never changes. The result says `PRESENT`
        or `BUSY` then, whatever bytes there are, which nobody compares. ``ttl_s``: how long they may live, 0 for as
        long as the pool says. ``partly``: keys that could not be stored are told by the result only.

        Raises:
            PoolFullError: no room for all of them; the others are stored.
            CorruptionError: some were damaged on the way; the others are stored.
            ConflictError: some are there with another size; the others are stored.
            NotFoundError: some were given up before they were whole, deleted or too late; others may be stored.
            BadRequestError: memory is not contiguous or empty, or a key is no key. Others may be stored.
        """
        keys, blocks = objects_of(items)
        return self._run(self._ops.put_blocks(keys, blocks, ttl_s, ticket, partly=partly))

    def get(self, key: bytes, *, wait_s: float = WAIT_S) -> bytes | None:
        """Read one whole object; None when it is not there. Errors as for `get_many`."""
        return self._run(self._ops.whole.get_one(key, wait_s=wait_s), extra_s=wait_s)

    def get_many(self, keys: Sequence[bytes], into: Sequence[Memory], *, wait_s: float = WAIT_S) -> int:
        """Read whole objects into buffers, up to the first that is missing; how many were read.

        Buffers behind those may hold anything. ``wait_s``: how long to wait for what a lower tier holds.

        Raises:
            CorruptionError: bytes do not match their checksum. The pool has been told.
            LeaseExpiredError: it took longer than the lease; nothing that was read may be used.
            BadRequestError: a buffer is of another size than its object, or scattered, or read-only.
        """
        blocks = Blocks.of_buffers(all_bytes_of(into), writable=True)
        return self._run(self._ops.whole.get(keys, blocks, wait_s=wait_s), extra_s=wait_s)

    def put_blocks(self, keys: Sequence[bytes], blocks: Blocks, *, ttl_s: float = 0.0, partly: bool = False) -> Puts:
        """Store memory that is described by columns, under ``keys``. As `put_many`."""
        return self._run(self._ops.put_blocks(keys, blocks, ttl_s, None, partly=partly))

    def get_blocks(self, keys: Sequence[bytes], blocks: Blocks, *, wait_s: float = WAIT_S) -> int:
        """Read into memory that is described by columns; how many were read. As `get_many`."""
        return self._run(self._ops.whole.get(keys, blocks, wait_s=wait_s), extra_s=wait_s)

    def write_cache(
        self, tensor: Memory, blocks: Sequence[tuple[bytes, int]], page_size: int, *, ttl_s: float = 0.0
    ) -> Puts:
        """Store pages of a tensor: for each ``(key, offset)``, ``page_size`` elements from element ``offset`` on.

        A page is readable by everybody when this returns. Errors as for `put_many`.
        """
        keys, pages = pages_of(tensor, blocks, page_size)
        return self._run(self._ops.put_blocks(keys, pages, ttl_s, None, partly=False))

    def read_cache(
        self, tensor: Memory, blocks: Sequence[tuple[bytes, int]], page_size: int, *, wait_s: float = WAIT_S
    ) -> None:
        """Read pages into a tensor: for each ``(key, offset)``, ``page_size`` elements to element ``offset`` on.

        Raises:
            NotFoundError: a page is not there; those before it were read.
            CorruptionError, LeaseExpiredError, BadRequestError: as for `get_many`.
        """
        keys, pages = pages_of(tensor, blocks, page_size, writable=True)
        self._run(self._ops.read_pages(keys, pages, wait_s=wait_s), extra_s=wait_s)

    def sync(self) -> None:
        """Nothing is ever left to wait for: `write_cache` and `read_cache` return when they are done.

        Raises:
            PoolUnavailableError: the connection has ended.
        """
        self._run(desk.stat())

    # --- ranges of one object ---

    def read_ranges(self, key: bytes, ranges: Sequence[tuple[int, int]]) -> list[bytes] | None:
        """Verified bytes of ranges ``(offset, size)`` of a sealed object; None when it is not there.

        Whole segments are read and verified, so a range costs the segments it touches.
        """
        return self._run(self._ops.read_ranges(key, ranges))

    def write_ranges(
        self,
        key: bytes,
        size: int,
        pieces: Iterable[tuple[int, Memory]],
        *,
        segment_bytes: int,
        group: str | None = None,
        lease_s: float = 60.0,
        ticket: str | None = None,
    ) -> bool:
        """Write pieces ``(offset, bytes)`` of an object of ``size`` bytes; whether all of it is written now.

        Pieces are whole segments of ``segment_bytes``. The object is readable, and sealed, once its last byte is there;
        it is given up when this connection ends, or ``lease_s`` passes, before that. Clients of one ``group`` write it
        together. Writing the same bytes again changes nothing.

        Raises:
            ConflictError: another group is writing the object; or other bytes were written there before, and it is
                given up.
            NotFoundError: the object was given up meanwhile.
            PoolFullError: no room.
            BadRequestError: a piece is not made of whole segments of the object, or two of them overlap.
        """
        views = pieces_of(pieces)
        return self._run(
            self._ops.write_ranges(
                key, size, views, segment_bytes=segment_bytes, group=group, lease_s=lease_s, ticket=ticket
            )
        )

    # --- names ---

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Which keys are sealed."""
        keys = keys_of(keys)
        here = self._existing(keys)
        return self._run(names.exists(keys)) if here is None else here

    def count_prefix(self, keys: Sequence[bytes]) -> PrefixCount:
        """How long the prefix of ``keys`` is that the pool holds. Leases nothing; any number of keys."""
        keys = keys_of(keys)
        here = self._counted(keys)
        return self._run(names.count_prefix(keys)) if here is None else here

    def delete(self, keys: Sequence[bytes]) -> int:
        """Forget objects; how many there were."""
        return self._run(names.delete(keys))

    def pin(self, keys: Sequence[bytes]) -> int:
        """Keep objects, whoever comes or goes, until `unpin`; how many of them there are."""
        return self._run(names.pin(keys))

    def unpin(self, keys: Sequence[bytes]) -> int:
        """Undo `pin`; how many of them there are."""
        return self._run(names.unpin(keys))

    def touch(self, keys: Sequence[bytes], ttl_s: float) -> int:
        """Give objects a new time to live, from now on; how many of them there are."""
        return self._run(names.touch(keys, ttl_s))

    def prefetch(self, keys: Sequence[bytes]) -> int:
        """Bring objects up from lower tiers in the background; how many it will be."""
        return self._run(names.prefetch(keys))

    def list_objects(self, prefix: bytes = b"", *, limit: int | None = None) -> list[ObjectInfo]:
        """Objects whose keys begin with ``prefix``, in no order. What comes and goes meanwhile may be missed."""
        return self._run(names.list_objects(prefix, limit))

    def purge(self) -> int:
        """Forget every object that nobody has leased or pinned; how many."""
        return self._run(names.purge())

    # --- segments ---

    def announce(
        self, objects: Sequence[m.Spec], *, group: str, lease_s: float, ticket: str | None = None
    ) -> m.Announced:
        """Ask for room for objects; see `kvrelay.wire.messages.Announce`."""
        return self._run(self._ops.announce(objects, group=group, lease_s=lease_s, ticket=ticket))

    def commit(
        self,
        parts: Sequence[StagePart],
        views: Sequence[memoryview],
        *,
        sums: Sequence[Sequence[int]] | None = None,
        final: bool = False,
    ) -> None:
        """Checksum (without ``sums``) and publish staged segments. NotFoundError: aborted.

        ``final``: all there will be from here.
        """
        self._run(self._ops.commit(parts, views, sums=sums, final=final))

    def abort(self, handles: Sequence[int]) -> None:
        """Give objects up."""
        self._run(self._ops.abort(handles))

    def disclaim(self, keys: Sequence[bytes], *, group: str) -> None:
        """Abort what ``group`` is writing of ``keys``: a connection of it will not do its share, announced or not."""
        self._run(self._ops.disclaim(keys, group=group))

    def match_prefix(
        self, keys: Sequence[bytes], *, lease_s: float = 0.0, unsealed: bool = True, sums: int = 0
    ) -> Prefix:
        """Find the longest prefix of ``keys`` that is present, leased for ``lease_s`` seconds (0: no lease).

        ``sums``: if all of it is sealed, with so many segments at most, nothing is left to `wait` for.
        """
        return self._run(self._ops.match_prefix(keys, lease_s=lease_s, unsealed=unsealed, sums=sums))

    def wait(self, prefix: Prefix, layers: int, *, timeout_s: float) -> int:
        """Wait for layers of a leased prefix; how many are whole. WriterLostError, DeadlineError, LeaseExpiredError."""
        return self._run(self._ops.wait(prefix, layers, timeout_s=timeout_s), extra_s=timeout_s)

    def fetch(self, prefix: Prefix, ranges: Sequence[m.Range], *, verify: bool = True) -> list[memoryview]:
        """Verified bytes of segments waited for. CorruptionError: they are damaged.

        Without ``verify`` the caller compares them with `Prefix.sums`, and calls `report_damage`.
        """
        return self._run(self._ops.fetch(prefix, ranges, verify=verify))

    def report_damage(self, prefix: Prefix, index: int) -> None:
        """The ``index``-th object does not match its checksums: raises what that means.

        Raises:
            LeaseExpiredError: the lease had run out: the bytes may be another object's by now.
            CorruptionError: they are damaged, and the pool knows.
        """
        self._run(self._ops.report_damage(prefix.lease, index))

    def release(self, prefix: Prefix) -> None:
        """End a lease. LeaseExpiredError: it had run out, drop what was read under it."""
        self._run(self._ops.release(prefix))

    # --- tickets, engines, statistics ---

    def open_ticket(self, ticket: str, deadline_s: float) -> None:
        """Open a ticket that this connection owns. ConflictError: it is open already."""
        self._run(desk.open_ticket(ticket, deadline_s))

    def seal_ticket(self, ticket: str) -> None:
        """Nothing more will be announced under a ticket. NotFoundError: it has ended."""
        self._run(desk.seal_ticket(ticket))

    def follow(self, ticket: str, key: bytes, timeout_s: float) -> m.Followed:
        """Wait for an object, complete or not, that is to be announced under a ticket; see `Follow`."""
        return self._run(desk.follow(ticket, key, timeout_s), extra_s=timeout_s)

    def end_ticket(self, ticket: str) -> None:
        """End a ticket. NotFoundError: it has ended."""
        self._run(desk.end_ticket(ticket))

    def post(self, ticket: str, note: bytes) -> None:
        """Leave a note for a ticket's owner. NotFoundError: it has ended."""
        self._run(desk.post(ticket, note))

    def collect(self, ticket: str, timeout_s: float) -> list[bytes]:
        """Take a ticket's notes, waiting up to ``timeout_s`` for the first."""
        return self._run(desk.collect(ticket, timeout_s), extra_s=timeout_s)

    def register(self, engine: str, role: str, namespace: str, facts: dict[str, str]) -> None:
        """Tell the pool which engine this connection belongs to."""
        self._run(desk.register(engine, role, namespace, facts))

    def engines(self) -> list[m.Engine]:
        """Which engines are registered."""
        return self._run(desk.engines())

    def stat(self) -> dict[str, int]:
        """The pool's gauges and counters; names in `kvrelay.pool.core.stats`."""
        return self._run(desk.stat())
