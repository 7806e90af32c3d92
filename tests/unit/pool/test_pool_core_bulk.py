"""Many whole objects at once, one story a test."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from kvrelay.pool.core.actions import SendData
from kvrelay.pool.core.desk import MAX_HELD
from kvrelay.pool.core.store import QUARANTINE_S
from kvrelay.testing.pool_core import NOTHING_HELD, PAGE, Driver, column
from kvrelay.wire import limits
from kvrelay.wire import messages as m
from kvrelay.wire.bulk import Stored

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvrelay.pool.core.lower import Seeker


def u64(*values: int) -> bytes:
    return column("Q", values)


def ints(packed: bytes) -> list[int]:
    return memoryview(packed).cast("Q").tolist()


def names(count: int) -> list[bytes]:
    return [number.to_bytes(8, "big") for number in range(count)]


def room(d: Driver, conn: int, *keys: bytes, lease_s: float = 10.0, ttl_s: float = 0.0) -> m.RoomGiven:
    return d.ask(conn, m.Room(0, list(keys), u64(*[PAGE] * len(keys)), lease_s, ttl_s), m.RoomGiven)


# --- put ---


def test_a_batch_that_is_put_lands_in_one_run_and_is_there_when_it_is_answered() -> None:
    d = Driver(pages=16)
    keys = [b"a", b"b", b"c"]
    request, delivery = d.begin(2, m.Put(0, keys, u64(*[PAGE] * 3), u64(1, 2, 3)), 3 * PAGE)
    assert delivery is not None
    assert [size for _, size in delivery.targets] == [3 * PAGE], "neighbours in the arena are one run"
    assert ints(delivery.sizes) == [PAGE] * 3
    assert d.there(3, *keys) == [False] * 3, "nothing is readable before it is whole"
    assert d.answer(request) is None
    d.arrive(2, u64(1, 2, 3))
    assert d.answer(request) == m.PutDone(request, bytes(3))
    assert d.there(3, *keys) == [True] * 3
    assert d.held() == NOTHING_HELD
    assert d.core.stats()["received_bytes"] == 3 * PAGE


def test_what_cannot_be_taken_is_dropped_and_the_rest_of_the_batch_is_stored() -> None:
    d = Driver(pages=4)
    d.put(2, b"there")
    grant = d.announce(3, b"busy", group="other")[0]
    keys = [b"there", b"new", b"busy", b"other size"]
    d.put(2, b"other size", size=64)
    d.lease(3, b"there")
    d.lease(3, b"other size")
    request, delivery = d.begin(2, m.Put(0, [*keys, b"full"], u64(*[PAGE] * 5), u64(1, 2, 3, 4, 5)), 5 * PAGE)
    assert delivery is not None
    new = ints(delivery.offsets)
    assert delivery.targets == [(None, PAGE), (new[0], PAGE), (None, 3 * PAGE)]
    d.arrive(2, u64(2))
    reply = d.answer(request)
    assert isinstance(reply, m.PutDone)
    assert list(reply.states) == [Stored.PRESENT, Stored.STORED, Stored.BUSY, Stored.CONFLICT, Stored.FULL]
    assert d.there(2, *keys, b"full") == [True, True, False, True, False]
    d.ask(3, m.Abort(0, [grant.handle]), m.Done)
    assert d.core.stats()["refused"] == 1


def test_a_batch_of_which_nothing_can_be_taken_is_answered_before_its_bytes_arrive() -> None:
    d = Driver()
    d.put(2, b"a", b"b")
    request, delivery = d.begin(3, m.Put(0, [b"a", b"b"], u64(PAGE, PAGE), u64(1, 2)), 2 * PAGE)
    assert delivery is None
    assert d.answer(request) == m.PutDone(request, bytes([Stored.PRESENT] * 2))


def test_a_damaged_object_of_a_batch_is_not_stored_and_the_others_are() -> None:
    d = Driver()
    request, delivery = d.begin(2, m.Put(0, [b"a", b"b", b"c"], u64(PAGE, PAGE, PAGE), u64(1, 2, 3)), 3 * PAGE)
    assert delivery is not None
    d.arrive(2, u64(1, 99, 3))
    assert d.answer(request) == m.PutDone(request, bytes([Stored.STORED, Stored.DAMAGED, Stored.STORED]))
    assert d.there(3, b"a", b"b", b"c") == [True, False, True]
    assert d.held() == NOTHING_HELD
    assert d.core.stats()["corrupt"] == 1
    assert list(d.put(2, b"b")) == [Stored.STORED]


def test_checksums_that_follow_the_bytes_count_for_the_objects_that_are_taken() -> None:
    d = Driver()
    d.put(2, b"there")
    keys = [b"a", b"there", b"b", b"c"]
    request, delivery = d.begin(2, m.Put(0, keys, u64(*[PAGE] * 4)), 4 * PAGE + 32)
    assert delivery is not None
    assert delivery.trailer_bytes == 32
    assert sum(size for _, size in delivery.targets) == 4 * PAGE
    d.arrive(2, u64(1, 98, 3), u64(1, 2, 99, 3))
    states = [Stored.STORED, Stored.PRESENT, Stored.DAMAGED, Stored.STORED]
    assert d.answer(request) == m.PutDone(request, bytes(states))
    assert d.there(3, *keys) == [True, True, False, True]
    located = d.ask(3, m.Locate(0, [b"a"], 1.0), m.Located)
    assert located.sums == u64(1)
    assert d.core.stats()["corrupt"] == 1


def test_a_connection_that_ends_amid_its_payload_leaves_nothing_behind() -> None:
    d = Driver()
    _, delivery = d.begin(2, m.Put(0, [b"a", b"b"], u64(PAGE, PAGE), u64(1, 2)), 2 * PAGE)
    assert delivery is not None
    d.die(2)
    assert d.held() == NOTHING_HELD
    assert d.there(3, b"a", b"b") == [False, False]


def test_an_object_deleted_while_its_bytes_arrive_stays_deleted() -> None:
    d = Driver(pages=1)
    request, _ = d.begin(2, m.Put(0, [b"a"], u64(PAGE), u64(1)), PAGE)
    assert d.ask(3, m.Delete(0, [b"a"]), m.Deleted).count == 1
    assert list(room(d, 3, b"other").states) == [Stored.FULL], "bytes are still arriving there"
    d.arrive(2, u64(1))
    assert isinstance(d.answer(request), m.PutDone)
    assert d.there(3, b"a") == [False]
    assert list(room(d, 3, b"other").states) == [Stored.STORED]


@pytest.mark.parametrize(
    ("request_", "payload_bytes"),
    [
        (m.Put(0, [b"a", b"b"], u64(PAGE), u64(1)), PAGE),
        (m.Put(0, [b"a"], u64(PAGE), u64(1, 2)), PAGE),
        (m.Put(0, [b"a"], u64(PAGE), u64(1)), PAGE - 1),
        (m.Put(0, [b"a"], u64(PAGE), u64(1)), PAGE + 8),
        (m.Put(0, [b"a"], u64(PAGE)), PAGE),
        (m.Put(0, [b"a", b"b"], u64(PAGE)), PAGE + 8),
        (m.Put(0, [b"a"], u64(PAGE) + b"1234"), PAGE + 12),
        (m.Put(0, [b"a", b"b"], u64(PAGE, 0), u64(1, 2)), PAGE),
        (m.Put(0, [b"a"], u64(limits.MAX_OBJECT_BYTES + 1), u64(1)), limits.MAX_OBJECT_BYTES + 1),
        (m.Put(0, [b"a"], u64(PAGE) + b"1234", u64(1) + b"1234"), PAGE),
    ],
)
def test_a_put_that_contradicts_itself_is_refused_whole(request_: m.Put, payload_bytes: int) -> None:
    d = Driver()
    request, delivery = d.begin(2, request_, payload_bytes)
    assert delivery is None
    failed = d.answer(request)
    assert isinstance(failed, m.Failed)
    assert failed.code == "bad_request"
    assert d.held() == NOTHING_HELD


def test_a_put_without_its_bytes_is_refused() -> None:
    d = Driver()
    d.fails(2, m.Put(0, [b"a"], u64(PAGE), u64(1)), "bad_request")
    d.fails(2, m.Write(0, [m.Part(1, 0, [1])]), "bad_request")


def test_a_batch_evicts_what_nobody_wants_and_never_what_is_leased() -> None:
    d = Driver(pages=8)
    old = names(8)
    d.put(2, *old)
    d.lease(3, *old[:2])
    assert list(d.put(2, *[b"new" + key for key in names(8)])) == [Stored.STORED] * 6 + [Stored.FULL] * 2
    assert d.there(3, *old) == [True, True] + [False] * 6
    assert d.core.stats()["evicted_for_room"] == 6


def test_objects_put_under_a_ticket_are_protected_until_it_ends() -> None:
    d = Driver(pages=3)
    d.ask(3, m.OpenTicket(0, "t", 60.0), m.Done)
    d.put(2, b"there")
    d.put(2, b"there", b"new", ticket="t")
    assert list(d.put(2, b"x", b"y")) == [Stored.STORED, Stored.FULL]
    assert d.there(3, b"there", b"new") == [True, True]
    d.ask(3, m.EndTicket(0, "t"), m.Done)
    assert list(d.put(2, b"y", b"z")) == [Stored.STORED] * 2


# --- room, fill ---


def test_room_is_given_for_a_batch_and_filling_it_publishes_all_at_once() -> None:
    d = Driver()
    given = room(d, 1, b"a", b"b")
    assert given.batch
    assert list(given.states) == [Stored.STORED] * 2
    assert all(offset % PAGE == 0 for offset in ints(given.offsets))
    assert d.there(3, b"a") == [False]
    assert list(room(d, 3, b"a").states) == [Stored.BUSY]
    d.ask(1, m.Fill(0, given.batch, u64(1, 2)), m.Done)
    located = d.ask(3, m.Locate(0, [b"a", b"b"], 5.0), m.Located)
    assert (located.count, located.offsets, located.sums) == (2, given.offsets, u64(1, 2))
    d.fails(1, m.Fill(0, given.batch, u64(1, 2)), "not_found")


def test_only_its_own_connection_fills_a_batch_and_with_a_checksum_a_granted_key() -> None:
    d = Driver()
    d.put(2, b"a")
    given = room(d, 1, b"a", b"b", b"c")
    assert list(given.states) == [Stored.PRESENT, Stored.STORED, Stored.STORED]
    d.fails(2, m.Fill(0, given.batch, u64(1, 2)), "not_found")
    d.fails(1, m.Fill(0, given.batch, u64(1, 2, 3)), "bad_request")
    d.ask(1, m.Fill(0, given.batch, u64(1, 2)), m.Done)
    assert d.there(3, b"a", b"b", b"c") == [True] * 3


def test_a_batch_of_which_nothing_is_granted_has_no_name() -> None:
    d = Driver()
    d.put(2, b"a")
    assert room(d, 1, b"a").batch == 0
    assert d.held() == NOTHING_HELD


def test_a_batch_that_is_given_up_is_free_at_once() -> None:
    d = Driver(pages=2)
    given = room(d, 1, b"a", b"b")
    d.ask(1, m.Abort(0, [given.batch]), m.Done)
    assert d.held() == NOTHING_HELD
    assert list(room(d, 2, b"c", b"d").states) == [Stored.STORED] * 2


def test_a_late_batch_loses_its_names_and_keeps_its_bytes_until_its_writer_has_stopped() -> None:
    """1. Room is given. 2. Its time is over. 3. Its bytes are nobody's. 4. The writer learns so. 5. They are free."""
    d = Driver(pages=2)
    given = room(d, 1, b"a", b"b", lease_s=1.0)
    d.pass_time(1.1)
    assert d.held() == NOTHING_HELD | {"lingering_bytes": 2 * PAGE}
    assert list(room(d, 2, b"a").states) == [Stored.FULL]
    d.fails(1, m.Fill(0, given.batch, u64(1, 2)), "not_found")
    d.ask(1, m.Abort(0, [given.batch]), m.Done)
    assert list(room(d, 2, b"a").states) == [Stored.STORED]


