"""Tenants, quotas, pins, times to live, watermarks, draining, purging: one story a test."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kvrelay.errors import NotFoundError
from kvrelay.pool.core.actions import Close, Send
from kvrelay.pool.core.pool import PoolCore
from kvrelay.pool.core.tenants import Quota, Tenant
from kvrelay.pool.core.upkeep import EXPIRE_OBJECTS, STEP_S, STUCK_S, Rules
from kvrelay.testing.pool_core import NOTHING_HELD, PAGE, Driver, column
from kvrelay.wire import limits
from kvrelay.wire import messages as m
from kvrelay.wire.bulk import ObjectInfo, Stored

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ONE = Tenant(name="one", token="secret 1", shm=True)
TWO = Tenant(name="two", token="secret 2", quota=Quota(quota_bytes=2 * PAGE))


def names(count: int) -> list[bytes]:
    return [number.to_bytes(8, "big") for number in range(count)]


# --- tenants ---


def hello(core: PoolCore, token: str | None, certificates: tuple[str, ...] = (), *, shm: bool = True) -> m.Reply:
    number = len(core.desk.connections) + 1
    core.connected(number, shm_capable=shm, certificates=certificates)
    core.handle(number, m.Hello(1, [1], "c", token), 0.0)
    answer = core.take_actions()[0]
    assert isinstance(answer, Send)
    return answer.reply


def test_a_token_or_a_certificate_says_which_tenant_one_is() -> None:
    three = Tenant(name="three", certificate="three.example")
    core = PoolCore(PAGE, pool="p", server="s", tenants=[ONE, TWO, three])
    for token, certificates, tenant in (
        ("secret 1", (), 0),
        ("secret 2", ("three.example",), 1),
        (None, ("x", "three.example"), 2),
    ):
        assert isinstance(hello(core, token, certificates), m.Welcome)
        assert core.desk.connections[len(core.desk.connections)].tenant == tenant
    for token, certificates in (("secret 3", ()), (None, ()), ("wrong", ("three.example",)), (None, ("other",))):
        refused = hello(core, token, certificates)
        assert isinstance(refused, m.Failed)
        assert refused.code == "unauthorized"
        assert "secret" not in refused.message


def test_the_arenas_memory_is_for_trusted_tenants_only() -> None:
    core = PoolCore(PAGE, pool="p", server="s", tenants=[ONE, TWO])
    trusted, other = hello(core, "secret 1"), hello(core, "secret 2")
    assert isinstance(trusted, m.Welcome)
    assert isinstance(other, m.Welcome)
    assert (trusted.shm, other.shm) == (True, False)
    core.handle(2, m.MapArena(2), 0.0)
    (answer,) = core.take_actions()
    assert not isinstance(answer, Close)
    assert isinstance(answer.reply, m.Failed)


def test_keys_and_tickets_of_different_tenants_never_meet() -> None:
    d = Driver(tenants=[ONE, TWO])
    assert list(d.put(2, b"k")) == [Stored.STORED]
    assert d.there(2, b"k") == [True]
    assert d.there(3, b"k") == [False]
    assert d.ask(3, m.CountPrefix(0, [b"k"]), m.Counted).present == 0
    assert d.lease(3, b"k").views == []
    assert list(d.put(3, b"k")) == [Stored.STORED]
    assert d.ask(3, m.Delete(0, [b"k"]), m.Deleted).count == 1
    assert d.there(2, b"k") == [True]
    d.ask(2, m.OpenTicket(0, "t", 10.0), m.Done)
    d.fails(3, m.Post(0, "t", b"note"), "not_found")
    d.ask(3, m.OpenTicket(0, "t", 10.0), m.Done)
    d.ask(2, m.Register(0, "P0", "r", "ns", {}), m.Done)
    assert d.ask(3, m.ListEngines(0), m.Engines).engines == []


def test_a_tenant_over_its_quota_evicts_its_own_and_is_full_when_that_is_leased() -> None:
    d = Driver(pages=8, tenants=[ONE, TWO])
    d.put(2, *names(4))
    d.put(3, b"a", b"b")
    assert list(d.put(3, b"c")) == [Stored.STORED]
    assert sum(d.there(3, b"a", b"b")) == 1
    assert d.there(3, b"c") == [True]
    d.lease(3, *[key for key, there in zip((b"a", b"b"), d.there(3, b"a", b"b"), strict=True) if there])
    d.lease(3, b"c")
    assert list(d.put(3, b"d")) == [Stored.FULL]
    assert d.announce(3, b"d")[0].state == "full"
    assert d.there(2, *names(4)) == [True] * 4
    stats = d.core.stats()
    assert (stats["evicted_for_quota"], stats["evicted_for_room"], stats["refused"]) == (1, 0, 2)
    d.core.set_quota("two", quota_bytes=3 * PAGE)
    assert list(d.put(3, b"d")) == [Stored.STORED]
    uses = {use.name: use for use in d.core.tenant_uses()}
    assert (uses["one"].objects, uses["one"].held_bytes, uses["one"].quota.quota_bytes) == (4, 4 * PAGE, None)
    assert (uses["two"].objects, uses["two"].held_bytes, uses["two"].quota.quota_bytes) == (3, 3 * PAGE, 3 * PAGE)


def test_a_refusal_names_the_bound_its_tenant_reached() -> None:
    few = Tenant(name="few", token="3", quota=Quota(max_objects=2), shm=True)
    d = Driver(pages=8, tenants=[TWO, few])
    for conn, told in ((2, "'two' may hold 8192 bytes"), (3, "'few' may have 2 objects (max_objects), it has 2")):
        d.put(conn, b"a", b"b")
        d.lease(conn, b"a", b"b")
        put = d.put_done(conn, b"c")
        assert list(put.states) == [Stored.FULL]
        assert told in put.why
        announced = d.ask(conn, m.Announce(0, "g", [m.Spec(b"c", PAGE)], 10.0), m.Announced)
        assert (announced.grants[0].state, announced.why) == ("full", put.why)
    room = d.ask(3, m.Room(0, [b"c"], PAGE.to_bytes(8, "little"), 10.0), m.RoomGiven)
    assert (list(room.states), room.why) == ([Stored.FULL], put.why)


def test_a_full_arena_is_no_bound_of_a_tenants() -> None:
    d = Driver(pages=4, tenants=[ONE, TWO])
    d.put(2, *names(4))
    d.lease(2, *names(4))
    put = d.put_done(3, b"a")
    assert (list(put.states), put.why) == ([Stored.FULL], "")


def test_a_tenant_with_all_its_connections_is_told_so_and_let_in_when_one_is_gone() -> None:
    core = PoolCore(
        PAGE, pool="p", server="s", tenants=[ONE, Tenant(name="two", token="2", quota=Quota(max_connections=2))]
    )

    def hello(number: int, token: str) -> m.Reply:
        core.connected(number, shm_capable=False)
        core.handle(number, m.Hello(1, [1], "c", token), 0.0)
        sent, *closed = core.take_actions()
        assert isinstance(sent, Send)
        assert [type(action) for action in closed] == ([Close] if isinstance(sent.reply, m.Failed) else [])
        return sent.reply

    assert all(isinstance(hello(number, "2"), m.Welcome) for number in (1, 2))
    refused = hello(3, "2")
    assert isinstance(refused, m.Failed)
    assert refused.code == "pool_full"
    assert "tenant 'two' may have 2 connections (max_connections)" in refused.message
    assert isinstance(hello(4, "secret 1"), m.Welcome), "others are not concerned"
    core.disconnected(3, 0.0)
    core.disconnected(1, 0.0)
    assert isinstance(hello(5, "2"), m.Welcome)
    assert core.set_quota("two", max_connections=1) == Quota(max_connections=1)
    assert core.stats()["connections_refused"] == 1
    assert [use.connections for use in core.tenant_uses()] == [1, 2], "who is in stays"
    assert isinstance(hello(6, "2"), m.Failed)
    core.check_integrity()


def test_an_unknown_tenant_is_named_beside_those_there_are() -> None:
    core = PoolCore(PAGE, pool="p", server="s", tenants=[ONE, TWO])
    with pytest.raises(NotFoundError, match=r"'three'.*one, two"):
        core.set_quota("three", quota_bytes=None)


# --- pins and times to live ---


def test_a_pinned_object_stays_whoever_connects_or_leaves_until_it_is_unpinned() -> None:
    d = Driver(pages=2)
    d.put(2, b"kept", b"idle", ttl_s=5.0)
    assert d.ask(2, m.Pin(0, [b"kept", b"absent", b"kept"]), m.Affected).count == 1
    d.die(2)
    d.pass_time(10.0)
    assert d.there(3, b"kept", b"idle") == [True, False]
    assert list(d.put(3, b"x", b"y")) == [Stored.STORED, Stored.FULL]
    assert d.core.stats()["pinned_objects"] == 1
    assert d.ask(3, m.Purge(0), m.Purged).count == 1
    assert d.ask(3, m.Unpin(0, [b"kept"]), m.Affected).count == 1
    d.pass_time(0.1)
    assert d.there(3, b"kept") == [False], "its time had come meanwhile"


def test_an_object_expires_on_time_and_touching_it_gives_it_new_time() -> None:
    d = Driver(rules=Rules(ttl_s=100.0))
    d.put(2, b"short", b"touched", ttl_s=5.0)
    d.put(2, b"default")
    d.store(b"in segments")
    deadline = d.core.next_deadline()
    assert deadline is not None
    assert deadline <= d.now + 5.0
    d.pass_time(4.9)
    assert d.there(3, b"short", b"touched") == [True, True]
    assert d.ask(3, m.Touch(0, [b"touched", b"absent"], 50.0), m.Affected).count == 1
    d.pass_time(0.2)
    assert d.there(3, b"short", b"touched") == [False, True]
    d.pass_time(50.0)
    assert d.there(3, b"touched", b"default", b"in segments") == [False, True, True]
    d.pass_time(50.0)
    assert d.there(3, b"default", b"in segments") == [False, False]
    assert d.core.stats()["expired_objects"] == 4


def test_a_leased_object_whose_time_has_come_can_be_read_to_the_end_and_not_found_again() -> None:
    d = Driver()
    d.put(2, b"k", ttl_s=1.0)
    lease = d.lease(3, b"k")
    d.pass_time(2.0)
    assert d.there(3, b"k") == [False]
    d.ask(3, m.Read(0, lease.lease, [m.Range(0, 0, 1)]), m.Data)


def test_many_objects_that_expire_together_go_in_bounded_steps() -> None:
    count = EXPIRE_OBJECTS + 10
    d = Driver(pages=count)
    d.core.check_integrity = lambda: None  # type: ignore[method-assign] # linear in what is there
    d.put(2, *names(count), ttl_s=1.0)
    d.pass_time(1.0)
    assert d.core.stats()["objects"] == 10
    deadline = d.core.next_deadline()
    assert deadline is not None
    assert deadline <= d.now, "there is more to do at once"
    d.pass_time(0.0)
    assert d.core.stats()["objects"] == 0
    assert d.core.next_deadline() is None


# --- watermarks ---


def test_above_the_high_watermark_objects_are_evicted_down_to_the_low_one() -> None:
    d = Driver(pages=20, rules=Rules(high=0.8, low=0.5))
    d.put(2, *names(16))
    assert d.core.next_deadline() is None
    grant = d.announce(2, b"one more")[0]
    deadline = d.core.next_deadline()
    assert deadline is not None
    assert deadline <= d.now
    d.ask(2, m.Written(0, [m.Part(grant.handle, 0, [1])]), m.Done)
    assert d.core.stats()["free_bytes"] == 10 * PAGE
    assert d.core.stats()["evicted_at_watermark"] == d.core.stats()["evictions"] == 7
    due = d.core.next_deadline()
    assert due is None or due > d.now


def test_a_pool_whose_objects_are_all_in_use_does_not_spin_above_its_watermark() -> None:
    d = Driver(pages=10, rules=Rules(high=0.5, low=0.2))
    d.put(2, *names(8))
    lease = d.lease(3, *names(8), lease_s=1000.0)
    d.pass_time(0.0)
    deadline = d.core.next_deadline()
    assert deadline == d.now + STUCK_S
    d.ask(3, m.Release(0, lease.lease), m.Done)
    d.pass_time(STUCK_S)
    assert d.core.stats()["objects"] == 2


class Below:
    """A lower tier that copies what it is offered when the test says so."""

    demotes = True

    def __init__(self, d: Driver) -> None:
        self.d = d
        self.offered: list[int] = []

    def seek(self, *_: object, **__: object) -> Any:
        raise AssertionError("nobody asks for anything")

    def cancel(self, _seek: Any) -> None:
        raise AssertionError("nobody asked for anything")

    def sealed(self, _rows: Sequence[int]) -> None:
        pass

    def forget(self, _tenant: int, _keys: Sequence[bytes], _now: float) -> None:
        pass

    def purge(self, _tenant: int, _now: float) -> None:
        pass

    def tick(self, _now: float) -> None:
        pass

    def next_deadline(self) -> None:
        pass

    def protected(self) -> Iterator[int]:
        return iter(self.offered)

    def offer(self, rows: bytes, _now: float) -> None:
        self.offered += memoryview(rows).cast("I").tolist()
        self.d.core.catalog.pin_rows(rows)

    def copied(self) -> None:
        for row in self.offered:
            self.d.core.catalog.mark_clean(row, True)
            self.d.core.catalog.unpin(row)
        self.offered = []


def test_with_a_lower_tier_only_what_was_copied_down_is_evicted_at_the_watermark() -> None:
    d = Driver(pages=10, rules=Rules(high=0.5, low=0.3))
    below = Below(d)
    d.core.attach(below)
    d.put(2, *names(5))
    assert below.offered == []
    d.put(2, b"one more")
    assert len(below.offered) == 5
    assert d.core.stats()["objects"] == 6, "nothing is lost while it is copied"
    below.copied()
    d.pass_time(STUCK_S)
    assert d.core.stats()["objects"] == 3
    assert d.core.next_deadline() is None


@pytest.mark.parametrize("quota", [Quota(quota_bytes=10 * PAGE), Quota(max_objects=10)])
def test_of_a_tenant_near_its_quota_its_own_is_copied_down_and_evicted_before_it_is_lost(quota: Quota) -> None:
    d = Driver(pages=100, rules=Rules(high=0.5, low=0.3), tenants=[ONE, Tenant(name="two", token="2", quota=quota)])
    below = Below(d)
    d.core.attach(below)
    d.put(2, b"of the first", *names(8))
    d.put(3, *names(6))
    d.pass_time(STEP_S)
    assert {d.core.catalog.info(row).tenant for row in below.offered} == {1}
    assert d.core.stats()["evictions"] == 0
    below.copied()
    d.pass_time(STUCK_S)
    assert [use.objects for use in d.core.tenant_uses()] == [9, 3]
    d.put(3, *(b"new %d" % number for number in range(6)))
    below.copied()
    assert list(d.put(3, *(b"newer %d" % number for number in range(3)))) == [Stored.STORED] * 3
    stats = d.core.stats()
    assert (stats["lost"], stats["evicted_for_room"]) == (0, 0)
    assert next(use.objects for use in d.core.tenant_uses()) == 9


def full_of_what_is_below(quota_pages: int | None = None) -> Driver:
    """Eight pages, all of them the first tenant's and in a lower tier too; what the second may hold is given."""
    quota = None if quota_pages is None else quota_pages * PAGE
    d = Driver(pages=8, tenants=[ONE, Tenant(name="two", token="2", quota=Quota(quota_bytes=quota))])
    d.core.attach(Below(d))
    d.put(2, *names(8))
    _, rows = d.core.catalog.lookup(0, names(8))
    for row in memoryview(rows).cast("I"):
        d.core.catalog.mark_clean(row, True)
    return d


