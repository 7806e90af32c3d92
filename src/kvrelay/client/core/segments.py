"""Objects written and read segment by segment: a layer can be read while the next is still being computed."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from kvrelay.client.core.given import keys_of, whole_number
from kvrelay.client.core.prefix import Prefix, StagePart
from kvrelay.client.core.session import Ask
from kvrelay.errors import BadRequestError, CorruptionError, KvRelayError, LeaseExpiredError
from kvrelay.wire import limits
from kvrelay.wire import messages as m

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvrelay.client.core.blocks import Blocks
    from kvrelay.client.core.steps import Operation

GET_LEASE_S = 60.0


class Segments:
    """What one connection does with segments.

    ``segment_sums``: XXH3-64 of each segment of a view, given a segment's size.
    ``arena``: the mapped arena, None on a connection without shared memory.
    ``reuse_staging``: without shared memory, one buffer serves every `stage` and `fetch`.
    """

    def __init__(
        self, segment_sums: Callable[[memoryview, int], list[int]], group: str, *, reuse_staging: bool
    ) -> None:
        self._reuse_staging = reuse_staging
        self.arena: memoryview | None = None
        self.group = group
        self._sums = segment_sums
        self._staging = memoryview(bytearray())
        self._staged: list[memoryview] = []

    # --- writing ---

    def announce(
        self, objects: Sequence[m.Spec], *, group: str, lease_s: float, ticket: str | None
    ) -> Operation[m.Announced]:
        """Ask for room; see `Announce`."""
        reply = yield Ask(m.Announce(0, group, list(objects), lease_s, ticket), m.Announced)
        assert isinstance(reply, m.Announced)
        return reply

    def stage(self, parts: Sequence[StagePart]) -> list[memoryview]:
        """Bytes to fill, one view a part: in the arena itself, or in a buffer that `commit` sends.

        Where one buffer serves all, the next `stage` or `fetch` releases the views: using them then is an error.
        """
        arena = self.arena
        if arena is not None:
            views = []
            for part in parts:
                size = part.segment_bytes
                start = part.grant.offset + part.first * size
                views.append(arena[start : start + part.count * size])
            return views
        return self._stage_sizes([part.size for part in parts])

    def _stage_sizes(self, sizes: Sequence[int]) -> list[memoryview]:
        total = sum(sizes)
        self._end_staging()
        staging = self._staging
        if staging.nbytes < total:
            staging = memoryview(bytearray(total))
        views: list[memoryview] = []
        at = 0
        for size in sizes:
            views.append(staging[at : at + size])
            at += size
        if self._reuse_staging:
            self._staging, self._staged = staging, views
        return views

    def _end_staging(self) -> None:
        """Release the views handed out last; a buffer that somebody still looks into is left to them."""
        staged, self._staged = self._staged, []
        try:
            for view in staged:
                view.release()
        except BufferError:
            self._staging = memoryview(bytearray())

    def commit(
        self,
        parts: Sequence[StagePart],
        views: Sequence[memoryview],
        *,
        sums: Sequence[Sequence[int]] | None = None,
        final: bool = False,
    ) -> Operation[None]:
        """Publish staged segments; an object whose last segment this is becomes sealed.

        ``sums``: XXH3-64 of every segment of every part, where the caller has computed them. ``final``: this client
        will write no more of these objects, though others may.

        Raises:
            NotFoundError: an object was aborted meanwhile. All of them are given up then: the pool is told that their
                bytes are left alone.
        """
        if not parts:
            return
        if sums is None:
            sums = [self._sums(view, part.segment_bytes) for part, view in zip(parts, views, strict=True)]
        described = [
            m.Part(part.grant.handle, part.first, list(of_part)) for part, of_part in zip(parts, sums, strict=True)
        ]
        try:
            if self.arena is not None:
                yield Ask(m.Written(0, described, final))
            else:
                yield Ask(m.Write(0, described), payload=views)
        except KvRelayError:
            yield from self.abort([part.grant.handle for part in parts])
            raise

    def abort(self, handles: Sequence[int]) -> Operation[None]:
        """Give objects up."""
        if handles:
            yield Ask(m.Abort(0, list(dict.fromkeys(handles))))

    def disclaim(self, keys: Sequence[bytes], *, group: str) -> Operation[None]:
        """Say that one of a group's writers will not do its share; see `Disclaim`."""
        if keys:
            yield Ask(m.Disclaim(0, group, list(dict.fromkeys(keys))))

    # --- reading ---

    def match_prefix(
        self, keys: Sequence[bytes], *, lease_s: float, unsealed: bool, sums: int = 0
    ) -> Operation[Prefix]:
        """Find the longest prefix of ``keys``; see `Match`."""
        keys = keys_of(keys)
        if not keys:
            return Prefix(m.Matched(0, 0, 0, []))
        reply = yield Ask(m.Match(0, list(keys), lease_s, unsealed, sums=sums), m.Matched)
        assert isinstance(reply, m.Matched)
        return Prefix(reply)

    def wait(self, prefix: Prefix, layers: int, *, timeout_s: float) -> Operation[int]:
        """Wait until all objects of a leased prefix have ``layers`` whole layers; how many they have.

        Raises:
            WriterLostError: one was aborted.
            DeadlineError: they were not written in time.
            LeaseExpiredError: the lease ran out meanwhile.
        """
        layers = whole_number(layers, "layers")
        while prefix.ready < layers:
            reply = yield Ask(m.Wait(0, prefix.lease, layers, timeout_s, prefix.ready), m.Ready)
            assert isinstance(reply, m.Ready)
            prefix.note_ready(reply.layers, reply.sums)
        return prefix.ready

    def fetch(
        self, prefix: Prefix, ranges: Sequence[m.Range], *, shared: bool = True, verify: bool = True
    ) -> Operation[list[memoryview]]:
        """Verified bytes of segments waited for, one view a range.

        Over shared memory the views are the arena itself, valid while the lease is (`release` tells); else they are
        staged, as by `stage`, or in memory of their own where ``shared`` is False. Without ``verify`` it is the caller
        who compares them with `Prefix.sums`, and calls `report_damage`.

        Raises:
            CorruptionError: bytes do not match their checksum. The pool has been told.
            BadRequestError: a range is empty, not within its object, or has not been waited for.
            LeaseExpiredError: the prefix was released.
        """
        if not ranges:
            return []
        for span in ranges:
            prefix.sums(span)
        if not prefix.lease:
            raise LeaseExpiredError("the prefix has no lease, or was released: its bytes may be another object's")
        arena = self.arena
        if arena is not None:
            views = []
            for span in ranges:
                size = prefix.segment_bytes(span.index)
                start = prefix.views[span.index].offset + span.first * size
                views.append(arena[start : start + span.count * size])
        else:
            sizes = [span.count * prefix.segment_bytes(span.index) for span in ranges]
            views = self._stage_sizes(sizes) if shared else [memoryview(bytearray(size)) for size in sizes]
            yield Ask(m.Read(0, prefix.lease, list(ranges)), m.Data, targets=views)
        for span, view in zip(ranges, views, strict=True) if verify else ():
            yield from self._verify(prefix, span, view)
        return views

    def _verify(self, prefix: Prefix, span: m.Range, view: memoryview) -> Operation[None]:
        """Compare bytes with their checksums.

        They can be wrong because the lease ran out and they are another's by now, or because they are damaged.
        """
        if self._sums(view, prefix.segment_bytes(span.index)) == prefix.sums(span).tolist():
            return
        try:
            yield Ask(m.Corrupt(0, prefix.lease, span.index))
        except LeaseExpiredError:
            raise LeaseExpiredError(f"lease {prefix.lease} ran out while its objects were being read") from None
        raise CorruptionError(
            f"object {span.index} of lease {prefix.lease}: segments {span.first} to {span.first + span.count - 1} do "
            "not match their checksums"
        )

    def release(self, prefix: Prefix) -> Operation[None]:
        """End a lease.

        Raises:
            LeaseExpiredError: it had run out: drop what was read under it.
        """
        if prefix.lease:
            lease, prefix.lease = prefix.lease, 0
            yield Ask(m.Release(0, lease))

    # --- whole objects of any number of segments ---

    def report_damage(self, lease: int, index: int) -> Operation[None]:
        """Tell the pool that an object of a lease does not match its checksum, and raise.

        Raises:
            LeaseExpiredError: the lease had run out: the bytes may be another object's by now.
            CorruptionError: they are damaged.
        """
        try:
            yield Ask(m.Corrupt(0, lease, index))
        except LeaseExpiredError:
            raise LeaseExpiredError(f"lease {lease} ran out while its objects were being read") from None
        raise CorruptionError(f"object {index} of lease {lease} does not match its checksum")

    def read_segmented(self, keys: Sequence[bytes], blocks: Blocks) -> Operation[int]:
        """Read objects of several segments, up to the first key that is not one; how many were read."""
        prefix = yield from self.match_prefix(keys[: limits.MAX_KEYS], lease_s=GET_LEASE_S, unsealed=False)
        views = prefix.views
        run = next((n for n, view in enumerate(views) if view.layers * view.segments == 1), len(views))
        try:
            for index in range(run):
                if views[index].size != blocks.sizes[index]:
                    raise BadRequestError(
                        f"object {index} has {views[index].size} bytes, its buffer {blocks.sizes[index]}"
                    )
            if run:
                yield from self._read_into(prefix, [blocks.view(index) for index in range(run)])
        except KvRelayError:
            with contextlib.suppress(KvRelayError):
                yield from self.release(prefix)
            raise
        yield from self.release(prefix)
        return run

    def get_segmented(self, key: bytes) -> Operation[bytes | None]:
        """Read one object of several segments; None when there is none of that name."""
        prefix = yield from self.match_prefix([key], lease_s=GET_LEASE_S, unsealed=False)
        if not prefix:
            return None
        data = bytearray(prefix.views[0].size)
        return bytes(data) if (yield from self._read_and_release(prefix, memoryview(data))) else None

    def read_again(self, key: bytes, target: memoryview) -> Operation[bool]:
        """Read an object that came damaged once more, under a lease; whether it is still there.

        Raises:
            CorruptionError: it is damaged in the pool, which has been told.
        """
        prefix = yield from self.match_prefix([key], lease_s=GET_LEASE_S, unsealed=False)
        if not prefix or prefix.views[0].size != target.nbytes:
            yield from self.release(prefix)
            return False
        return (yield from self._read_and_release(prefix, target))

    def _read_and_release(self, prefix: Prefix, target: memoryview) -> Operation[bool]:
        try:
            yield from self._read_into(prefix, [target])
        except KvRelayError:
            with contextlib.suppress(KvRelayError):
                yield from self.release(prefix)
            raise
        yield from self.release(prefix)
        return True

    def _read_into(self, prefix: Prefix, targets: Sequence[memoryview]) -> Operation[None]:
        """Read the first objects of a sealed prefix, whole, and verify them."""
        ranges = [m.Range(i, 0, view.layers * view.segments) for i, view in enumerate(prefix.views[: len(targets)])]
        yield from self.wait(prefix, prefix.layers, timeout_s=0.0)
        arena = self.arena
        if arena is None:
            yield Ask(m.Read(0, prefix.lease, ranges), m.Data, targets=targets)
        else:
            for view, target in zip(prefix.views, targets, strict=False):
                target[:] = arena[view.offset : view.offset + target.nbytes]
        for span, target in zip(ranges, targets, strict=True):
            yield from self._verify(prefix, span, target)