@pytest.mark.parametrize("late", [False, True])
def test_the_bytes_of_a_dead_writers_batch_rest_before_they_are_given_to_another(late: bool) -> None:
    d = Driver(pages=1)
    room(d, 1, b"a", lease_s=1.0)
    d.pass_time(1.1 if late else 0.1)
    d.die(1)
    assert d.held() == NOTHING_HELD | {"lingering_bytes": PAGE}
    assert list(room(d, 2, b"b").states) == [Stored.FULL]
    d.pass_time(QUARANTINE_S + 0.01)
    assert list(room(d, 2, b"b").states) == [Stored.STORED]


def test_an_object_deleted_while_a_batch_is_filled_stays_deleted_and_the_rest_is_published() -> None:
    d = Driver()
    given = room(d, 1, b"a", b"b")
    d.ask(3, m.Delete(0, [b"a"]), m.Deleted)
    d.ask(1, m.Fill(0, given.batch, u64(1, 2)), m.Done)
    assert d.there(3, b"a", b"b") == [False, True]
    assert d.held() == NOTHING_HELD


def test_room_counts_as_held_by_its_connection() -> None:
    d = Driver(pages=4)
    keys = names(limits.MAX_KEYS)
    d.core.check_integrity = lambda: None  # type: ignore[method-assign] # linear in what is held
    d.core.desk.connections[1].held = MAX_HELD - 1
    d.fails(1, m.Room(0, keys, u64(*[1] * len(keys)), 5.0), "pool_full")
    assert d.core.stats()["unsealed"] == 0


