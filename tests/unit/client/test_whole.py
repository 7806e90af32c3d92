"""Whole objects in batches, against a scripted pool: every way a call can go, without sockets."""

from __future__ import annotations

import random
from array import array
from typing import TYPE_CHECKING

import pytest

from kvrelay.client.core import blocks as blocks_module
from kvrelay.client.core.blocks import Blocks
from kvrelay.client.core.mapped import MappedArena
from kvrelay.client.core.operations import Operations
from kvrelay.client.core.session import Call
from kvrelay.client.mover import BatchMover
from kvrelay.errors import (
    BadRequestError,
    CorruptionError,
    LeaseExpiredError,
    NotFoundError,
    PoolFullError,
    ProtocolError,
)
from kvrelay.testing.bulk_script import Abandoned, BulkScript, column, drive, packed
from kvrelay.transport.checksum import segment_sums
from kvrelay.transport.payload import outgoing
from kvrelay.wire import messages as m
from kvrelay.wire.bulk import Stored

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvrelay.client.core.puts import Puts
    from kvrelay.client.core.session import Ask
    from kvrelay.client.core.steps import Operation
    from kvrelay.wire.payload import Payload

rng = random.Random(5)


@pytest.fixture(autouse=True)
def _small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks_module, "BATCH_KEYS", 4)
    monkeypatch.setattr(blocks_module, "BATCH_BYTES", 1000)


@pytest.fixture(params=["mapped", "frames"])
def ops(request: pytest.FixtureRequest, pool: BulkScript) -> Operations:
    mover = BatchMover()
    made = Operations(segment_sums, mover, "g", reuse_staging=True)
    if request.param == "mapped":
        made.arena = pool.arena
        made.whole.direct = MappedArena(pool.arena, mover)
    return made


@pytest.fixture
def pool() -> BulkScript:
    return BulkScript()


def putting(ops: Operations, pairs: list[tuple[bytes, memoryview]], *, partly: bool = False) -> Operation[Puts]:
    blocks = Blocks.of_buffers([data for _, data in pairs])
    return ops.put_blocks([key for key, _ in pairs], blocks, 0.0, None, partly=partly)


def getting(ops: Operations, keys: list[bytes], into: list[memoryview]) -> Operation[int]:
    return ops.whole.get(keys, Blocks.of_buffers(into, writable=True))


def some(count: int) -> dict[bytes, bytes]:
    return {b"%03d" % n: rng.randbytes(rng.randrange(1, 400)) for n in range(count)}


def put(ops: Operations, pool: BulkScript, items: dict[bytes, bytes], *, partly: bool = False) -> bytes:
    pairs = [(key, memoryview(data)) for key, data in items.items()]
    return drive(putting(ops, pairs, partly=partly), pool.answer).states


def buffers(items: dict[bytes, bytes]) -> list[memoryview]:
    return [memoryview(bytearray(len(data))) for data in items.values()]


@pytest.mark.parametrize("late", [False, True])
def test_many_objects_are_put_and_got_in_batches(ops: Operations, pool: BulkScript, *, late: bool) -> None:
    items = some(50)
    pairs = [(key, memoryview(data)) for key, data in items.items()]
    puts = drive(putting(ops, pairs), pool.answer, late=late)
    assert puts.count(Stored.STORED) == 50
    into = buffers(items)
    assert drive(getting(ops, list(items), into), pool.answer, late=late) == 50
    assert [bytes(view) for view in into] == list(items.values())
    assert not pool.rooms
    assert not pool.leases
    assert max(len(request.keys) for request in pool.asked if isinstance(request, m.Room | m.Put)) <= 4


def test_room_for_the_next_batch_is_asked_for_before_this_one_is_filled() -> None:
    pool, mover = BulkScript(), BatchMover()
    ops = Operations(segment_sums, mover, "g", reuse_staging=True)
    ops.whole.direct = MappedArena(pool.arena, mover)
    put(ops, pool, {bytes([n]): bytes(100) for n in range(12)})
    assert pool.kinds == ["Room", "Room", "Fill", "Room", "Fill", "Fill"]


def test_pages_of_one_buffer_are_put_and_got(ops: Operations, pool: BulkScript) -> None:
    memory = bytearray(rng.randbytes(6400))
    keys = [b"%d" % n for n in range(20)]
    offsets = [(n * 7 % 20) * 320 for n in range(20)]
    pages = Blocks.of_pages(memoryview(memory), offsets, 320)
    assert drive(ops.whole.put(keys, pages), pool.answer).count(Stored.STORED) == 20
    target = bytearray(6400)
    assert drive(ops.whole.get(keys, Blocks.of_pages(memoryview(target), offsets, 320)), pool.answer) == 20
    assert target == memory