@pytest.mark.parametrize("sizes", [[1 << 62, PAGE], [(1 << 64) - 1] * 2, [limits.MAX_OBJECT_BYTES + 1, 1], [PAGE]])
def test_nothing_is_evicted_for_a_request_that_makes_no_sense(sizes: list[int]) -> None:
    d = full_of_what_is_below()
    d.fails(2, m.Room(0, [b"x", b"y"], column("Q", sizes), 1.0), "bad_request")
    assert d.core.stats()["objects"] == 8


def test_what_is_beyond_a_tenants_quota_takes_nothing_of_another_tenant() -> None:
    d = full_of_what_is_below(quota_pages=1)
    d.put(3, b"x", b"y", b"z")
    assert d.core.stats()["objects"] == 8
    assert d.there(2, *names(8)).count(True) == 7


def test_what_a_batch_finds_there_neither_needs_room_nor_makes_it() -> None:
    d = full_of_what_is_below()
    assert set(d.put(2, *names(8))) == {Stored.PRESENT}
    assert d.core.stats()["evictions"] == 0
    states = d.put(2, *names(8)[:6], b"new", b"too")
    assert set(states[:6]) == {Stored.PRESENT}
    assert set(states[6:]) == {Stored.STORED}


@pytest.mark.parametrize("ticket", [None, "hand-over"])
def test_what_is_announced_takes_the_place_of_what_is_below_too(ticket: str | None) -> None:
    d = Driver(pages=8)
    d.core.attach(Below(d))
    d.put(2, *names(8))
    _, rows = d.core.catalog.lookup(0, names(8))
    for row in memoryview(rows).cast("I")[4:]:
        d.core.catalog.mark_clean(row, True)
    d.ask(2, m.OpenTicket(0, "hand-over", 60.0), m.Done)
    specs = [m.Spec(b"new", PAGE, 2, 2), m.Spec(names(8)[7], PAGE), m.Spec(b"too", PAGE, 2, 2)]
    announced = d.ask(2, m.Announce(0, "g", specs, 60.0, ticket), m.Announced)
    assert [grant.state for grant in announced.grants] == ["granted", "sealed", "granted"]
    there = d.there(2, *names(8))
    assert (there[:4], sum(there), there[7]) == ([True] * 4, 6, True)
    stats = d.core.stats()
    assert (stats["lost"], stats["evicted_for_room"]) == (0, 2)


