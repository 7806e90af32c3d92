"""Segments, ranges and names, without a pool: each test plays it."""

from __future__ import annotations

import struct
from array import array
from typing import TYPE_CHECKING, TypeVar

import pytest

from kvrelay.client.core import names
from kvrelay.client.core.operations import Operations, Prefix, StagePart
from kvrelay.client.core.session import Ask
from kvrelay.client.mover import BatchMover
from kvrelay.errors import (
    BadRequestError,
    ConflictError,
    CorruptionError,
    KvRelayError,
    LeaseExpiredError,
    NotFoundError,
    PoolFullError,
    ProtocolError,
)
from kvrelay.transport.checksum import checksum, segment_sums
from kvrelay.wire import limits
from kvrelay.wire import messages as m
from kvrelay.wire.bulk import ObjectInfo

if TYPE_CHECKING:
    from kvrelay.client.core.steps import Operation

T = TypeVar("T")


def sums(*pieces: bytes) -> bytes:
    return array("Q", map(checksum, pieces)).tobytes()


class Play:
    """Drives an operation with scripted answers; ``asked`` is what it asked for."""

    def __init__(self, *answers: m.Reply | KvRelayError, data: bytes = b"") -> None:
        self.asked: list[m.Request] = []
        self._answers = list(answers)
        self._data = data

    def run(self, operation: Operation[T]) -> T:
        try:
            step = next(operation)
            while True:
                assert isinstance(step, Ask)
                answer = self._answer(step)
                step = operation.throw(answer) if isinstance(answer, KvRelayError) else operation.send(answer)
        except StopIteration as stop:
            assert not self._answers, "the operation ended early"
            result: T = stop.value
            return result

    def _answer(self, ask: Ask) -> m.Reply | KvRelayError:
        self.asked.append(ask.request)
        data = self._data
        for target in ask.targets:
            target[:] = data[: len(target)]
            data = data[len(target) :]
        return self._answers.pop(0)

    @property
    def kinds(self) -> list[str]:
        return [type(request).__name__ for request in self.asked]


def over_tcp(*, reuse_staging: bool = True) -> Operations:
    return Operations(segment_sums, BatchMover(), "g", reuse_staging=reuse_staging)


def over_shm(size: int = 4096) -> tuple[Operations, memoryview]:
    ops = Operations(segment_sums, BatchMover(), "g", reuse_staging=True)
    ops.arena = memoryview(bytearray(size))
    return ops, ops.arena


def leased(*views: m.View, sealed: int = 1) -> m.Matched:
    return m.Matched(0, 9, sealed, list(views))


DONE = m.Done(0)
ONE = m.View(0, 4, 1, 1, 1)


def test_checksums_that_come_with_the_match_are_not_waited_for() -> None:
    ops, arena = over_shm()
    arena[:8] = b"aaaabbbb"
    matched = m.Matched(0, 9, 1, [m.View(0, 8, 2, 1, 2)], sums=sums(b"aaaa", b"bbbb"))
    play = Play(matched)
    prefix = play.run(ops.match_prefix([b"k"], lease_s=1.0, unsealed=True, sums=2))
    assert play.run(ops.wait(prefix, 2, timeout_s=1.0)) == 2
    assert [bytes(view) for view in play.run(ops.fetch(prefix, [m.Range(0, 0, 2)]))] == [b"aaaabbbb"]
    assert play.asked == [m.Match(0, [b"k"], 1.0, sums=2)]


def test_nothing_asks_for_nothing() -> None:
    ops = over_tcp()
    play = Play()
    play.run(ops.commit([], []))
    play.run(ops.abort([]))
    assert play.run(names.exists([])) == []
    assert play.run(names.delete([])) == 0
    prefix = play.run(ops.match_prefix([], lease_s=1.0, unsealed=True))
    assert (len(prefix), prefix.layers) == (0, 0)
    assert play.run(ops.fetch(prefix, [])) == []
    play.run(ops.release(prefix))
    assert play.asked == []


def test_a_refused_commit_tells_the_pool_that_the_bytes_are_left_alone() -> None:
    ops, _ = over_shm()
    parts = [StagePart(m.Grant("granted", handle, 0), m.Spec(b"k", 4), 0, 1) for handle in (5, 6)]
    play = Play(NotFoundError("aborted"), DONE)
    with pytest.raises(NotFoundError):
        play.run(ops.commit(parts, ops.stage(parts)))
    assert play.asked[1] == m.Abort(0, [5, 6])


def test_views_of_an_earlier_staging_cannot_be_used_by_mistake() -> None:
    """1. Stage A. 2. Stage B in the same buffer. 3. Committing A would store B's bytes under A's key."""
    ops = over_tcp()
    part = StagePart(m.Grant("granted", 5, 0), m.Spec(b"a", 4), 0, 1)
    first = ops.stage([part])
    first[0][:] = b"aaaa"
    ops.stage([part])[0][:] = b"bbbb"
    with pytest.raises(ValueError, match="released"):
        Play().run(ops.commit([part], first))