def test_what_became_of_every_key_is_told(ops: Operations, pool: BulkScript) -> None:
    pool = BulkScript(size=1000)
    if ops.whole.direct is not None:
        ops.whole.direct = MappedArena(pool.arena, BatchMover())
    pool.store(b"there", b"old")
    pool.busy.add(b"busy")
    items = {b"there": b"new", b"busy": b"x", b"a": bytes(500), b"big": bytes(800), b"b": bytes(300)}
    states = put(ops, pool, items, partly=True)
    assert list(states) == [Stored.PRESENT, Stored.BUSY, Stored.STORED, Stored.FULL, Stored.STORED]
    assert {key for key in items if key in pool.objects} == {b"there", b"a", b"b"}
    assert pool.objects[b"there"][1] == 3
    with pytest.raises(PoolFullError, match=r"1 of 2.*number 1"):
        put(ops, pool, {b"there": b"new", b"big": bytes(800)})


def test_a_get_ends_at_the_first_hole(ops: Operations, pool: BulkScript) -> None:
    items = some(30)
    for hole in range(30):
        pool.objects.clear()
        put(ops, pool, items)
        del pool.objects[list(items)[hole]]
        into = buffers(items)
        assert drive(getting(ops, list(items), into), pool.answer, late=bool(hole % 2)) == hole
        assert [bytes(view) for view in into[:hole]] == list(items.values())[:hole]
        assert not pool.leases


def test_a_batch_behind_a_hole_counts_for_nothing(ops: Operations, pool: BulkScript) -> None:
    """1. Four keys a batch. 2. The second batch is asked for ahead. 3. The first ends at its third key."""
    items = {b"%d" % n: bytes([n]) * 10 for n in range(8)}
    put(ops, pool, items)
    del pool.objects[b"2"]
    assert drive(getting(ops, list(items), buffers(items)), pool.answer) == 2


def test_a_buffer_of_another_size_is_named(ops: Operations, pool: BulkScript) -> None:
    items = some(10)
    put(ops, pool, items)
    key = list(items)[6]
    pool.objects[key] = (0, 777, 1)
    with pytest.raises(BadRequestError, match=rf"object 6 has 777 bytes, its buffer {len(items[key])}"):
        drive(getting(ops, list(items), buffers(items)), pool.answer)
    assert not pool.leases


def test_one_object_of_unknown_size_is_got(ops: Operations, pool: BulkScript) -> None:
    for size in (1, 300, 5, 100_000):
        data = rng.randbytes(size)
        pool.store(b"%d" % size, data)
        assert drive(ops.whole.get_one(b"%d" % size), pool.answer) == data
    assert drive(ops.whole.get_one(b"absent"), pool.answer) is None
    assert not pool.leases


def test_damaged_objects_are_told_and_given_back(ops: Operations, pool: BulkScript) -> None:
    items = some(10)
    put(ops, pool, items)
    start = pool.objects[list(items)[5]][0]
    pool.arena[start] ^= 1

    def answer(ask: Ask) -> m.Reply:
        if isinstance(ask.request, m.Match):  # the second look, under a lease
            key = ask.request.keys[0]
            if ask.request.lease_s:
                pool.leases.add(9999)
            place, size, _ = pool.objects[key]
            return m.Matched(0, 9999, 1, [m.View(place, size, 1, 1, 1)])
        if isinstance(ask.request, m.Wait):
            return m.Ready(0, 1, packed([pool.objects[list(items)[5]][2]]))
        if isinstance(ask.request, m.Read):
            ask.targets[0][:] = pool.arena[start : start + ask.targets[0].nbytes]
            return m.Data(0, b"")
        return pool.answer(ask)

    with pytest.raises(CorruptionError):
        drive(getting(ops, list(items), buffers(items)), answer)
    assert "Corrupt" in pool.kinds
    assert not pool.leases


def test_bytes_damaged_on_the_way_are_read_once_more(pool: BulkScript) -> None:
    ops = Operations(segment_sums, BatchMover(), "g", reuse_staging=True)
    items = some(6)
    put(ops, pool, items)
    key = list(items)[3]

    def answer(ask: Ask) -> m.Reply:
        reply: m.Reply
        match ask.request:
            case m.Match():
                pool.leases.add(9999)
                return m.Matched(0, 9999, 1, [m.View(0, len(items[key]), 1, 1, 1)])
            case m.Wait():
                return m.Ready(0, 1, packed([pool.objects[key][2]]))
            case m.Read():
                ask.targets[0][:] = items[key]
                return m.Data(0, b"")
            case m.Get():
                reply = pool.answer(ask)
                if key in ask.request.keys:
                    ask.targets[ask.request.keys.index(key)][0] ^= 1
                return reply
        return pool.answer(ask)

    into = buffers(items)
    assert drive(getting(ops, list(items), into), answer) == 6
    assert [bytes(view) for view in into] == list(items.values())
    assert not pool.leases


