"""The pool's core, one story a test. Time is a number."""

from __future__ import annotations

import pytest

from kvrelay.pool.core.actions import Close, Send, SendData
from kvrelay.pool.core.pool import PoolCore
from kvrelay.pool.core.store import QUARANTINE_S
from kvrelay.testing.pool_core import NOTHING_HELD, PAGE, Driver, column
from kvrelay.wire import messages as m

# --- the handshake ---


def test_nothing_is_served_before_hello() -> None:
    core = PoolCore(PAGE, pool="p", server="s")
    core.connected(1, shm_capable=False)
    core.handle(1, m.Stat(5), 0.0)
    failed, close = core.take_actions()
    assert isinstance(failed, Send)
    assert isinstance(failed.reply, m.Failed)
    assert (failed.reply.id, failed.reply.code) == (5, "unauthorized")
    assert isinstance(close, Close)


@pytest.mark.parametrize(("given", "named"), [("wrong", "a wrong token"), (None, "no token")])
def test_a_wrong_or_missing_token_is_refused_by_name(given: str | None, named: str) -> None:
    core = PoolCore(PAGE, pool="p", server="s", token="right")
    core.connected(1, shm_capable=False)
    core.handle(1, m.Hello(1, [1], "c", given), 0.0)
    failed, close = core.take_actions()
    assert isinstance(failed, Send)
    assert isinstance(failed.reply, m.Failed)
    assert named in failed.reply.message
    assert "right" not in failed.reply.message
    assert isinstance(close, Close)


def test_a_client_of_another_protocol_version_is_told_both_versions() -> None:
    core = PoolCore(PAGE, pool="p", server="kvrelay 0.1")
    core.connected(1, shm_capable=False)
    core.handle(1, m.Hello(1, [8, 9], "c"), 0.0)
    failed, close = core.take_actions()
    assert isinstance(failed, Send)
    assert isinstance(failed.reply, m.Failed)
    assert failed.reply.code == "version"
    assert "[8, 9]" in failed.reply.message
    assert "[1]" in failed.reply.message
    assert isinstance(close, Close)


def test_the_arena_is_not_given_to_a_tcp_client() -> None:
    Driver().fails(2, m.MapArena(0), "bad_request")


# --- writing ---


def test_an_object_is_found_only_when_every_segment_is_written() -> None:
    d = Driver()
    grant = d.announce(2, b"k", layers=2, segments=2)[0]
    for first, sums in ((0, [1]), (2, [3, 4])):
        d.ask(2, m.Written(0, [m.Part(grant.handle, first, sums)]), m.Done)
        assert d.ask(3, m.Exists(0, [b"k"]), m.Existing).flags == [False]
        assert d.ask(3, m.Match(0, [b"k"], 0.0, False), m.Matched).views == []
    d.ask(2, m.Written(0, [m.Part(grant.handle, 1, [2])]), m.Done)
    assert d.ask(3, m.Exists(0, [b"k"]), m.Existing).flags == [True]