def test_a_staging_somebody_still_looks_into_is_left_to_them() -> None:
    ops = over_tcp()
    part = StagePart(m.Grant("granted", 5, 0), m.Spec(b"a", 4), 0, 1)
    first = ops.stage([part])[0]
    first[:] = b"aaaa"
    reader = struct.iter_unpack("4s", first)
    ops.stage([part])[0][:] = b"bbbb"
    assert next(reader) == (b"aaaa",)


def test_a_wait_goes_on_until_all_layers_asked_for_are_known() -> None:
    ops = over_tcp()
    prefix = Prefix(leased(m.View(0, 12, 3, 1, 3)))
    play = Play(m.Ready(0, 2, sums(b"a", b"b")), m.Ready(0, 3, sums(b"c")))
    assert play.run(ops.wait(prefix, 3, timeout_s=1.0)) == 3
    assert play.asked == [m.Wait(0, 9, 3, 1.0, 0), m.Wait(0, 9, 3, 1.0, 2)]
    assert prefix.sums(m.Range(0, 0, 3)).tobytes() == sums(b"a", b"b", b"c")
    assert Play().run(ops.wait(prefix, 2, timeout_s=1.0)) == 3


@pytest.mark.parametrize(
    "ready", [m.Ready(0, 0, b""), m.Ready(0, 1, b""), m.Ready(0, 1, bytes(9)), m.Ready(0, 2, bytes(8))]
)
def test_checksums_that_do_not_add_up_are_a_protocol_error(ready: m.Ready) -> None:
    with pytest.raises(ProtocolError):
        Play(ready).run(over_tcp().wait(Prefix(leased(m.View(0, 12, 3, 1, 3))), 1, timeout_s=1.0))


def test_segments_not_waited_for_cannot_be_fetched() -> None:
    prefix = Prefix(leased(m.View(0, 12, 3, 1, 3)))
    prefix.note_ready(1, sums(b"aaaa"))
    with pytest.raises(BadRequestError, match="only 1 layers"):
        Play().run(over_tcp().fetch(prefix, [m.Range(0, 0, 2)]))


def test_a_fetch_over_tcp_delivers_what_the_checksums_say() -> None:
    prefix = Prefix(leased(m.View(0, 8, 2, 1, 2)))
    prefix.note_ready(2, sums(b"aaaa", b"bbbb"))
    ops = over_tcp()
    views = Play(m.Data(0, b""), data=b"bbbbaaaa").run(ops.fetch(prefix, [m.Range(0, 1, 1), m.Range(0, 0, 1)]))
    assert [bytes(view) for view in views] == [b"bbbb", b"aaaa"]
    play = Play(m.Data(0, b""), DONE, data=b"aaaX")
    with pytest.raises(CorruptionError):
        play.run(ops.fetch(prefix, [m.Range(0, 0, 1)]))
    assert play.asked[1] == m.Corrupt(0, 9, 0)


def test_other_bytes_under_a_lease_that_ran_out_are_no_corruption() -> None:
    ops, arena = over_shm()
    prefix = Prefix(leased(ONE))
    prefix.note_ready(1, sums(b"mine"))
    arena[:4] = b"its!"
    with pytest.raises(LeaseExpiredError):
        Play(LeaseExpiredError("over")).run(ops.fetch(prefix, [m.Range(0, 0, 1)]))


def test_a_release_that_comes_too_late_says_so() -> None:
    prefix = Prefix(leased(ONE))
    with pytest.raises(LeaseExpiredError):
        Play(LeaseExpiredError("over")).run(over_tcp().release(prefix))
    Play().run(over_tcp().release(prefix))


def test_a_range_is_read_with_the_segments_it_touches() -> None:
    ops, arena = over_shm()
    arena[:16] = bytes(range(16))
    ready = m.Ready(0, 1, sums(*(bytes(range(n, n + 4)) for n in range(0, 16, 4))))
    play = Play(leased(m.View(0, 16, 1, 4, 1)), ready, DONE)
    assert play.run(ops.read_ranges(b"k", [(3, 6), (12, 4)])) == [bytes(range(3, 9)), bytes(range(12, 16))]
    assert play.kinds == ["Match", "Wait", "Release"]


@pytest.mark.parametrize("span", [(-1, 2), (0, 0), (13, 4), (16, 1)])
def test_a_range_beyond_its_object_is_refused_and_the_lease_released(span: tuple[int, int]) -> None:
    ops, _ = over_shm()
    play = Play(leased(m.View(0, 16, 1, 4, 1)), DONE)
    with pytest.raises(BadRequestError, match="16 bytes"):
        play.run(ops.read_ranges(b"k", [span]))
    assert play.kinds == ["Match", "Release"]
    assert Play(m.Matched(0, 0, 0, [])).run(ops.read_ranges(b"k", [span])) is None