# --- reading ---


def test_a_reader_can_wait_for_a_batch_that_is_being_filled() -> None:
    d = Driver()
    given = room(d, 1, b"a", b"b")
    lease = d.lease(3, b"a", b"b", lease_s=60.0)
    assert [view.ready for view in lease.views] == [0, 0]
    wait = d.send(3, m.Wait(0, lease.lease, 1, 30.0))
    assert d.answer(wait) is None
    d.ask(1, m.Fill(0, given.batch, u64(7, 8)), m.Done)
    assert d.answer(wait) == m.Ready(wait, 1, u64(7, 8))
    d.ask(3, m.Read(0, lease.lease, [m.Range(1, 0, 1)]), m.Data)


@pytest.mark.parametrize("how", ["dies", "gives up", "runs late", "is deleted", "damaged"])
def test_whoever_waits_for_a_batch_is_told_when_it_is_lost(how: str) -> None:
    d = Driver()
    if how == "damaged":
        d.begin(1, m.Put(0, [b"a"], u64(PAGE), u64(1)), PAGE)
        batch = 0
    else:
        batch = room(d, 1, b"a", lease_s=5.0).batch
    lease = d.lease(3, b"a", lease_s=60.0)
    wait = d.send(3, m.Wait(0, lease.lease, 1, 30.0))
    match how:
        case "dies":
            d.die(1)
        case "gives up":
            d.ask(1, m.Abort(0, [batch]), m.Done)
        case "runs late":
            d.pass_time(5.1)
        case "is deleted":
            d.ask(2, m.Delete(0, [b"a"]), m.Deleted)
        case _:
            d.arrive(1, u64(2))
    failed = d.answer(wait)
    assert isinstance(failed, m.Failed)
    assert failed.code == "writer_lost"