@pytest.mark.parametrize("intact", [True, False])
def test_bytes_checksummed_while_they_arrived_are_not_read_again_unless_they_are_wrong(
    pool: BulkScript, *, intact: bool
) -> None:
    mover = Counting()
    ops = Operations(segment_sums, mover, "g", reuse_staging=True)
    items = some(2)
    put(ops, pool, items)
    into = buffers(items)
    landings: list[Payload] = []

    def arrived(ask: Ask) -> Payload:
        landing = outgoing(ask.targets if intact else [memoryview(b"other")] * 2, sums=True)
        landing.advance(landing.left)
        landings.append(landing)
        return landing

    assert drive(with_landings(getting(ops, list(items), into), arrived), pool.answer) == 2
    assert len(landings) == 1
    assert mover.checks == (0 if intact else 1)


def with_landings(operation: Operation[int], arrived: Callable[[Ask], Payload]) -> Operation[int]:
    """The same operation, every answer to which has a payload that arrived."""
    step = next(operation)
    while True:
        result = yield step
        if isinstance(result, Call):
            result.landing = arrived(result.ask)
        try:
            step = operation.send(result)
        except StopIteration as stop:
            value: int = stop.value
            return value


class Counting(BatchMover):
    """A mover that counts how often it was asked to verify."""

    checks = 0

    def check(self, blocks: Blocks, sums: bytes) -> int:
        self.checks += 1
        return super().check(blocks, sums)


def test_other_bytes_under_a_lease_that_ran_out_are_no_corruption(pool: BulkScript) -> None:
    ops = Operations(segment_sums, BatchMover(), "g", reuse_staging=True)
    ops.whole.direct = MappedArena(pool.arena, BatchMover())
    pool.store(b"k", b"mine")

    def answer(ask: Ask) -> m.Reply:
        reply = pool.answer(ask)
        if isinstance(ask.request, m.Locate):
            pool.leases.clear()
            pool.arena[:4] = b"its!"
        return reply

    with pytest.raises(LeaseExpiredError):
        drive(getting(ops, [b"k"], [memoryview(bytearray(4))]), answer)


def test_a_lease_that_ran_out_unnoticed_is_told_by_its_release(pool: BulkScript) -> None:
    ops = Operations(segment_sums, BatchMover(), "g", reuse_staging=True)
    ops.whole.direct = MappedArena(pool.arena, BatchMover())
    pool.store(b"k", b"mine")

    def answer(ask: Ask) -> m.Reply:
        reply = pool.answer(ask)
        if isinstance(ask.request, m.Locate):
            pool.leases.clear()
        return reply

    with pytest.raises(LeaseExpiredError):
        drive(getting(ops, [b"k"], [memoryview(bytearray(4))]), answer)
    with pytest.raises(LeaseExpiredError):
        drive(ops.whole.get_one(b"k"), answer)


def test_damage_on_the_way_to_the_pool_is_told(pool: BulkScript) -> None:
    ops = Operations(segment_sums, BatchMover(), "g", reuse_staging=True)

    def answer(ask: Ask) -> m.Reply:
        if isinstance(ask.request, m.Put) and b"b" in ask.request.keys:
            return m.PutDone(0, bytes([Stored.STORED, Stored.DAMAGED]))
        return pool.answer(ask)

    pairs = [(b"a", memoryview(b"x")), (b"b", memoryview(b"y"))]
    with pytest.raises(CorruptionError, match=r"1 of 2.*number 1"):
        drive(putting(ops, pairs), answer)


def test_batches_that_were_given_up_meanwhile_are_told_and_nothing_stays_half_written(pool: BulkScript) -> None:
    ops = Operations(segment_sums, BatchMover(), "g", reuse_staging=True)
    ops.whole.direct = MappedArena(pool.arena, BatchMover())
    fills = 0

    def answer(ask: Ask) -> m.Reply:
        nonlocal fills
        if isinstance(ask.request, m.Fill):
            fills += 1
            if fills == 2:
                pool.rooms.pop(ask.request.batch)
        return pool.answer(ask)

    items = {b"%02d" % n: bytes(100) for n in range(12)}
    with pytest.raises(NotFoundError):
        drive(putting(ops, [(key, memoryview(data)) for key, data in items.items()]), answer)
    assert not pool.rooms
    assert b"00" in pool.objects
    assert b"04" not in pool.objects