# --- draining, purging, listing ---


def test_a_draining_pool_answers_readers_and_refuses_writers() -> None:
    d = Driver()
    d.put(2, b"a")
    grant = d.announce(2, b"begun", lease_s=60.0)[0]
    lease = d.lease(3, b"a")
    d.core.drain()
    d.fails(2, m.Announce(0, "g", [m.Spec(b"new", PAGE)], 1.0), "draining")
    d.fails(2, m.Room(0, [b"new"], column("Q", [PAGE]), 1.0), "draining")
    request, delivery = d.begin(2, m.Put(0, [b"new"], column("Q", [PAGE]), column("Q", [1])), PAGE)
    assert delivery is None
    assert isinstance(d.answer(request), m.Failed)
    assert d.ask(3, m.Get(0, [b"a"], column("Q", [PAGE])), m.Got).count == 1
    assert d.core.stats()["draining"] == 1
    d.ask(2, m.Written(0, [m.Part(grant.handle, 0, [1])]), m.Done)
    d.ask(3, m.Release(0, lease.lease), m.Done)
    d.core.drain(on=False)
    assert list(d.put(2, b"new")) == [Stored.STORED]


def test_purging_takes_a_tenants_idle_objects_and_nobody_elses() -> None:
    d = Driver(tenants=[ONE, TWO])
    d.put(2, b"idle", b"leased", b"pinned")
    d.put(3, b"other")
    lease = d.lease(2, b"leased")
    d.ask(2, m.Pin(0, [b"pinned"]), m.Affected)
    assert d.ask(2, m.Purge(0), m.Purged).count == 1
    assert d.there(2, b"idle", b"leased", b"pinned") == [False, True, True]
    assert d.there(3, b"other") == [True]
    d.ask(2, m.Release(0, lease.lease), m.Done)
    assert d.core.purge("one", d.now) == 1
    assert d.core.purge("two", d.now) == 1
    assert d.core.stats()["purged"] == 3
    assert d.held() == NOTHING_HELD


