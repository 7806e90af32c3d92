"""Storing whole objects, many at once."""

from __future__ import annotations

import contextlib
from array import array
from collections import deque
from typing import TYPE_CHECKING

from msgspec import Struct

from kvrelay.client.core.batches import DEPTH, LEASE_S, Batch, ask_ahead, settle
from kvrelay.client.core.given import keys_of
from kvrelay.client.core.session import AbandonedError, Ask, Call
from kvrelay.client.core.steps import answer, begin
from kvrelay.errors import (
    BadRequestError,
    ConflictError,
    CorruptionError,
    KvRelayError,
    PoolFullError,
    PoolUnavailableError,
    ProtocolError,
)
from kvrelay.wire import limits
from kvrelay.wire import messages as m
from kvrelay.wire.bulk import Stored

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvrelay.client.core.blocks import Blocks, Direct, Mover
    from kvrelay.client.core.steps import Operation


class Puts(Struct, frozen=True):
    """What became of every key of a put: ``states`` holds one `Stored` a key, as a byte.

    ``why``: of those that are `Stored.FULL`, the bound their tenant reached; empty if none was.
    """

    states: bytes
    why: str = ""

    def count(self, state: Stored) -> int:
        """How many keys ended so."""
        return self.states.count(state)

    def of(self, index: int) -> Stored:
        """What became of one key."""
        return Stored(self.states[index])


class _Told:
    """What the pool has said so far of the keys of a put."""

    def __init__(self, keys: int) -> None:
        self.states = bytearray(keys)
        self.why = ""

    def take(self, start: int, stop: int, reply: m.RoomGiven | m.PutDone) -> None:
        """Note what it said of keys ``start`` to ``stop``."""
        if len(reply.states) != stop - start:
            raise ProtocolError(f"{len(reply.states)} states came for {stop - start} keys")
        self.states[start:stop] = reply.states
        self.why = self.why or reply.why