def test_locating_leases_the_longest_sealed_prefix_and_says_where_it_is() -> None:
    d = Driver()
    d.put(2, b"a", b"b", b"d")
    located = d.ask(3, m.Locate(0, [b"a", b"b", b"c", b"d"], 5.0), m.Located)
    assert (located.count, located.sizes, located.sums) == (2, u64(PAGE, PAGE), u64(ord("a"), ord("b")))
    assert d.core.stats()["leased_objects"] == 2
    d.ask(3, m.Release(0, located.lease), m.Done)
    assert d.held() == NOTHING_HELD
    nothing = d.ask(3, m.Locate(0, [b"x"], 5.0), m.Located)
    assert (nothing.lease, nothing.count, nothing.offsets) == (0, 0, b"")
    assert d.ask(3, m.Locate(0, [b"a"], 0.0), m.Located).lease == 0


def test_an_object_in_segments_is_absent_for_readers_of_whole_ones_and_counted() -> None:
    d = Driver()
    d.put(2, b"a")
    grant = d.announce(2, b"cut", segments=2)[0]
    d.ask(2, m.Written(0, [m.Part(grant.handle, 0, [1, 2])]), m.Done)
    keys = [b"a", b"cut"]
    assert d.ask(3, m.Locate(0, keys, 5.0), m.Located).count == 1
    assert d.ask(3, m.Get(0, keys, u64(PAGE, PAGE)), m.Got).count == 1
    assert d.ask(3, m.CountPrefix(0, keys), m.Counted).sealed == 2


