"""The asyncio shell: a pool client for event loops."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvrelay.client.aio_link import AsyncLink
from kvrelay.client.blocking import WAIT_S
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


class AsyncPoolClient(AsyncLink):
    """A connection to one pool, for one event loop; any number of tasks may use it at once.

    Methods, results and errors are those of `kvrelay.client.blocking.PoolClient`. After a `PoolUnavailableError` it is
    closed. So it is when a task is cancelled while it moves bytes over TCP: use connections of their own for those.
    """

    # --- whole objects ---

    async def put(self, key: bytes, data: Memory, *, ttl_s: float = 0.0) -> Stored:
        """Store one whole object: `Stored.STORED`, `PRESENT` or `BUSY`. PoolFullError: no room. See `put_many`."""
        block = Blocks.of_buffers([bytes_of_tensor(data)])
        return (await self._run(self._ops.put_blocks([key], block, ttl_s, None, partly=False))).of(0)

    async def put_many(
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
        return await self._run(self._ops.put_blocks(keys, blocks, ttl_s, ticket, partly=partly))

    async def get(self, key: bytes, *, wait_s: float = WAIT_S) -> bytes | None:
        """Read one whole object; None when it is not there. Errors as for `get_many`."""
        return await self._run(self._ops.whole.get_one(key, wait_s=wait_s), extra_s=wait_s)

    async def get_many(self, keys: Sequence[bytes], into: Sequence[Memory], *, wait_s: float = WAIT_S) -> int:
        """Read whole objects into buffers, up to the first that is missing; how many were read.

        Buffers behind those may hold anything. ``wait_s``: how long to wait for what a lower tier holds.

        Raises:
            CorruptionError: bytes do not match their checksum. The pool has been told.
            LeaseExpiredError: it took longer than the lease; nothing that was read may be used.
            BadRequestError: a buffer is of another size than its object, or scattered, or read-only.
        """
        blocks = Blocks.of_buffers(all_bytes_of(into), writable=True)
        return await self._run(self._ops.whole.get(keys, blocks, wait_s=wait_s), extra_s=wait_s)

    async def put_blocks(
        self, keys: Sequence[bytes], blocks: Blocks, *, ttl_s: float = 0.0, partly: bool = False
    ) -> Puts:
        """Store memory that is described by columns, under ``keys``. As `put_many`."""
        return await self._run(self._ops.put_blocks(keys, blocks, ttl_s, None, partly=partly))

    async def get_blocks(self, keys: Sequence[bytes], blocks: Blocks, *, wait_s: float = WAIT_S) -> int:
        """Read into memory that is described by columns; how many were read. As `get_many`."""
        return await self._run(self._ops.whole.get(keys, blocks, wait_s=wait_s), extra_s=wait_s)

    async def write_cache(
        self, tensor: Memory, blocks: Sequence[tuple[bytes, int]], page_size: int, *, ttl_s: float = 0.0
    ) -> Puts:
        """Store pages of a tensor: for each ``(key, offset)``, ``page_size`` elements from element ``offset`` on.

        A page is readable by everybody when this returns. Errors as for `put_many`.
        """
        keys, pages = pages_of(tensor, blocks, page_size)
        return await self._run(self._ops.put_blocks(keys, pages, ttl_s, None, partly=False))

    async def read_cache(
        self, tensor: Memory, blocks: Sequence[tuple[bytes, int]], page_size: int, *, wait_s: float = WAIT_S
    ) -> None:
        """Read pages into a tensor: for each ``(key, offset)``, ``page_size`` elements to element ``offset`` on.

        Raises:
            NotFoundError: a page is not there; those before it were read.
            CorruptionError, LeaseExpiredError, BadRequestError: as for `get_many`.
        """
        keys, pages = pages_of(tensor, blocks, page_size, writable=True)
        await self._run(self._ops.read_pages(keys, pages, wait_s=wait_s), extra_s=wait_s)

    async def sync(self) -> None:
        """Nothing is ever left to wait for: `write_cache` and `read_cache` return when they are done.

        Raises:
            PoolUnavailableError: the connection has ended.
        """
        await self._run(desk.stat())

    # --- ranges of one object ---

    async def read_ranges(self, key: bytes, ranges: Sequence[tuple[int, int]]) -> list[bytes] | None:
        """Verified bytes of ranges ``(offset, size)`` of a sealed object; None when it is not there.

        Whole segments are read and verified, so a range costs the segments it touches.
        """
        return await self._run(self._ops.read_ranges(key, ranges))

    async def write_ranges(
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
            ConflictError: another group is writing the object, or other bytes were written there before.
            NotFoundError: the object was given up meanwhile.
            PoolFullError: no room.
            BadRequestError: a piece is not made of whole segments of the object, or two of them overlap.
        """
        views = pieces_of(pieces)
        return await self._run(
            self._ops.write_ranges(
                key, size, views, segment_bytes=segment_bytes, group=group, lease_s=lease_s, ticket=ticket
            )
        )

    # --- names ---

    async def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Which keys are sealed."""
        keys = keys_of(keys)
        here = self._existing(keys)
        return await self._run(names.exists(keys)) if here is None else await self._after_others(here)

    async def count_prefix(self, keys: Sequence[bytes]) -> PrefixCount:
        """How long the prefix of ``keys`` is that the pool holds. Leases nothing; any number of keys."""
        keys = keys_of(keys)
        here = self._counted(keys)
        return await self._run(names.count_prefix(keys)) if here is None else await self._after_others(here)

    async def delete(self, keys: Sequence[bytes]) -> int:
        """Forget objects; how many there were."""
        return await self._run(names.delete(keys))

    async def pin(self, keys: Sequence[bytes]) -> int:
        """Keep objects, whoever comes or goes, until `unpin`; how many of them there are."""
        return await self._run(names.pin(keys))

    async def unpin(self, keys: Sequence[bytes]) -> int:
        """Undo `pin`; how many of them there are."""
        return await self._run(names.unpin(keys))

    async def touch(self, keys: Sequence[bytes], ttl_s: float) -> int:
        """Give objects a new time to live, from now on; how many of them there are."""
        return await self._run(names.touch(keys, ttl_s))

    async def prefetch(self, keys: Sequence[bytes]) -> int:
        """Bring objects up from lower tiers in the background; how many it will be."""
        return await self._run(names.prefetch(keys))

    async def list_objects(self, prefix: bytes = b"", *, limit: int | None = None) -> list[ObjectInfo]:
        """Objects whose keys begin with ``prefix``, in no order. What comes and goes meanwhile may be missed."""
        return await self._run(names.list_objects(prefix, limit))

    async def purge(self) -> int:
        """Forget every object that nobody has leased or pinned; how many."""
        return await self._run(names.purge())

    # --- segments ---

    async def announce(
        self, objects: Sequence[m.Spec], *, group: str, lease_s: float, ticket: str | None = None
    ) -> m.Announced:
        """Ask for room for objects; see `kvrelay.wire.messages.Announce`."""
        return await self._run(self._ops.announce(objects, group=group, lease_s=lease_s, ticket=ticket))

    async def commit(
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
        await self._run(self._ops.commit(parts, views, sums=sums, final=final))

    async def abort(self, handles: Sequence[int]) -> None:
        """Give objects up."""
        await self._run(self._ops.abort(handles))

    async def disclaim(self, keys: Sequence[bytes], *, group: str) -> None:
        """Abort what ``group`` is writing of ``keys``: a connection of it will not do its share, announced or not."""
        await self._run(self._ops.disclaim(keys, group=group))

    async def match_prefix(
        self, keys: Sequence[bytes], *, lease_s: float = 0.0, unsealed: bool = True, sums: int = 0
    ) -> Prefix:
        """Find the longest prefix of ``keys`` that is present, leased for ``lease_s`` seconds (0: no lease).

        ``sums``: if all of it is sealed, with so many segments at most, nothing is left to `wait` for.
        """
        return await self._run(self._ops.match_prefix(keys, lease_s=lease_s, unsealed=unsealed, sums=sums))

    async def wait(self, prefix: Prefix, layers: int, *, timeout_s: float) -> int:
        """Wait for layers of a leased prefix; how many are whole. WriterLostError, DeadlineError, LeaseExpiredError."""
        return await self._run(self._ops.wait(prefix, layers, timeout_s=timeout_s), extra_s=timeout_s)

    async def fetch(self, prefix: Prefix, ranges: Sequence[m.Range], *, verify: bool = True) -> list[memoryview]:
        """Verified bytes of segments waited for. CorruptionError: they are damaged.

        Without ``verify`` the caller compares them with `Prefix.sums`, and calls `report_damage`.
        """
        return await self._run(self._ops.fetch(prefix, ranges, verify=verify))

    async def report_damage(self, prefix: Prefix, index: int) -> None:
        """The ``index``-th object does not match its checksums: raises what that means.

        Raises:
            LeaseExpiredError: the lease had run out: the bytes may be another object's by now.
            CorruptionError: they are damaged, and the pool knows.
        """
        await self._run(self._ops.report_damage(prefix.lease, index))

    async def release(self, prefix: Prefix) -> None:
        """End a lease. LeaseExpiredError: it had run out, drop what was read under it."""
        await self._run(self._ops.release(prefix))

    # --- tickets, engines, statistics ---

    async def open_ticket(self, ticket: str, deadline_s: float) -> None:
        """Open a ticket that this connection owns. ConflictError: it is open already."""
        await self._run(desk.open_ticket(ticket, deadline_s))

    async def seal_ticket(self, ticket: str) -> None:
        """Nothing more will be announced under a ticket. NotFoundError: it has ended."""
        await self._run(desk.seal_ticket(ticket))

    async def follow(self, ticket: str, key: bytes, timeout_s: float) -> m.Followed:
        """Wait for an object, complete or not, that is to be announced under a ticket; see `Follow`."""
        return await self._run(desk.follow(ticket, key, timeout_s), extra_s=timeout_s)

    async def end_ticket(self, ticket: str) -> None:
        """End a ticket. NotFoundError: it has ended."""
        await self._run(desk.end_ticket(ticket))

    async def post(self, ticket: str, note: bytes) -> None:
        """Leave a note for a ticket's owner. NotFoundError: it has ended."""
        await self._run(desk.post(ticket, note))

    async def collect(self, ticket: str, timeout_s: float) -> list[bytes]:
        """Take a ticket's notes, waiting up to ``timeout_s`` for the first."""
        return await self._run(desk.collect(ticket, timeout_s), extra_s=timeout_s)

    async def register(self, engine: str, role: str, namespace: str, facts: dict[str, str]) -> None:
        """Tell the pool which engine this connection belongs to."""
        await self._run(desk.register(engine, role, namespace, facts))

    async def engines(self) -> list[m.Engine]:
        """Which engines are registered."""
        return await self._run(desk.engines())

    async def stat(self) -> dict[str, int]:
        """The pool's gauges and counters; names in `kvrelay.pool.core.stats`."""
        return await self._run(desk.stat())