def write(ops: Operations, play: Play, pieces: list[tuple[int, bytes]]) -> bool:
    views = [(offset, memoryview(data)) for offset, data in pieces]
    return play.run(
        ops.write_ranges(b"k", 16, views, segment_bytes=4, group=None, lease_s=1.0, ticket=None),
    )


def test_pieces_are_written_and_whether_that_was_all_is_told() -> None:
    ops, arena = over_shm()
    granted = m.Announced(0, [m.Grant("granted", 5, 16)], ticket_live=True)
    play = Play(granted, DONE, granted)
    assert not write(ops, play, [(4, b"abcd"), (12, b"wxyz")])
    assert bytes(arena[16:32]) == b"\0\0\0\0abcd\0\0\0\0wxyz"
    assert play.asked[1] == m.Written(0, [m.Part(5, 1, [checksum(b"abcd")]), m.Part(5, 3, [checksum(b"wxyz")])])
    sealed = m.Announced(0, [m.Grant("sealed")], ticket_live=True)
    assert write(ops, Play(granted, DONE, sealed), [(0, b"abcd")])
    assert write(ops, Play(sealed), [(0, b"abcd")])


@pytest.mark.parametrize(("state", "error"), [("busy", ConflictError), ("full", PoolFullError)])
def test_an_object_that_cannot_be_written_now_is_told(state: str, error: type[KvRelayError]) -> None:
    with pytest.raises(error):
        write(over_tcp(), Play(m.Announced(0, [m.Grant(state)], ticket_live=True)), [(0, b"abcd")])


@pytest.mark.parametrize(
    ("size", "segment", "piece"),
    [(16, 0, (0, b"abcd")), (16, 5, (0, b"abcd")), (0, 4, (0, b"abcd")), (16, 4, (2, b"abcd")), (16, 4, (-4, b"abcd")),
     (16, 4, (0, b"abc")), (16, 4, (0, b"")), (16, 4, (16, b"abcd")), (1 << 20, 1, (0, b"a"))],
)  # fmt: skip
def test_a_piece_that_is_not_made_of_segments_is_refused_unasked(
    size: int, segment: int, piece: tuple[int, bytes]
) -> None:
    views = [(piece[0], memoryview(piece[1]))]
    play = Play()
    with pytest.raises(BadRequestError):
        play.run(
            over_tcp().write_ranges(b"k", size, views, segment_bytes=segment, group=None, lease_s=1.0, ticket=None)
        )
    assert not play.asked


def test_more_names_than_one_message_holds_go_in_several() -> None:
    keys = [b"%d" % n for n in range(limits.MAX_KEYS + 1)]
    existing = [m.Existing(0, [True] * limits.MAX_KEYS), m.Existing(0, [False])]
    assert Play(*existing).run(names.exists(keys)) == [True] * limits.MAX_KEYS + [False]
    assert Play(m.Deleted(0, 7), m.Deleted(0, 1)).run(names.delete(keys)) == 8
    assert Play(m.Affected(0, 7), m.Affected(0, 1)).run(names.pin(keys)) == 8
    assert Play(m.Affected(0, 7), m.Affected(0, 1)).run(names.touch(keys, 5.0)) == 8


@pytest.mark.parametrize(
    ("answers", "counted"),
    [
        ([(10, 5, 10)], (10, 5, 10)),
        ([(16384, 16384, 16384), (3, 2, 3)], (16387, 16386, 16387)),
        ([(16384, 7, 16384), (3, 3, 3)], (16387, 7, 16387)),
        ([(100, 7, 16384), (3, 3, 3)], (100, 7, 16387)),
    ],
)
def test_a_prefix_is_counted_across_messages(
    answers: list[tuple[int, int, int]], counted: tuple[int, int, int]
) -> None:
    keys = [b"%d" % n for n in range(limits.MAX_KEYS + 3)]
    assert Play(*(m.Counted(0, *each) for each in answers)).run(names.count_prefix(keys)) == counted


def test_objects_are_listed_page_by_page() -> None:
    info = ObjectInfo(b"k", 1, "sealed", "dram", 0, 0.0)
    play = Play(m.Listing(0, 7, [info] * 3), m.Listing(0, 0, [info]))
    assert play.run(names.list_objects(b"k", None)) == [info] * 4
    assert play.asked == [m.ListObjects(0, 0, 4096, b"k"), m.ListObjects(0, 7, 4096, b"k")]
    assert Play(m.Listing(0, 7, [info] * 2)).run(names.list_objects(b"", 2)) == [info] * 2