def test_writing_the_same_again_is_harmless_and_writing_something_else_is_refused() -> None:
    d = Driver()
    grant = d.announce(2, b"k", segments=2)[0]
    part = m.Written(0, [m.Part(grant.handle, 0, [1])])
    d.ask(2, part, m.Done)
    d.ask(2, part, m.Done)
    d.fails(2, m.Written(0, [m.Part(grant.handle, 0, [99])]), "conflict")
    assert d.begin(2, m.Write(0, [m.Part(grant.handle, 0, [99])]), PAGE // 2)[1] is None
    _, delivery = d.begin(2, m.Write(0, [m.Part(grant.handle, 0, [1, 2])]), PAGE)
    assert delivery is not None
    assert delivery.targets == [(None, PAGE // 2), (grant.offset + PAGE // 2, PAGE // 2)]
    assert (delivery.offsets, delivery.sizes) == (
        column("Q", [grant.offset + PAGE // 2]),
        column("Q", [PAGE // 2]),
    )


def test_ranks_of_one_group_write_an_object_together_and_others_are_told_busy() -> None:
    d = Driver()
    first = d.announce(1, b"k", group="engine", segments=2)[0]
    second = d.announce(2, b"k", group="engine", segments=2)[0]
    assert first == second
    assert d.announce(3, b"k", group="other", segments=2)[0].state == "busy"
    d.ask(1, m.Written(0, [m.Part(first.handle, 0, [1])]), m.Done)
    d.ask(2, m.Written(0, [m.Part(first.handle, 1, [2])]), m.Done)
    assert d.announce(3, b"k", group="other", segments=2)[0].state == "sealed"


def test_an_object_is_aborted_when_one_of_its_group_disclaims_its_share_announced_or_not() -> None:
    """1. Two objects are begun by one rank, one of them by another as well. 2. D waits for the first. 3. The other rank
    disclaims both, a stranger's and a sealed one. 4. D is told at once; the strangers' are as they were.
    """
    d = Driver()
    d.store(b"sealed")
    alone = d.announce(1, b"k", group="engine", segments=2)[0]
    d.ask(1, m.Written(0, [m.Part(alone.handle, 0, [1])], final=True), m.Done)
    for rank in (1, 2):
        d.announce(rank, b"both", group="engine", segments=2)
    other = d.announce(3, b"other", group="other")[0]
    matched = d.ask(3, m.Match(0, [b"k"], 5.0), m.Matched)
    waiting = d.send(3, m.Wait(0, matched.lease, 1, 1.0))
    d.ask(2, m.Disclaim(0, "engine", [b"k", b"both", b"other", b"sealed", b"absent"]), m.Done)
    assert isinstance(d.answer(waiting), m.Failed)
    d.ask(3, m.Written(0, [m.Part(other.handle, 0, [1])]), m.Done)
    assert d.announce(3, b"sealed", group="other")[0].state == "sealed"
    assert d.announce(3, b"k", group="other", segments=2)[0].state == "granted"


def test_only_who_announced_an_object_may_write_it() -> None:
    d = Driver()
    grant = d.announce(2, b"k")[0]
    d.fails(3, m.Written(0, [m.Part(grant.handle, 0, [1])]), "conflict")


@pytest.mark.parametrize(
    ("spec", "code"),
    [
        (m.Spec(b"k", 100, 3, 1), "bad_request"),
        (m.Spec(b"stored", 2 * PAGE), "conflict"),
    ],
)
def test_an_impossible_or_contradicting_announcement_is_refused_whole(spec: m.Spec, code: str) -> None:
    d = Driver()
    d.store(b"stored")
    d.fails(2, m.Announce(0, "g", [m.Spec(b"fine", PAGE), spec], 1.0), code)
    assert d.held() == NOTHING_HELD


def test_a_damaged_payload_is_refused_and_can_be_sent_again() -> None:
    d = Driver()
    grant = d.announce(2, b"k")[0]
    answers: list[m.Reply | None] = []
    for found in (6, 5):
        request, delivery = d.begin(2, m.Write(0, [m.Part(grant.handle, 0, [5])]), PAGE)
        assert delivery is not None
        assert delivery.targets == [(grant.offset, PAGE)]
        d.arrive(2, column("Q", [found]))
        answers.append(d.answer(request))
    assert isinstance(answers[0], m.Failed)
    assert answers[0].code == "corruption"
    assert isinstance(answers[1], m.Done)


def test_a_payload_of_the_wrong_length_is_refused() -> None:
    d = Driver()
    grant = d.announce(2, b"k")[0]
    request, delivery = d.begin(2, m.Write(0, [m.Part(grant.handle, 0, [5])]), PAGE - 1)
    assert delivery is None
    assert isinstance(d.answer(request), m.Failed)


def test_parts_of_one_payload_that_overlap_are_refused_before_any_of_it_lands() -> None:
    """1. The first part would make the object whole. 2. The second's bytes would have replaced some of the first's."""
    d = Driver()
    whole, other = d.announce(2, b"k", b"other", segments=2)
    parts = [m.Part(other.handle, 0, [1]), m.Part(whole.handle, 1, [9]), m.Part(whole.handle, 0, [1, 2])]
    request, delivery = d.begin(2, m.Write(0, parts), 2 * PAGE)
    assert delivery is None
    refused = d.answer(request)
    assert isinstance(refused, m.Failed)
    assert "overlap: segments 0 to 1, and others from 1 on" in refused.message
    assert d.ask(3, m.Exists(0, [b"k"]), m.Existing).flags == [False]


def test_an_object_not_sealed_in_time_is_given_up() -> None:
    d = Driver()
    d.announce(2, b"k", lease_s=5.0)
    d.pass_time(4.9)
    assert d.held()["unsealed"] == 1
    d.pass_time(0.2)
    assert d.held() == NOTHING_HELD
    assert d.core.stats()["aborted"] == 1


def test_a_dead_shared_memory_writers_bytes_rest_before_they_are_given_to_another() -> None:
    d = Driver(pages=1)
    d.announce(1, b"k")
    d.die(1)
    assert d.held()["unsealed"] == 0
    assert d.announce(2, b"other")[0].state == "full"
    d.pass_time(QUARANTINE_S + 0.01)
    assert d.announce(2, b"other")[0].state == "granted"


def test_a_late_shared_memory_writer_keeps_its_bytes_until_it_says_that_it_stopped() -> None:
    """1. It announces. 2. Its time is over. 3. Its bytes are nobody's. 4. It learns so, says so. 5. They are free."""
    d = Driver(pages=1)
    grant = d.announce(1, b"k", lease_s=1.0)[0]
    d.pass_time(50.0)
    assert d.announce(2, b"other")[0].state == "full"
    d.fails(1, m.Written(0, [m.Part(grant.handle, 0, [1])]), "not_found")
    d.ask(1, m.Abort(0, [grant.handle]), m.Done)
    assert d.announce(2, b"other")[0].state == "granted"


def test_a_writer_that_has_written_its_part_is_not_asked_when_another_gives_the_object_up() -> None:
    """1. Two ranks write one object. 2. The first has written its half. 3. The other gives up. 4. Bytes are free."""
    d = Driver(pages=1)
    d.core.connected(4, shm_capable=True)
    for request in (m.Hello(0, [1], "client 4"), m.MapArena(0)):
        d.send(4, request)
    grant = d.announce(1, b"k", segments=2)[0]
    assert d.announce(4, b"k", segments=2)[0].handle == grant.handle
    d.ask(1, m.Written(0, [m.Part(grant.handle, 0, [1])], final=True), m.Done)
    assert d.announce(1, b"k", segments=2)[0].handle == grant.handle
    d.ask(4, m.Abort(0, [grant.handle]), m.Done)
    assert d.held() == NOTHING_HELD
    assert d.announce(2, b"other")[0].state == "granted"


# --- reading ---


def test_a_prefix_ends_at_the_first_hole() -> None:
    d = Driver()
    d.store(b"a", b"c")
    assert len(d.lease(3, b"a", b"b", b"c").views) == 1
    assert len(d.lease(3, b"b", b"c").views) == 0


def test_a_reader_is_told_of_each_layer_as_it_is_written_with_its_checksums() -> None:
    d = Driver()
    grant = d.announce(2, b"k", layers=2, segments=2)[0]
    lease = d.lease(3, b"k")
    assert (lease.sealed, lease.views[0].ready) == (0, 0)
    waits = [d.send(3, m.Wait(0, lease.lease, layers, 60.0)) for layers in (1, 2)]
    assert [d.answer(w) for w in waits] == [None, None]
    d.fails(3, m.Read(0, lease.lease, [m.Range(0, 0, 1)]), "bad_request")
    d.ask(2, m.Written(0, [m.Part(grant.handle, 0, [10, 11])]), m.Done)
    first = d.answer(waits[0])
    assert isinstance(first, m.Ready)
    assert (first.layers, memoryview(first.sums).cast("Q").tolist()) == (1, [10, 11])
    assert d.answer(waits[1]) is None
    d.ask(3, m.Read(0, lease.lease, [m.Range(0, 0, 2)]), m.Data)
    d.ask(2, m.Written(0, [m.Part(grant.handle, 2, [12, 13])]), m.Done)
    assert isinstance(d.answer(waits[1]), m.Ready)


def test_the_lease_of_a_request_nobody_waits_for_is_ended_by_the_requests_id() -> None:
    d = Driver()
    d.store(b"k")
    asked = d.send(3, m.Match(0, [b"k"], 60.0))
    kept = d.lease(3, b"k")
    wait = d.send(1, m.Forget(0, asked))
    assert isinstance(d.answer(wait), m.Done)
    assert d.held()["leases"] == 2, "it was another connection's"
    for _ in range(2):
        d.ask(3, m.Forget(0, asked), m.Done)
        assert d.held()["leases"] == 1
    d.ask(3, m.Release(0, kept.lease), m.Done)


def test_a_lease_that_was_released_is_not_forgotten_again_with_its_request() -> None:
    d = Driver()
    d.store(b"k")
    asked = d.send(3, m.Match(0, [b"k"], 60.0))
    matched = d.answer(asked)
    assert isinstance(matched, m.Matched)
    d.ask(3, m.Release(0, matched.lease), m.Done)
    d.ask(3, m.Forget(0, asked), m.Done)
    d.ask(3, m.Forget(0, 4_000_000_000), m.Done)
    assert d.held() == NOTHING_HELD


def test_objects_of_different_depth_are_waited_for_together() -> None:
    """One that has fewer layers than asked for counts as ready when all of its own are whole."""
    d = Driver()
    shallow, deep = d.announce(2, b"s")[0], d.announce(2, b"d", layers=2)[0]
    lease = d.lease(3, b"s", b"d")
    wait = d.send(3, m.Wait(0, lease.lease, 2, 60.0))
    d.ask(2, m.Written(0, [m.Part(deep.handle, 0, [20, 21])]), m.Done)
    assert d.answer(wait) is None
    d.ask(2, m.Written(0, [m.Part(shallow.handle, 0, [10])]), m.Done)
    ready = d.answer(wait)
    assert isinstance(ready, m.Ready)
    assert (ready.layers, memoryview(ready.sums).cast("Q").tolist()) == (2, [10, 20, 21])
    d.fails(3, m.Wait(0, lease.lease, 3, 60.0), "bad_request")


def test_an_object_leased_twice_is_waited_for_once() -> None:
    d = Driver()
    grant = d.announce(2, b"k")[0]
    lease = d.lease(3, b"k", b"k")
    wait = d.send(3, m.Wait(0, lease.lease, 1, 60.0))
    d.ask(2, m.Written(0, [m.Part(grant.handle, 0, [5])]), m.Done)
    ready = d.answer(wait)
    assert isinstance(ready, m.Ready)
    assert memoryview(ready.sums).cast("Q").tolist() == [5, 5]


def test_a_match_brings_the_checksums_of_what_is_sealed_if_they_are_not_too_many() -> None:
    d = Driver()
    deep = d.announce(2, b"deep", layers=2, segments=2)[0]
    d.ask(2, m.Written(0, [m.Part(deep.handle, 0, [1, 2, 3, 4])]), m.Done)
    flat = d.announce(2, b"flat", b"open")[0]
    d.ask(2, m.Written(0, [m.Part(flat.handle, 0, [5])]), m.Done)
    both = [b"deep", b"flat"]
    assert memoryview(d.ask(3, m.Match(0, both, 5.0, sums=5), m.Matched).sums).cast("Q").tolist() == [1, 2, 3, 4, 5]
    assert d.ask(3, m.Match(0, [*both, b"gone"], 5.0, sums=9), m.Matched).sums
    assert d.ask(3, m.Match(0, both, 5.0, sums=4), m.Matched).sums == b""
    assert d.ask(3, m.Match(0, both, 5.0), m.Matched).sums == b""
    assert d.ask(3, m.Match(0, [*both, b"open"], 5.0, sums=9), m.Matched).sums == b""


def test_a_match_says_what_was_written_for_a_ticket_and_what_was_there_before() -> None:
    d = Driver()
    d.ask(1, m.OpenTicket(0, "t", 100.0), m.Done)
    d.store(b"earlier")
    d.announce(2, b"earlier", ticket="t")
    d.announce(3, b"busy", group="others")
    d.announce(2, b"fresh", b"busy", b"again", ticket="t", lease_s=100.0)
    keys = [b"earlier", b"fresh", b"busy", b"again"]
    assert d.ask(3, m.Match(0, keys, 5.0, True, "t"), m.Matched).fresh == [1, 3]
    d.announce(2, b"fresh", ticket="t", lease_s=100.0)  # once more, as another prefill of the same hand-over does
    assert d.ask(3, m.Match(0, keys, 5.0, True, "t"), m.Matched).fresh == [1, 3]
    assert d.ask(3, m.Match(0, keys, 5.0), m.Matched).fresh == []
    d.ask(1, m.EndTicket(0, "t"), m.Done)
    assert d.ask(3, m.Match(0, keys, 5.0, True, "t"), m.Matched).fresh == []


@pytest.mark.parametrize("how", ["dies", "gives up", "runs late", "is deleted"])
def test_whoever_waits_is_told_at_once_when_the_writer_is_lost(how: str) -> None:
    d = Driver()
    grant = d.announce(2, b"k", lease_s=5.0)[0]
    lease = d.lease(3, b"k", lease_s=60.0)
    wait = d.send(3, m.Wait(0, lease.lease, 1, 60.0))
    match how:
        case "dies":
            d.die(2)
        case "gives up":
            d.ask(2, m.Abort(0, [grant.handle]), m.Done)
        case "runs late":
            d.pass_time(5.1)
        case _:
            d.ask(3, m.Delete(0, [b"k"]), m.Deleted)
    failed = d.answer(wait)
    assert isinstance(failed, m.Failed)
    assert failed.code == "writer_lost"
    d.fails(3, m.Wait(0, lease.lease, 1, 1.0), "writer_lost")
    d.ask(3, m.Release(0, lease.lease), m.Done)
    assert d.held() == NOTHING_HELD


def test_a_wait_ends_at_its_own_deadline_and_can_be_repeated() -> None:
    d = Driver()
    grant = d.announce(2, b"k", lease_s=100.0)[0]
    lease = d.lease(3, b"k", lease_s=100.0)
    wait = d.send(3, m.Wait(0, lease.lease, 1, 2.0))
    d.pass_time(2.1)
    failed = d.answer(wait)
    assert isinstance(failed, m.Failed)
    assert failed.code == "deadline"
    d.ask(2, m.Written(0, [m.Part(grant.handle, 0, [1])]), m.Done)
    d.ask(3, m.Wait(0, lease.lease, 1, 2.0), m.Ready)


def test_a_lease_ends_at_its_deadline_and_its_holder_learns_it() -> None:
    d = Driver()
    d.store(b"k")
    lease = d.lease(3, b"k", lease_s=5.0)
    d.pass_time(5.1)
    d.fails(3, m.Release(0, lease.lease), "lease_expired")
    d.fails(3, m.Read(0, lease.lease, [m.Range(0, 0, 1)]), "lease_expired")


def test_a_lease_is_its_connections_own_and_dies_with_it() -> None:
    d = Driver()
    d.store(b"k")
    lease = d.lease(3, b"k")
    d.fails(2, m.Release(0, lease.lease), "lease_expired")
    d.die(3)
    assert d.held() == NOTHING_HELD


def test_what_is_leased_or_under_a_ticket_is_never_evicted() -> None:
    d = Driver(pages=3)
    d.store(b"leased", b"ticketed", b"idle")
    lease = d.lease(3, b"leased")
    d.ask(3, m.OpenTicket(0, "t", 10.0), m.Done)
    assert d.announce(1, b"ticketed", ticket="t")[0].state == "sealed"
    assert d.announce(1, b"new")[0].state == "granted"
    assert d.ask(2, m.Exists(0, [b"leased", b"ticketed", b"idle"]), m.Existing).flags == [True, True, False]
    assert d.announce(1, b"newer")[0].state == "full"
    d.ask(3, m.Release(0, lease.lease), m.Done)
    assert d.announce(1, b"newer")[0].state == "granted"
    assert d.ask(2, m.Exists(0, [b"leased", b"ticketed"]), m.Existing).flags == [False, True]


def test_bytes_being_sent_outlive_lease_and_name() -> None:
    d = Driver(pages=1)
    d.store(b"k")
    lease = d.lease(3, b"k")
    d.send(3, m.Read(0, lease.lease, [m.Range(0, 0, 1)]))
    sending = next(a for a in d.log if isinstance(a, SendData))
    d.ask(3, m.Release(0, lease.lease), m.Done)
    d.ask(2, m.Delete(0, [b"k"]), m.Deleted)
    assert d.announce(2, b"other")[0].state == "full"
    d.core.transferred(sending.transfer)
    assert d.announce(2, b"other")[0].state == "granted"


def test_a_corrupt_object_is_given_to_nobody_again() -> None:
    d = Driver()
    d.store(b"k")
    lease = d.lease(3, b"k")
    d.ask(3, m.Corrupt(0, lease.lease, 0), m.Done)
    assert d.lease(2, b"k").views == []
    assert d.core.stats()["corrupt"] == 1


def test_announcing_a_batch_does_not_evict_what_it_was_just_told_is_there() -> None:
    d = Driver(pages=2)
    d.store(b"a")
    d.store(b"b")
    assert [g.state for g in d.announce(2, b"a", b"c", b"b")] == ["sealed", "granted", "full"]


def test_hits_keep_an_object_from_eviction() -> None:
    d = Driver(pages=3)
    d.store(b"a")
    d.store(b"b")
    d.store(b"c")
    d.ask(3, m.Match(0, [b"a"]), m.Matched)
    d.store(b"d")
    assert d.ask(3, m.Exists(0, [b"a", b"b", b"c", b"d"]), m.Existing).flags == [True, False, True, True]


# --- tickets ---


def test_notes_reach_the_tickets_owner_waiting_or_not() -> None:
    d = Driver()
    d.ask(3, m.OpenTicket(0, "t", 10.0), m.Done)
    waiting = d.send(3, m.Collect(0, "t", 5.0))
    d.ask(2, m.Post(0, "t", b"one"), m.Done)
    assert d.answer(waiting) == m.Notes(waiting, [b"one"])
    d.ask(2, m.Post(0, "t", b"two"), m.Done)
    d.ask(1, m.Post(0, "t", b"three"), m.Done)
    assert d.ask(3, m.Collect(0, "t", 5.0), m.Notes).notes == [b"two", b"three"]
    late = d.send(3, m.Collect(0, "t", 1.0))
    d.pass_time(1.1)
    assert d.answer(late) == m.Notes(late, [])


@pytest.mark.parametrize("how", ["ended", "late", "owner died"])
def test_an_ended_ticket_protects_nothing_and_takes_no_notes(how: str) -> None:
    d = Driver()
    d.ask(3, m.OpenTicket(0, "t", 10.0), m.Done)
    d.announce(2, b"k", ticket="t", lease_s=100.0)
    collecting = d.send(3, m.Collect(0, "t", 60.0))
    assert d.core.stats()["leased_objects"] == 1
    match how:
        case "ended":
            d.ask(3, m.EndTicket(0, "t"), m.Done)
        case "late":
            d.pass_time(10.1)
        case _:
            d.die(3)
    assert d.core.stats()["leased_objects"] == 0
    assert d.core.stats()["waiting"] == 0
    d.fails(2, m.Post(0, "t", b"note"), "not_found")
    assert d.ask(2, m.Announce(0, "g", [m.Spec(b"k", PAGE)], 1.0, "t"), m.Announced).ticket_live is False
    if how != "owner died":
        assert d.answer(collecting) == m.Notes(collecting, [])


def test_a_ticket_belongs_to_who_opened_it() -> None:
    d = Driver()
    d.ask(3, m.OpenTicket(0, "t", 10.0), m.Done)
    d.fails(2, m.OpenTicket(0, "t", 10.0), "conflict")
    d.fails(2, m.EndTicket(0, "t"), "conflict")
    d.fails(2, m.Collect(0, "t", 0.0), "conflict")


def test_a_registered_engine_is_listed_until_its_connection_ends() -> None:
    d = Driver()
    d.ask(2, m.Register(0, "P0", "kv_both", "ns", {"dtype": "float32"}), m.Done)
    assert d.ask(3, m.ListEngines(0), m.Engines).engines == [m.Engine("P0", "kv_both", "ns", {"dtype": "float32"})]
    d.die(2)
    assert d.ask(3, m.ListEngines(0), m.Engines).engines == []