def test_getting_sends_the_prefix_and_its_checksums() -> None:
    d = Driver()
    d.put(2, b"a", b"b")
    got = d.ask(3, m.Get(0, [b"a", b"b", b"c"], u64(PAGE, PAGE, PAGE)), m.Got)
    assert (got.count, got.sums, got.size) == (2, u64(ord("a"), ord("b")), 0)
    (sending,) = [action for action in d.log if isinstance(action, SendData)]
    assert sum(size for _, size in sending.spans) == 2 * PAGE
    d.ask(2, m.Delete(0, [b"a", b"b"]), m.Deleted)
    assert d.held() == NOTHING_HELD | {"lingering_bytes": 2 * PAGE}, "they are on their way"
    d.core.transferred(sending.transfer)
    assert d.held() == NOTHING_HELD


def test_getting_ends_where_an_object_has_another_size_and_tells_it() -> None:
    d = Driver()
    d.put(2, b"a")
    d.put(2, b"b", size=100)
    got = d.ask(3, m.Get(0, [b"a", b"b"], u64(PAGE, PAGE)), m.Got)
    assert (got.count, got.sums, got.size) == (1, u64(ord("a")), 100)
    got = d.ask(3, m.Get(0, [b"b", b"a"], u64(PAGE, PAGE)), m.Got)
    assert (got.count, got.sums, got.size) == (0, b"", 100)
    d.fails(3, m.Get(0, [b"a", b"b"], u64(PAGE)), "bad_request")


@pytest.mark.parametrize("hole", [0, 1, 7, 13, 19])
def test_a_counted_prefix_ends_at_the_hole_eviction_left_in_a_chain(hole: int) -> None:
    """Searching by halves, as others do, finds a key behind the hole and calls all before it present."""
    d = Driver(pages=32)
    keys = names(20)
    d.put(2, *keys)
    d.ask(2, m.Delete(0, [keys[hole]]), m.Deleted)
    counted = d.ask(3, m.CountPrefix(0, keys), m.Counted)
    assert (counted.present, counted.sealed, counted.below) == (hole, hole, hole)


def test_a_counted_prefix_tells_what_is_being_written_from_what_is_sealed() -> None:
    d = Driver()
    d.put(2, b"a")
    room(d, 1, b"b")
    d.put(2, b"c")
    counted = d.ask(3, m.CountPrefix(0, [b"a", b"b", b"c", b"d"]), m.Counted)
    assert (counted.present, counted.sealed, counted.below) == (3, 1, 3)


class Sought(NamedTuple):
    """One `Lower.seek`. ``seeker`` None: nobody waits."""

    keys: list[bytes]
    seeker: Seeker | None
    bring: bool
    prefix: bool


class Below:
    """Lower tiers whose answers a test gives."""

    demotes = False

    def __init__(self) -> None:
        self.seeks: dict[int, Sought] = {}
        self.forgotten: list[bytes] = []
        self.whole: list[int] = []
        self.purged: list[int] = []

    def seek(
        self,
        _tenant: int,
        keys: Sequence[bytes],
        seeker: Seeker | None,
        _now: float,
        *,
        bring: bool,
        prefix: bool = True,
    ) -> Any:
        number = len(self.seeks) + 1
        self.seeks[number] = Sought(list(keys), seeker, bring, prefix)
        return number

    def cancel(self, seek: Any) -> None:
        self.seeks[seek] = self.seeks[seek]._replace(seeker=None)

    def seeker(self, number: int) -> Seeker:
        seeker = self.seeks[number].seeker
        assert seeker is not None
        return seeker

    def offer(self, _rows: bytes, _now: float) -> None:
        raise AssertionError("the arena is not full")

    def sealed(self, rows: Sequence[int]) -> None:
        self.whole += rows

    def forget(self, _tenant: int, keys: Sequence[bytes], _now: float) -> None:
        self.forgotten += keys

    def purge(self, tenant: int, _now: float) -> None:
        self.purged.append(tenant)

    def tick(self, _now: float) -> None:
        pass

    def next_deadline(self) -> None:
        pass

    def protected(self) -> Iterator[int]:
        return iter(())


