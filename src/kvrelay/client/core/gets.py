"""Reading whole objects, many at once."""

from __future__ import annotations

import contextlib
from array import array
from collections import deque
from typing import TYPE_CHECKING

from kvrelay.client.core.batches import LEASE_S, Batch, ask_ahead, settle
from kvrelay.client.core.blocks import Blocks
from kvrelay.client.core.given import keys_of
from kvrelay.client.core.session import AbandonedError, Ask, Call
from kvrelay.client.core.steps import answer, begin
from kvrelay.errors import BadRequestError, KvRelayError, LeaseExpiredError, ProtocolError
from kvrelay.wire import limits
from kvrelay.wire import messages as m

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvrelay.client.core.blocks import Direct, Mover
    from kvrelay.client.core.segments import Segments
    from kvrelay.client.core.steps import Operation


class Getting:
    """Gets of one connection. ``direct``: the way to the arena, None where bytes travel in frames."""

    direct: Direct | None
    _mover: Mover
    _segments: Segments
    _guess: int
    """Size of the last object whose size was not known."""

    def get(self, keys: Sequence[bytes], blocks: Blocks, *, wait_s: float = 0.0) -> Operation[int]:
        """Read objects into blocks of their sizes, up to the first that is not there; how many were read.

        Raises:
            CorruptionError: bytes do not match their checksum. The pool has been told.
            LeaseExpiredError: reading took longer than the lease; nothing that was read may be used.
            BadRequestError: a block is of another size than its object.
        """
        keys = keys_of(keys)
        if len(keys) != len(blocks):
            raise BadRequestError(f"{len(blocks)} buffers for {len(keys)} keys")
        done = 0
        while done < len(keys):
            rest, into = keys[done:], blocks.cut(done, len(blocks))
            if (direct := self.direct) is not None:
                got, segmented = yield from self._get_direct(direct, rest, into, wait_s)
            else:
                got, segmented = yield from self._get_frames(rest, into, wait_s)
            done += got
            if not segmented:
                break
            end = min(done + segmented, len(keys))
            more = yield from self._segments.read_segmented(keys[done:end], blocks.cut(done, end))
            if not more:
                break
            done += more
        return done

    def _get_direct(
        self, direct: Direct, keys: Sequence[bytes], blocks: Blocks, wait_s: float
    ) -> Operation[tuple[int, int]]:
        """Locate, copy and verify, Release: batch by batch, with the next located ahead.

        How many were read, and how many objects of several segments come next.
        """

        def locate(start: int, stop: int) -> Ask:
            return Ask(m.Locate(0, list(keys[start:stop]), LEASE_S, wait_s), m.Located)

        cuts = blocks.batches()
        asked: deque[Batch] = deque()
        releases: deque[Call] = deque()
        lease = done = 0
        segmented = 0
        try:
            yield from ask_ahead(locate, cuts, asked)
            while asked:
                batch = asked.popleft()
                located = yield from answer(batch.call, m.Located)
                lease = located.lease
                whole = located.count == batch.stop - batch.start
                if done == batch.start and located.count:
                    into = blocks.cut(batch.start, batch.start + located.count)
                    _check_columns(located, batch, into)
                    bad = yield from direct.read(located.offsets, into, located.sums)
                    if bad >= 0:
                        yield from self._segments.report_damage(lease, bad)
                    done += located.count
                if done == batch.start + located.count:
                    segmented = located.segmented
                if lease:
                    releases.append((yield from begin(Ask(m.Release(0, lease)), more=True)))
                    lease = 0
                if whole and done == batch.stop:
                    yield from ask_ahead(locate, cuts, asked)
            while releases:
                yield from answer(releases.popleft(), m.Done)
        except KvRelayError as error:
            yield from self._give_up_leases(asked, lease, wait=not isinstance(error, AbandonedError))
            raise
        return done, segmented

    def _give_up_leases(self, asked: deque[Batch], lease: int, *, wait: bool) -> Operation[None]:
        leases = [lease] if lease else []
        with contextlib.suppress(KvRelayError):
            for batch in asked:
                if wait or batch.call.finished:
                    with contextlib.suppress(KvRelayError):
                        located = yield from answer(batch.call, m.Located)
                        leases += [located.lease] if located.lease else []
            for held in leases:
                yield from begin(Ask(m.Release(0, held)))

    def _get_frames(self, keys: Sequence[bytes], blocks: Blocks, wait_s: float) -> Operation[tuple[int, int]]:
        """One `Get` a batch, checksummed while it arrives; what is returned is as of `_get_direct`."""

        def ask(start: int, stop: int) -> Ask:
            piece = blocks.cut(start, stop)
            get = m.Get(0, list(keys[start:stop]), piece.sizes.tobytes(), wait_s)
            return Ask(get, m.Got, targets=piece.views())

        cuts = blocks.batches()
        asked: deque[Batch] = deque()
        done = 0
        segmented = 0
        try:
            yield from ask_ahead(ask, cuts, asked)
            while asked:
                batch = asked.popleft()
                got = yield from answer(batch.call, m.Got)
                if done != batch.start:
                    continue  # behind a hole
                if got.count > batch.stop - batch.start or len(got.sums) != 8 * got.count:
                    raise ProtocolError(f"{got.count} objects came for {batch.stop - batch.start} keys")
                if got.count < batch.stop - batch.start and got.size:
                    index = done + got.count
                    raise BadRequestError(f"object {index} has {got.size} bytes, its buffer {blocks.sizes[index]}")
                if got.count == batch.stop - batch.start:
                    yield from ask_ahead(ask, cuts, asked)
                landing = batch.call.landing
                if landing is not None and landing.sums == got.sums:
                    done += got.count
                else:
                    done += yield from self._verified(keys, blocks.cut(done, done + got.count), done, got.sums)
                segmented = got.segmented if done == batch.start + got.count else 0
        except KvRelayError as error:
            yield from settle(asked, error)
            raise
        return done, segmented

    def _verified(self, keys: Sequence[bytes], blocks: Blocks, start: int, sums: bytes) -> Operation[int]:
        """How many blocks, from the first on, are right. A damaged one is read once more, under a lease.

        Raises:
            CorruptionError: it is damaged in the pool, which has been told.
        """
        right = 0
        while right < len(blocks):
            rest = blocks.cut(right, len(blocks))
            bad = self._mover.check(rest, sums[8 * right :])
            if bad < 0:
                return len(blocks)
            right += bad
            again = yield from self._segments.read_again(keys[start + right], blocks.view(right))
            if not again:
                return right
            right += 1
        return right

    def get_one(self, key: bytes, *, wait_s: float = 0.0) -> Operation[bytes | None]:
        """Read one object of unknown size; None when it is not there."""
        direct = self.direct
        if direct is None:
            return (yield from self._get_one_frame(key, wait_s))
        located = yield Ask(m.Locate(0, [key], LEASE_S, wait_s), m.Located)
        assert isinstance(located, m.Located)
        if not located.count:
            return (yield from self._segments.get_segmented(key)) if located.segmented else None
        try:
            size = int.from_bytes(located.sizes, "little")
            if located.count != 1 or not 0 < size <= limits.MAX_OBJECT_BYTES:
                raise ProtocolError(f"the pool speaks of {located.count} objects for one key, of {size} bytes")
            data = bytearray(size)
            into = Blocks.of_buffers([memoryview(data)])
            bad = yield from direct.read(located.offsets, into, located.sums)
            if bad >= 0:
                yield from self._segments.report_damage(located.lease, bad)
        except KvRelayError:
            with contextlib.suppress(KvRelayError):
                yield from begin(Ask(m.Release(0, located.lease)))
            raise
        yield Ask(m.Release(0, located.lease))
        return bytes(data)

    def _get_one_frame(self, key: bytes, wait_s: float) -> Operation[bytes | None]:
        """Guess the size; the pool tells it where that is wrong."""
        for _ in range(4):
            data = bytearray(self._guess)
            into = Blocks.of_buffers([memoryview(data)])
            ask = Ask(m.Get(0, [key], into.sizes.tobytes(), wait_s), m.Got, targets=into.views())
            got = yield ask
            assert isinstance(got, m.Got)
            if got.count:
                right = yield from self._verified([key], into, 0, got.sums)
                return bytes(data) if right else None
            if not got.size:
                return (yield from self._segments.get_segmented(key)) if got.segmented else None
            if got.size > limits.MAX_OBJECT_BYTES:
                raise ProtocolError(f"the pool speaks of an object of {got.size} bytes")
            self._guess = got.size
        raise LeaseExpiredError(f"object {key.hex()} was replaced by one of another size each time it was asked for")


def _check_columns(located: m.Located, batch: Batch, into: Blocks) -> None:
    if located.count > batch.stop - batch.start or not (
        len(located.offsets) == len(located.sizes) == len(located.sums) == 8 * located.count
    ):
        raise ProtocolError(f"{located.count} objects came for {batch.stop - batch.start} keys")
    wanted = into.sizes.tobytes()
    if located.sizes != wanted:
        sizes = array("Q")
        sizes.frombytes(located.sizes)
        index = next(i for i, (size, want) in enumerate(zip(sizes, into.sizes, strict=True)) if size != want)
        raise BadRequestError(f"object {batch.start + index} has {sizes[index]} bytes, its buffer {into.sizes[index]}")