class Putting:
    """Puts of one connection. ``direct``: the way to the arena, None where bytes travel in frames."""

    direct: Direct | None
    _mover: Mover

    def put(
        self, keys: Sequence[bytes], blocks: Blocks, *, ttl_s: float = 0.0, ticket: str | None = None
    ) -> Operation[Puts]:
        """Store every block under its key. Keys the pool holds, or another is writing, are left alone.

        Raises:
            NotFoundError: objects were given up while they were written (deleted, or too slow); not stored.
        """
        keys = keys_of(keys)
        if len(keys) != len(blocks):
            raise BadRequestError(f"{len(blocks)} blocks for {len(keys)} keys")
        told = _Told(len(keys))
        if (direct := self.direct) is not None:
            yield from self._put_direct(direct, keys, blocks, told, ttl_s, ticket)
        else:
            yield from self._put_frames(keys, blocks, told, ttl_s, ticket)
        return Puts(bytes(told.states), told.why)

    def _put_direct(
        self,
        direct: Direct,
        keys: Sequence[bytes],
        blocks: Blocks,
        told: _Told,
        ttl_s: float,
        ticket: str | None,
    ) -> Operation[None]:
        """Room, copy, Fill: batch by batch, with room for the next asked for ahead."""
        sizes = memoryview(blocks.sizes.tobytes())

        def room(start: int, stop: int) -> Ask:
            column = bytes(sizes[8 * start : 8 * stop])
            return Ask(m.Room(0, list(keys[start:stop]), column, LEASE_S, ttl_s, ticket), m.RoomGiven)

        cuts = blocks.batches()
        asked: deque[Batch] = deque()
        fills: deque[tuple[int, Call]] = deque()
        open_batches: list[int] = []
        try:
            yield from ask_ahead(room, cuts, asked)
            while asked:
                batch = asked.popleft()
                given = yield from answer(batch.call, m.RoomGiven)
                if given.batch:
                    open_batches.append(given.batch)
                told.take(batch.start, batch.stop, given)
                if len(given.offsets) != 8 * len(given.states):
                    raise ProtocolError(f"{len(given.offsets)} bytes of places came for {len(given.states)} keys")
                if given.batch:
                    chosen, offsets = _granted(blocks.cut(batch.start, batch.stop), given)
                    sums = yield from direct.write(chosen, offsets)
                    fill = yield from begin(Ask(m.Fill(0, given.batch, sums)), more=True)
                    fills.append((given.batch, fill))
                yield from ask_ahead(room, cuts, asked)
            while fills:
                number, call = fills[0]
                yield from answer(call, m.Done)
                fills.popleft()
                open_batches.remove(number)
        except KvRelayError as error:
            yield from self._give_up_rooms(asked, fills, open_batches, error)
            raise

    def _give_up_rooms(
        self, asked: deque[Batch], fills: deque[tuple[int, Call]], open_batches: list[int], error: KvRelayError
    ) -> Operation[None]:
        """Leave nothing half done: what was filled stays, what was not is given up."""
        if isinstance(error, PoolUnavailableError):
            return  # the connection ends, and with it what it wrote; bytes may still be on their way
        wait = not isinstance(error, AbandonedError)
        with contextlib.suppress(KvRelayError):
            for batch in asked:
                if wait or batch.call.finished:
                    with contextlib.suppress(KvRelayError):
                        given = yield from answer(batch.call, m.RoomGiven)
                        if given.batch:
                            open_batches.append(given.batch)
            for number, call in fills:
                if wait:
                    with contextlib.suppress(KvRelayError):
                        yield from answer(call, m.Done)
                        open_batches.remove(number)
                else:
                    open_batches.remove(number)
            if open_batches:
                yield from begin(Ask(m.Abort(0, open_batches)))

    def _put_frames(
        self, keys: Sequence[bytes], blocks: Blocks, told: _Told, ttl_s: float, ticket: str | None
    ) -> Operation[None]:
        """One `Put` a batch, checksummed while it is sent."""
        sent: deque[Batch] = deque()

        def take() -> Operation[None]:
            batch = sent.popleft()
            done = yield from answer(batch.call, m.PutDone)
            told.take(batch.start, batch.stop, done)

        try:
            for start, stop in blocks.batches():
                piece = blocks.cut(start, stop)
                behind = sum(piece.sizes) + 8 * len(piece) <= limits.MAX_PAYLOAD_BYTES
                sums = b"" if behind else self._mover.sums(piece)
                put = m.Put(0, list(keys[start:stop]), piece.sizes.tobytes(), sums, ttl_s, ticket)
                call = yield from begin(Ask(put, m.PutDone, payload=piece.views(), sums_behind=behind))
                sent.append(Batch(start, stop, call))
                if len(sent) == DEPTH:
                    yield from take()
            while sent:
                yield from take()
        except KvRelayError as error:
            yield from settle(sent, error)
            raise


def _granted(blocks: Blocks, given: m.RoomGiven) -> tuple[Blocks, bytes]:
    """The blocks there is room for, and where."""
    if not given.states.strip(b"\0"):
        return blocks, given.offsets
    chosen = [index for index, state in enumerate(given.states) if state == Stored.STORED]
    offsets = array("Q")
    offsets.frombytes(given.offsets)
    return blocks.pick(chosen), array("Q", [offsets[index] for index in chosen]).tobytes()


def raise_unless_stored(puts: Puts) -> None:
    """Raise when a key is neither stored, nor there already, nor being written by another.

    Raises:
        CorruptionError: some were damaged on the way.
        ConflictError: some are there with another size.
        PoolFullError: there was no room for some.
    """
    for state, error, why in (
        (Stored.DAMAGED, CorruptionError, "were damaged on the way to the pool"),
        (Stored.CONFLICT, ConflictError, "are in the pool, or being written, with another size"),
        (Stored.FULL, PoolFullError, f"found no room in the pool: {puts.why or PoolFullError.WHY}"),
    ):
        count = puts.count(state)
        if count:
            raise error(f"{count} of {len(puts.states)} objects {why}; the first is number {puts.states.find(state)}")