@pytest.fixture
def below() -> Below:
    return Below()


@pytest.fixture
def tiered(below: Below) -> Driver:
    d = Driver()
    d.core.attach(below)
    return d


def bring(d: Driver, *keys: bytes) -> None:
    """What lower tiers do to bring objects up."""
    states, rows, _ = d.core.catalog.reserve(0, keys, u64(*[PAGE] * len(keys)))
    assert set(states) == {Stored.STORED}
    d.core.catalog.publish(rows, u64(*[key[0] for key in keys]), float("inf"))
    d.core.published(rows)


def test_a_counted_prefix_waits_a_moment_for_lower_tiers_to_say_what_they_hold(tiered: Driver, below: Below) -> None:
    tiered.put(2, b"a")
    counting = tiered.send(3, m.CountPrefix(0, [b"a", b"b", b"c", b"d"]))
    assert tiered.answer(counting) is None
    assert tiered.held()["waiting"] == 1
    assert below.seeks[1][0] == [b"b", b"c", b"d"]
    assert below.seeks[1].bring is False
    below.seeker(1).looked(2, tiered.now)
    tiered.settle()
    assert tiered.answer(counting) == m.Counted(counting, 1, 1, 3)
    slow = tiered.send(3, m.CountPrefix(0, [b"a", b"b"]))
    tiered.pass_time(1.0)
    assert tiered.answer(slow) == m.Counted(slow, 1, 1, 1)
    assert below.seeks[2].seeker is None, "it was cancelled"
    assert tiered.held() == NOTHING_HELD


@pytest.mark.parametrize("late", [False, True])
def test_locating_waits_for_what_is_brought_up_and_no_longer_than_it_said(
    tiered: Driver, below: Below, late: bool
) -> None:
    tiered.put(2, b"a")
    locating = tiered.send(3, m.Locate(0, [b"a", b"b", b"c"], 5.0, wait_s=2.0))
    getting = tiered.send(3, m.Get(0, [b"a", b"b"], u64(PAGE, PAGE), wait_s=2.0))
    assert below.seeks[1].keys == [b"b", b"c"]
    assert below.seeks[1].bring
    below.seeker(1).looked(1, tiered.now)
    tiered.settle()
    assert tiered.answer(locating) is None
    tiered.pass_time(1.9)
    if late:
        tiered.pass_time(0.2)
    else:
        bring(tiered, b"b")
        for number in (1, 2):
            below.seeker(number).settled(tiered.now)
        tiered.settle()
    located, got = tiered.answer(locating), tiered.answer(getting)
    assert isinstance(located, m.Located)
    assert isinstance(got, m.Got)
    assert located.count == got.count == (1 if late else 2)
    tiered.pass_time(4.9)
    assert tiered.held()["leases"] == 1, "its time began with the answer"


def test_nobody_waits_for_lower_tiers_that_have_nothing_or_when_not_asked_to(tiered: Driver, below: Below) -> None:
    assert tiered.ask(3, m.Locate(0, [b"a"], 5.0), m.Located).count == 0
    assert below.seeks == {}
    locating = tiered.send(3, m.Locate(0, [b"a"], 5.0, wait_s=2.0))
    below.seeker(1).looked(0, tiered.now)
    tiered.settle()
    assert isinstance(tiered.answer(locating), m.Located)


def test_a_connection_that_ends_waits_for_lower_tiers_no_more(tiered: Driver, below: Below) -> None:
    tiered.send(3, m.Locate(0, [b"a"], 5.0, wait_s=60.0))
    tiered.die(3)
    assert below.seeks[1].seeker is None
    assert tiered.held() == NOTHING_HELD


def test_a_match_has_what_it_misses_brought_up_for_whoever_asks_again(tiered: Driver, below: Below) -> None:
    tiered.put(2, b"a")
    assert len(tiered.lease(3, b"a", b"b", b"c").views) == 1
    assert below.seeks == {1: Sought([b"b", b"c"], None, bring=True, prefix=True)}


