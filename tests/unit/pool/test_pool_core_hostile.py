"""What a hostile or broken client can ask of the pool's core: refused, bounded, and without harm to others."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvrelay.pool.core.desk import ANNOUNCED_WEIGHT, MAX_HELD, TICKET_WEIGHT
from kvrelay.pool.core.order import Order
from kvrelay.pool.core.tenants import Tenant
from kvrelay.testing.pool_core import NOTHING_HELD, PAGE, Driver
from kvrelay.wire import limits
from kvrelay.wire import messages as m
from kvrelay.wire.frames import encode

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvrelay.pool.core.row import Row


@pytest.mark.parametrize("which", ["another connection", "a handle that never was", "after giving it up"])
def test_a_payload_for_an_object_of_another_never_touches_the_arena(which: str) -> None:
    d = Driver()
    grant = d.announce(2, b"k")[0]
    handle = grant.handle + 1000 if which == "a handle that never was" else grant.handle
    sender = 2 if which == "after giving it up" else 3
    if sender == 2:
        d.ask(2, m.Abort(0, [handle]), m.Done)
    request, delivery = d.begin(sender, m.Write(0, [m.Part(handle, 0, [1])]), PAGE)
    assert delivery is None
    assert isinstance(d.answer(request), m.Failed)


def test_an_object_in_more_segments_than_allowed_is_refused_before_its_books_are_made() -> None:
    """1 GiB in 2**30 segments would take 9 GiB to keep track of."""
    d = Driver()
    d.fails(2, m.Announce(0, "g", [m.Spec(b"k", 1 << 30, 1 << 15, 1 << 15)], 1.0), "bad_request")
    d.fails(2, m.Announce(0, "g", [m.Spec(b"k", 1 << 17, 2, limits.MAX_SEGMENTS)], 1.0), "bad_request")


def test_an_object_in_segments_of_next_to_nothing_is_refused() -> None:
    """16,384 objects of 64 KiB in 65,536 segments each, one message, took 17 GiB to keep track of."""
    d = Driver(pages=16)
    d.fails(2, m.Announce(0, "g", [m.Spec(b"k", 1 << 16, 1 << 16, 1)], 1.0), "bad_request")
    d.fails(2, m.Announce(0, "g", [m.Spec(b"k", 65 * 31, 65, 1)], 1.0), "bad_request")
    assert d.announce(2, b"many", pages=4, layers=4, segments=128)[0].state == "granted"
    specs = [m.Spec(b"few", 64, 8, 8)]
    assert d.ask(2, m.Announce(0, "g", specs, 1.0), m.Announced).grants[0].state == "granted"


def test_what_one_connection_has_announced_and_not_sealed_is_bounded() -> None:
    d = Driver(pages=MAX_HELD // ANNOUNCED_WEIGHT + limits.MAX_KEYS)
    d.core.check_integrity = lambda: None  # type: ignore[method-assign] # linear in what is held
    batches = [
        [number.to_bytes(4, "big") for number in range(first, first + limits.MAX_KEYS)]
        for first in range(0, MAX_HELD // ANNOUNCED_WEIGHT, limits.MAX_KEYS)
    ]
    handles = [[grant.handle for grant in d.announce(2, *batch, lease_s=60.0)] for batch in batches]
    d.fails(2, m.Announce(0, "g", [m.Spec(b"k", PAGE)], 60.0), "pool_full")
    d.ask(2, m.Abort(0, handles[0]), m.Done)
    sealed = [m.Part(handle, 0, [1]) for handle in handles[1]]
    d.ask(2, m.Written(0, sealed), m.Done)
    assert {grant.state for grant in d.announce(2, *batches[0], lease_s=60.0)} == {"granted"}
    assert {grant.state for grant in d.announce(2, *batches[1], lease_s=60.0)} == {"sealed"}
    d.announce(2, *[b"x" + key for key in batches[0]], lease_s=60.0)
    d.fails(2, m.Announce(0, "g", [m.Spec(b"k", PAGE)], 60.0), "pool_full")
    assert d.announce(3, b"k")[0].state == "granted"
    d.pass_time(61.0)
    assert d.core.desk.connections[2].held == 0
    assert d.held() == NOTHING_HELD


def test_a_tenants_notes_are_bounded_whatever_tickets_hold_them_and_others_go_on() -> None:
    d = Driver(tenants=[Tenant(name="one", token="1"), Tenant(name="two", token="2")])
    d.core.check_integrity = lambda: None  # type: ignore[method-assign] # linear in what is held
    note = bytes(limits.MAX_NOTE_BYTES - limits.NOTE_COST_BYTES)
    each = limits.MAX_NOTES_BYTES // len(note)
    count, rest = divmod(limits.MAX_TENANT_NOTES_BYTES // limits.MAX_NOTE_BYTES, each)
    for number in range(count + 1):
        d.ask(2, m.OpenTicket(0, str(number), 60.0), m.Done)
        for _ in range(each if number < count else rest):
            d.ask(2, m.Post(0, str(number), note), m.Done)
        d.log.clear()
    d.fails(1, m.Post(0, str(count), b""), "pool_full")
    d.ask(3, m.OpenTicket(0, "t", 60.0), m.Done)
    d.ask(3, m.Post(0, "t", note), m.Done)
    d.ask(2, m.Collect(0, "0", 0.0), m.Notes)
    d.ask(1, m.Post(0, str(count), note), m.Done)
    d.ask(2, m.EndTicket(0, "1"), m.Done)
    d.ask(1, m.Post(0, str(count), note), m.Done)
    d.die(2)
    assert [d.core.tickets._kept[tenant] for tenant in (0, 1)] == [0, limits.MAX_NOTE_BYTES]


def test_one_tenants_registrations_leave_room_for_anothers() -> None:
    d = Driver(tenants=[Tenant(name="one", token="1"), Tenant(name="two", token="2")])
    facts = {"k": "x" * (limits.MAX_FACTS_BYTES - 100)}
    for number in range(10, 10 + limits.MAX_ENGINES_BYTES // limits.MAX_FACTS_BYTES):
        d.core.connected(number, shm_capable=False)
        d.send(number, m.Hello(0, [1], "c", "1"))
        d.send(number, m.Register(0, "E", "r", "n", facts))
    d.fails(2, m.Register(0, "E", "r", "n", facts), "pool_full")
    d.ask(3, m.Register(0, "E", "r", "n", facts), m.Done)


def test_checksums_of_more_segments_than_a_message_holds_are_refused_before_they_are_gathered() -> None:
    """16,384 times the same object of 65,536 segments would be 8 GiB of checksums."""
    d = Driver(pages=512)
    grant = d.announce(2, b"k", pages=512, segments=limits.MAX_SEGMENTS)[0]
    d.ask(2, m.Written(0, [m.Part(grant.handle, 0, [1] * limits.MAX_SEGMENTS)]), m.Done)
    lease = d.lease(3, *[b"k"] * limits.MAX_KEYS)
    d.fails(3, m.Wait(0, lease.lease, 1, 1.0), "bad_request")
    d.fails(3, m.Read(0, lease.lease, [m.Range(0, 0, limits.MAX_SEGMENTS)] * limits.MAX_KEYS), "bad_request")


def test_a_wait_is_answered_with_as_many_layers_as_one_message_holds() -> None:
    d = Driver(pages=16 * 512)
    layers, segments = 1024, 64
    keys = [bytes([n]) for n in range(16)]
    for grant in d.announce(2, *keys, pages=512, layers=layers, segments=segments):
        sums = [1 << 63] * (layers * segments)
        d.ask(2, m.Written(0, [m.Part(grant.handle, 0, sums)]), m.Done)
    lease = d.lease(3, *keys)
    first = d.ask(3, m.Wait(0, lease.lease, layers, 1.0), m.Ready)
    assert 0 < first.layers < layers
    assert len(first.sums) == first.layers * segments * len(keys) * 8
    assert len(encode(first)) <= limits.MAX_BODY_BYTES
    rest = first.layers
    while rest < layers:
        rest = d.ask(3, m.Wait(0, lease.lease, layers, 1.0, rest), m.Ready).layers
    assert rest == layers


def test_a_tickets_notes_always_fit_one_answer() -> None:
    d = Driver()
    d.ask(3, m.OpenTicket(0, "t", 10.0), m.Done)
    note = bytes(limits.MAX_NOTE_BYTES)
    for _ in range(limits.MAX_NOTES_BYTES // len(note)):
        d.ask(2, m.Post(0, "t", note), m.Done)
    d.fails(2, m.Post(0, "t", note), "pool_full")
    notes = d.ask(3, m.Collect(0, "t", 0.0), m.Notes)
    assert len(encode(notes)) <= limits.MAX_BODY_BYTES
    d.ask(2, m.Post(0, "t", note), m.Done)


def test_registrations_always_fit_one_answer() -> None:
    d = Driver()
    d.fails(1, m.Register(0, "P", "r", "n", {"k": "x" * (limits.MAX_FACTS_BYTES + 1)}), "bad_request")
    facts = {"k": "x" * (limits.MAX_FACTS_BYTES - 100)}
    registered = 0
    for number in range(10, 200):
        d.core.connected(number, shm_capable=False)
        d.send(number, m.Hello(0, [1], "c"))
        registered += isinstance(d.answer(d.send(number, m.Register(0, "E", "r", "n", facts))), m.Done)
    d.fails(2, m.Register(0, "E", "r", "n", facts), "pool_full")
    d.ask(10, m.Register(0, "E", "r", "n", facts), m.Done)  # in place of what it had
    engines = d.ask(3, m.ListEngines(0), m.Engines)
    assert len(engines.engines) == registered
    assert len(encode(engines)) <= limits.MAX_BODY_BYTES


@pytest.mark.parametrize("what", ["leases", "waits", "tickets", "collects"])
def test_what_one_connection_may_hold_is_bounded_and_others_go_on(what: str) -> None:
    d = Driver(pages=limits.MAX_KEYS)
    d.core.check_integrity = lambda: None  # type: ignore[method-assign] # linear in what is held
    keys = [number.to_bytes(2, "big") for number in range(limits.MAX_KEYS)]
    d.announce(2, *keys)
    lease = d.lease(3, *keys, lease_s=60.0)
    d.ask(3, m.OpenTicket(0, "t", 60.0), m.Done)
    requests = {
        "leases": m.Match(0, keys, 60.0),
        "waits": m.Wait(0, lease.lease, 1, 60.0),
        "tickets": m.OpenTicket(0, "", 60.0),
        "collects": m.Collect(0, "t", 60.0),
    }
    each = len(keys) if what in {"leases", "waits"} else 1
    refused = None
    for number in range(MAX_HELD // each + 2):
        request = m.OpenTicket(0, str(number), 60.0) if what == "tickets" else requests[what]
        answer = d.answer(d.send(3, request))
        d.log.clear()
        if isinstance(answer, m.Failed):
            refused = answer
            break
    assert refused is not None
    assert refused.code == "pool_full"
    d.lease(2, *keys)
    d.die(3)
    d.die(2)
    assert d.held() == NOTHING_HELD


def test_leases_of_next_to_nothing_are_as_bounded_as_large_ones() -> None:
    """A million of them took 700 MB and, when their connection ended, the pool's attention for seconds."""
    d = Driver()
    d.core.check_integrity = lambda: None  # type: ignore[method-assign] # linear in what is held
    d.store(b"k")
    for _ in range(MAX_HELD // TICKET_WEIGHT):
        d.core.handle(3, m.Locate(1, [b"k"], 3600.0), d.now)
        d.core.take_actions()
    d.fails(3, m.Locate(0, [b"k"], 3600.0), "pool_full")
    d.die(3)
    assert d.held() == NOTHING_HELD


def test_what_was_let_go_can_be_held_again() -> None:
    d = Driver()
    d.store(b"k")
    for _ in range(3 * MAX_HELD // limits.MAX_KEYS):
        lease = d.lease(3, *[b"k"] * limits.MAX_KEYS)
        d.ask(3, m.Release(0, lease.lease), m.Done)
        d.log.clear()


def test_timers_of_what_is_over_do_not_pile_up() -> None:
    d = Driver()
    for _ in range(500):
        d.store(b"k")
        lease = d.lease(3, b"k", lease_s=3600.0)
        d.ask(3, m.Release(0, lease.lease), m.Done)
        d.ask(3, m.OpenTicket(0, "t", 3600.0), m.Done)
        d.ask(3, m.EndTicket(0, "t"), m.Done)
        d.ask(3, m.Delete(0, [b"k"]), m.Deleted)
        d.log.clear()
    assert len(d.core.desk._timers) < 200
    assert d.core.next_deadline() is None


def test_a_batch_that_finds_no_room_looks_for_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With everything in use each search walked over all objects: 16,384 of them took 15 seconds."""
    d = Driver(pages=8)
    keys = [bytes([n]) for n in range(8)]
    d.store(*keys)
    d.lease(3, *keys)
    looked = 0

    def counted(_order: Order[Row], _may: Callable[[Row], bool]) -> None:
        nonlocal looked
        looked += 1

    monkeypatch.setattr(Order, "victim", counted)
    grants = d.announce(2, *[b"new" + bytes([n]) for n in range(100)])
    assert {grant.state for grant in grants} == {"full"}
    assert looked == 0, "nothing can be evicted, and that is known without looking"