def test_purging_takes_what_is_on_its_way_down_and_leaves_what_a_client_uses_meanwhile() -> None:
    d = Driver(pages=10, rules=Rules(high=0.5, low=0.3))
    below = Below(d)
    d.core.attach(below)
    d.put(2, *names(5))
    d.put(2, names(6)[5])
    assert len(below.offered) == 5
    lease = d.lease(2, names(6)[0])
    d.ask(2, m.Pin(0, [names(6)[1]]), m.Affected)
    assert d.ask(2, m.Purge(0), m.Purged).count == 4
    assert d.there(2, *names(6)) == [True, True, False, False, False, False]
    assert d.core.stats()["purged"] == 4
    below.copied()
    d.ask(2, m.Release(0, lease.lease), m.Done)
    assert d.there(2, *names(6)) == [True, True, False, False, False, False]
    d.ask(2, m.Delete(0, names(6)), m.Deleted)
    assert d.held() == NOTHING_HELD


def test_objects_are_listed_by_the_page_with_what_is_known_of_them() -> None:
    d = Driver(pages=64, tenants=[ONE, TWO])
    d.put(2, *names(10))
    d.put(2, b"x one", size=100, ttl_s=60.0)
    d.ask(2, m.Pin(0, [b"x one"]), m.Affected)
    d.announce(2, b"x two", lease_s=60.0)
    d.put(3, b"x of another")
    d.pass_time(20.0)
    listing = d.ask(2, m.ListObjects(0, prefix=b"x "), m.Listing)
    assert listing.objects == [
        ObjectInfo(b"x one", 100, "sealed", "dram", 1, 40.0),
        ObjectInfo(b"x two", PAGE, "writing", "dram", 0, 0.0),
    ]
    seen: list[bytes] = []
    cursor = 0
    for _ in range(20):
        page = d.ask(2, m.ListObjects(0, cursor, 5), m.Listing)
        seen += [shown.key for shown in page.objects]
        cursor = page.cursor
        if not cursor:
            break
    assert sorted(seen) == sorted([*names(10), b"x one", b"x two"])
    _, everything = d.core.objects(d.now)
    assert {name for name, _ in everything} == {"one", "two"}
    _, own = d.core.objects(d.now, tenant="two")
    assert [shown.key for _, shown in own] == [b"x of another"]


def test_an_object_too_large_for_what_is_in_use_evicts_nothing() -> None:
    d = Driver(pages=64)
    keys = names(64)
    d.put(2, *keys)
    for key in keys[::8]:
        d.lease(3, key)
    assert d.announce(2, b"hopeless", pages=9)[0].state == "full"
    assert all(d.there(3, *keys))
    assert d.announce(2, b"fits", pages=7)[0].state == "granted"
    assert sum(d.there(3, *keys)) == 57