def test_prefetching_says_how_many_will_come(tiered: Driver, below: Below) -> None:
    tiered.put(2, b"a")
    asked = tiered.send(3, m.Prefetch(0, [b"a", b"b", b"c"]))
    assert below.seeks[1].keys == [b"b", b"c"]
    assert below.seeks[1].bring
    assert not below.seeks[1].prefix
    below.seeker(1).looked(1, tiered.now)
    tiered.settle()
    assert tiered.answer(asked) == m.Affected(asked, 1)
    assert tiered.ask(3, m.Prefetch(0, [b"a"]), m.Affected).count == 0


def test_lower_tiers_are_told_what_is_whole_what_was_deleted_and_what_was_purged(tiered: Driver, below: Below) -> None:
    tiered.put(2, b"a", b"b")
    tiered.store(b"c")
    assert len(below.whole) == 3
    tiered.ask(2, m.Delete(0, [b"a", b"unknown here"]), m.Deleted)
    lease = tiered.lease(3, b"b")
    tiered.ask(3, m.Corrupt(0, lease.lease, 0), m.Done)
    assert below.forgotten == [b"a", b"unknown here", b"b"]
    assert tiered.core.delete("default", b"c", tiered.now)
    assert not tiered.core.delete("default", b"d", tiered.now)
    assert below.forgotten[3:] == [b"c", b"d"]
    tiered.ask(2, m.Purge(0), m.Purged)
    assert below.purged == [0]


def test_a_complaint_about_an_object_that_was_replaced_meanwhile_costs_the_new_one_nothing(
    tiered: Driver, below: Below
) -> None:
    """1. a reader leases an object; 2. it is deleted and stored again; 3. the reader finds the first one damaged."""
    tiered.put(2, b"a")
    lease = tiered.lease(3, b"a")
    tiered.ask(2, m.Delete(0, [b"a"]), m.Deleted)
    tiered.put(2, b"a")
    below.forgotten.clear()
    tiered.ask(3, m.Corrupt(0, lease.lease, 0), m.Done)
    assert below.forgotten == []
    assert tiered.there(3, b"a") == [True]


def test_an_object_that_was_given_less_time_does_not_live_longer_below(tiered: Driver, below: Below) -> None:
    tiered.put(2, b"a", b"b")
    rows = [tiered.core.catalog.find(0, key) for key in (b"a", b"b")]
    for row in rows:
        assert row is not None
        tiered.core.catalog.mark_clean(row, True)
    tiered.ask(2, m.Touch(0, [b"a"], 20.0), m.Affected)
    assert below.forgotten == [b"a"]
    tiered.ask(2, m.Touch(0, [b"a", b"b"], 0.0), m.Affected)
    assert below.forgotten == [b"a"], "more time costs no copy"
    clean = [tiered.core.catalog.info(row).clean for row in rows if row is not None]
    assert clean == [False, True], "what lies nowhere below is to be copied again"


def test_an_object_a_lower_tier_found_damaged_is_given_to_nobody(tiered: Driver) -> None:
    tiered.put(2, b"a")
    row = tiered.core.catalog.find(0, b"a")
    assert row is not None
    handle = tiered.core.catalog.handle(row)
    tiered.core.damaged([handle, handle + (1 << 32)])
    assert tiered.there(3, b"a") == [False]
    assert tiered.core.stats()["corrupt"] == 1
    tiered.core.damaged([handle])
    assert tiered.core.stats()["corrupt"] == 1


def test_what_a_lower_tier_brings_up_is_waited_for_like_any_unsealed_object() -> None:
    d = Driver()
    for key, filled in ((b"a", True), (b"b", False)):
        states, rows, _ = d.core.catalog.reserve(0, [key], u64(PAGE))
        assert list(states) == [Stored.STORED]
        lease = d.lease(3, key, lease_s=60.0)
        wait = d.send(3, m.Wait(0, lease.lease, 1, 30.0))
        if filled:
            d.core.catalog.publish(rows, u64(5), float("inf"))
            d.core.published(rows)
        else:
            d.core.abandoned(rows)
        d.settle()
        assert isinstance(d.answer(wait), m.Ready if filled else m.Failed)