@pytest.mark.parametrize("what", ["put", "get"])
@pytest.mark.parametrize("late", [False, True])
def test_a_call_nobody_waits_for_any_more_leaves_nothing_held(what: str, *, late: bool) -> None:
    """Abandoned after every possible number of steps."""
    for steps in range(60):
        pool, mover = BulkScript(), BatchMover()
        ops = Operations(segment_sums, mover, "g", reuse_staging=True)
        ops.whole.direct = MappedArena(pool.arena, mover)
        items = {b"%02d" % n: bytes([n]) * 100 for n in range(20)}
        if what == "get":
            for key, data in items.items():
                pool.store(key, data)
        pairs = [(key, memoryview(data)) for key, data in items.items()]
        try:
            if what == "put":
                drive(putting(ops, pairs), pool.answer, late=late, abandon_at=steps)
            else:
                drive(getting(ops, list(items), buffers(items)), pool.answer, late=late, abandon_at=steps)
        except Abandoned:
            assert not pool.rooms, steps
            assert not pool.leases, steps
            for key, (start, size, _) in pool.objects.items():
                assert bytes(pool.arena[start : start + size]) == items[key]
        else:
            assert steps > 10
            return
    pytest.fail("it never ended")


@pytest.mark.parametrize(
    "reply",
    [
        m.RoomGiven(0, 1, b"", b""),
        m.RoomGiven(0, 1, b"\0", b""),
        m.RoomGiven(0, 1, b"\0", packed([1 << 40])),
        m.RoomGiven(0, 1, b"\0", packed([(1 << 20) - 3])),
    ],
)
def test_room_that_makes_no_sense_is_a_protocol_error(reply: m.RoomGiven, pool: BulkScript) -> None:
    ops = Operations(segment_sums, BatchMover(), "g", reuse_staging=True)
    ops.whole.direct = MappedArena(pool.arena, BatchMover())
    with pytest.raises(ProtocolError):
        drive(
            putting(ops, [(b"k", memoryview(b"data"))]),
            lambda ask: reply if isinstance(ask.request, m.Room) else m.Done(0),
        )


@pytest.mark.parametrize(
    "reply",
    [
        m.Located(0, 1, 2, packed([0, 0]), packed([4, 4]), packed([0, 0])),
        m.Located(0, 1, 1, b"", packed([4]), packed([0])),
        m.Located(0, 1, 1, packed([1 << 40]), packed([4]), packed([0])),
    ],
)
def test_places_that_make_no_sense_are_a_protocol_error(reply: m.Located, pool: BulkScript) -> None:
    ops = Operations(segment_sums, BatchMover(), "g", reuse_staging=True)
    ops.whole.direct = MappedArena(pool.arena, BatchMover())
    answer = lambda ask: reply if isinstance(ask.request, m.Locate) else m.Done(0)  # noqa: E731
    with pytest.raises(ProtocolError):
        drive(getting(ops, [b"k"], [memoryview(bytearray(4))]), answer)


def test_memory_that_cannot_be_used_is_refused_by_name(ops: Operations, pool: BulkScript) -> None:
    with pytest.raises(BadRequestError, match="contiguous"):
        drive(putting(ops, [(b"k", memoryview(b"abcdef")[::2])]), pool.answer)
    with pytest.raises(BadRequestError, match="read-only"):
        drive(getting(ops, [b"k"], [memoryview(b"abcd")]), pool.answer)
    with pytest.raises(BadRequestError, match="empty"):
        drive(putting(ops, [(b"k", memoryview(b""))]), pool.answer)
    with pytest.raises(BadRequestError, match="2 keys"):
        drive(getting(ops, [b"k", b"l"], [memoryview(bytearray(4))]), pool.answer)
    with pytest.raises(BadRequestError, match="beyond"):
        Blocks.of_pages(memoryview(bytes(10)), [0, 7], 4)
    with pytest.raises(BadRequestError, match="integers"):
        Blocks.of_pages(memoryview(bytes(10)), [-1], 4)
    with pytest.raises(BadRequestError, match="at least one"):
        Blocks.of_pages(memoryview(bytes(10)), [0], 0)
    assert not pool.asked


def test_numbers_are_put_and_got_as_their_bytes(ops: Operations, pool: BulkScript) -> None:
    numbers = array("I", [1, 2, 3])
    drive(putting(ops, [(b"k", memoryview(numbers))]), pool.answer)
    got = array("I", [0, 0, 0])
    assert drive(getting(ops, [b"k"], [memoryview(got)]), pool.answer) == 1
    assert got == numbers


def test_batches_hold_every_block_once_and_keep_to_their_bounds() -> None:
    for _ in range(200):
        sizes = array("Q", [rng.choice([1, 10, 999, 1000, 1001, 5000]) for _ in range(rng.randrange(30))])
        cuts = list(Blocks(sizes).batches())
        assert [start for start, _ in cuts] == [0, *[stop for _, stop in cuts]][: len(cuts)]
        assert (cuts[-1][1] if cuts else 0) == len(sizes)
        for start, stop in cuts:
            assert 0 < stop - start <= 4
            assert stop - start == 1 or sum(sizes[start:stop]) <= 1000
    assert column(packed([1, 2])) == [1, 2]
