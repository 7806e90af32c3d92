"""The pool's core under arbitrary clients: invariants hold after every step, and reads see what was written."""

from __future__ import annotations

import random
from array import array
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvrelay.pool.core.actions import Close, SendData
from kvrelay.pool.core.catalog import State
from kvrelay.pool.core.pool import PoolCore
from kvrelay.pool.core.store import QUARANTINE_S
from kvrelay.pool.core.tenants import Quota, Tenant
from kvrelay.pool.core.upkeep import Rules
from kvrelay.wire import messages as m
from kvrelay.wire.bulk import Stored

if TYPE_CHECKING:
    from kvrelay.pool.core.delivery import Delivery

KEYS = [bytes([k]) * 32 for k in range(6)]
GEOMETRY = {key: (4096 * (1 + i % 3) * 4, 2, 2) for i, key in enumerate(KEYS)}
CONNS = st.sampled_from([0, 2, 1, 3])
UNTRUSTED = 3
"""The connection of the second tenant, which is not trusted with shared memory."""
KEY_LISTS = st.lists(st.sampled_from(KEYS), min_size=1, max_size=3, unique=True)
WHOLE = 9
"""The number that stands for all of an object where it is one segment."""


def content(key: bytes, segment: int) -> int:
    """The checksum that stands for a segment's bytes: a function of the key, as KV is."""
    return key[0] * 1_000 + segment


def u64(values: list[int]) -> bytes:
    return array("Q", values).tobytes()


class PoolMachine(RuleBasedStateMachine):
    """Four connections, two of them with shared memory, six keys, an arena that holds about half of them.

    Connection 3 is another tenant, with a quota of a third of the arena.
    """

    def __init__(self) -> None:
        super().__init__()
        self.core = PoolCore(
            28 * 4096,
            pool="p",
            server="s",
            tenants=[
                Tenant(name="one", token="1", shm=True),
                Tenant(name="other", token="2", quota=Quota(quota_bytes=10 * 4096, max_objects=6)),
            ],
            rules=Rules(high=0.9, low=0.8),
        )
        self.now = 0.0
        self.live: set[int] = set()
        self.numbers: dict[int, int] = {}
        self.next_number = 0
        self.next_id = 0
        self.granted: dict[int, dict[int, bytes]] = {}
        self.leases: dict[int, list[m.Matched]] = {}
        self.sending: list[int] = []
        self.receiving: list[tuple[int, m.Write | m.Put, bytes, bytes]] = []
        self.batches: dict[int, dict[int, list[bytes]]] = {}
        self.places: dict[int, int] = {}
        self.owed: set[int] = set()
        self.replies: dict[int, m.Reply] = {}
        self.written: dict[int, set[int]] = {}
        self.asked: dict[int, str] = {}
        """What is to be answered later."""
        self.seen: Counter[str] = Counter()
        """What requests came to, by their names, and what else happened."""

    @initialize()
    def start(self) -> None:
        for conn in range(4):
            self._connect(conn)

    def _connect(self, conn: int) -> None:
        self.next_number += 1
        self.numbers[conn] = self.next_number
        self.core.connected(self.next_number, shm_capable=conn < 2)
        self.live.add(conn)
        self.granted[conn] = {}
        self.leases[conn] = []
        self.batches[conn] = {}
        assert isinstance(self._ask(conn, m.Hello(0, [1], f"c{conn}", "2" if conn == UNTRUSTED else "1")), m.Welcome)
        if conn < 2:
            assert isinstance(self._ask(conn, m.MapArena(0)), m.Arena)

    def _collect(self) -> None:
        for action in self.core.take_actions():
            assert not isinstance(action, Close)
            if isinstance(action, SendData):
                self.sending.append(action.transfer)
            assert action.reply.id in self.owed, "a reply nobody asked for, or a second one"
            self.owed.discard(action.reply.id)
            if (late := self.asked.pop(action.reply.id, None)) is not None:
                self.seen[f"{late}, later: {self._told(action.reply)}"] += 1
            self.replies[action.reply.id] = action.reply

    def _ask(self, conn: int, request: Any) -> m.Reply | None:
        self.next_id += 1
        request = type(request)(self.next_id, *[getattr(request, f) for f in request.__struct_fields__[1:]])
        self.owed.add(self.next_id)
        self.core.handle(self.numbers[conn], request, self.now)
        self._collect()
        reply = self.replies.get(self.next_id)
        if reply is None:
            self.asked[self.next_id] = type(request).__name__
        else:
            self.seen[f"{type(request).__name__}: {self._told(reply)}"] += 1
        return reply

    @staticmethod
    def _told(reply: m.Reply) -> str:
        """What an answer says, in a word."""
        match reply:
            case m.Failed():
                return reply.code
            case m.Matched():
                return ("leased" if reply.lease else "nothing") + (
                    ", unsealed" if reply.sealed < len(reply.views) else ""
                )
            case m.Located() | m.Got():
                return "some" if reply.count else "nothing"
        return "done"

    @rule(
        conn=CONNS,
        keys=KEY_LISTS,
        group=st.booleans(),
        ticket=st.sampled_from([None, "t0", "t1"]),
    )
    def announce(self, conn: int, keys: list[bytes], group: bool, ticket: str | None) -> None:
        if conn not in self.live:
            return
        specs = [m.Spec(key, *GEOMETRY[key]) for key in keys]
        reply = self._ask(conn, m.Announce(0, f"g{group}", specs, 10.0, ticket))
        if isinstance(reply, m.Failed):
            assert reply.code in {"conflict", "draining"}, "one of them is there as one segment"
            return
        assert isinstance(reply, m.Announced)
        for key, grant in zip(keys, reply.grants, strict=True):
            if grant.state == "granted":
                self.granted[conn][grant.handle] = key
                self.places[grant.handle] = grant.offset
                self.written.setdefault(grant.handle, set())

    @rule(
        conn=CONNS,
        pick=st.integers(0),
        first=st.integers(0, 3),
        count=st.integers(1, 4),
        over_tcp=st.booleans(),
        final=st.booleans(),
    )
    def write(self, conn: int, pick: int, first: int, count: int, over_tcp: bool, final: bool) -> None:
        if conn not in self.live or not self.granted[conn]:
            return
        handle = sorted(self.granted[conn])[pick % len(self.granted[conn])]
        key = self.granted[conn][handle]
        count = min(count, 4 - first)
        part = m.Part(handle, first, [content(key, s) for s in range(first, first + count)])
        if not over_tcp:
            reply = self._ask(conn, m.Written(0, [part], final))
            assert conn != UNTRUSTED or isinstance(reply, m.Failed)
            if isinstance(reply, m.Done):
                self.written[handle].update(range(first, first + count))
                if final:
                    del self.granted[conn][handle]
            return
        size = GEOMETRY[key][0] // 4
        delivery = self._begin(conn, m.Write(self.next_id + 1, [part]), size * count)
        if delivery is not None:
            offsets = memoryview(delivery.offsets).cast("Q")
            expected = [content(key, (offset - self.places[handle]) // size) for offset in offsets]
            self.receiving.append((conn, m.Write(self.next_id, [part]), u64(expected), b""))

    def _begin(self, conn: int, request: m.Write | m.Put, payload_bytes: int) -> Delivery | None:
        """Announce a payload, unless one is on its way."""
        if any(entry[0] == conn for entry in self.receiving):
            return None
        self.next_id += 1
        self.owed.add(self.next_id)
        delivery = self.core.begin_payload(self.numbers[conn], request, payload_bytes, self.now)
        self._collect()
        if delivery is not None:
            assert sum(size for _, size in delivery.targets) + delivery.trailer_bytes == payload_bytes
        return delivery

    @rule(
        conn=CONNS, keys=KEY_LISTS, ttl=st.sampled_from([0.0, 4.0]), ticket=st.sampled_from([None, "t0"]),
        behind=st.booleans(),
    )  # fmt: skip
    def put(self, conn: int, keys: list[bytes], ttl: float, ticket: str | None, behind: bool) -> None:
        if conn not in self.live:
            return
        sizes = [GEOMETRY[key][0] for key in keys]
        sums = u64([content(key, WHOLE) for key in keys])
        trailer = sums if behind else b""
        request = m.Put(self.next_id + 1, keys, u64(sizes), b"" if behind else sums, ttl, ticket)
        delivery = self._begin(conn, request, sum(sizes) + len(trailer))
        if delivery is not None:
            taken = set(memoryview(delivery.offsets).cast("Q"))
            tenant = self.core.desk.connections[self.numbers[conn]].tenant
            rows = [self.core.catalog.find(tenant, key) for key in keys]
            places = [-1 if row is None else self.core.catalog.geometry(row)[0] for row in rows]
            expected = u64([content(key, WHOLE) for key, at in zip(keys, places, strict=True) if at in taken])
            assert len(expected) == len(delivery.offsets) == len(delivery.sizes)
            self.receiving.append((conn, request, expected, trailer))

    @rule(conn=CONNS, keys=KEY_LISTS, ttl=st.sampled_from([0.0, 4.0]), lease=st.sampled_from([2.0, 20.0]))
    def room(self, conn: int, keys: list[bytes], ttl: float, lease: float) -> None:
        if conn not in self.live:
            return
        reply = self._ask(conn, m.Room(0, keys, u64([GEOMETRY[key][0] for key in keys]), lease, ttl, "t1"))
        if isinstance(reply, m.Failed):
            assert reply.code == ("bad_request" if conn == UNTRUSTED else "draining")
            return
        assert conn != UNTRUSTED
        assert isinstance(reply, m.RoomGiven)
        granted = [key for key, state in zip(keys, reply.states, strict=True) if state == Stored.STORED]
        assert bool(reply.batch) == bool(granted)
        if granted:
            self.batches[conn][reply.batch] = granted

    @rule(conn=CONNS, pick=st.integers(0), how=st.sampled_from(["fill", "fill", "abort"]))
    def end_batch(self, conn: int, pick: int, how: str) -> None:
        if conn not in self.live or not self.batches[conn]:
            return
        number = sorted(self.batches[conn])[pick % len(self.batches[conn])]
        keys = self.batches[conn][number]
        if how == "abort":
            del self.batches[conn][number]
            assert isinstance(self._ask(conn, m.Abort(0, [number])), m.Done)
            return
        reply = self._ask(conn, m.Fill(0, number, u64([content(key, WHOLE) for key in keys])))
        if isinstance(reply, m.Done):
            del self.batches[conn][number]
        else:
            assert isinstance(reply, m.Failed)
            assert reply.code == "not_found"

    @rule(conn=CONNS, keys=KEY_LISTS)
    def read_whole(self, conn: int, keys: list[bytes]) -> None:
        if conn not in self.live:
            return
        counted = self._ask(conn, m.CountPrefix(0, keys))
        located = self._ask(conn, m.Locate(0, keys, 5.0))
        got = self._ask(conn, m.Get(0, keys, u64([GEOMETRY[key][0] for key in keys])))
        assert isinstance(counted, m.Counted)
        assert isinstance(located, m.Located)
        assert isinstance(got, m.Got)
        assert located.count == got.count <= counted.sealed <= counted.present <= counted.below <= len(keys)
        wanted = keys[: located.count]
        assert located.sums == got.sums == u64([content(key, WHOLE) for key in wanted])
        assert located.sizes == u64([GEOMETRY[key][0] for key in wanted])
        if located.lease:
            self.leases[conn].append(m.Matched(located.id, located.lease, located.count, []))

    @rule(conn=CONNS, keys=KEY_LISTS, what=st.sampled_from([m.Pin, m.Unpin, m.Unpin, m.Exists]))
    def keep(self, conn: int, keys: list[bytes], what: type[m.Request]) -> None:
        if conn in self.live:
            self._ask(conn, what(0, keys))  # type: ignore[call-arg]

    @rule(conn=CONNS, keys=KEY_LISTS, ttl=st.sampled_from([0.0, 3.0]))
    def touch(self, conn: int, keys: list[bytes], ttl: float) -> None:
        if conn in self.live:
            self._ask(conn, m.Touch(0, keys, ttl))

    @precondition(lambda self: self.next_id % 5 == 0)
    @rule(conn=CONNS)
    def purge_and_list(self, conn: int) -> None:
        if conn in self.live:
            assert isinstance(self._ask(conn, m.Purge(0)), m.Purged)
            listing = self._ask(conn, m.ListObjects(0))
            assert isinstance(listing, m.Listing)
            assert all(shown.pins for shown in listing.objects if shown.state == "sealed")

    @precondition(lambda self: self.next_id % 4 == 0)
    @rule(on=st.booleans())
    def drain(self, on: bool) -> None:
        self.core.drain(on=on)

    @rule(conn=CONNS)
    def finish_everything(self, conn: int) -> None:
        if conn not in self.live:
            return
        for handle, key in self.granted[conn].items():
            sums = [content(key, segment) for segment in range(4)]
            reply = self._ask(conn, m.Written(0, [m.Part(handle, 0, sums)]))
            assert conn != UNTRUSTED or isinstance(reply, m.Failed)
            if isinstance(reply, m.Done):
                self.written[handle] = {0, 1, 2, 3}
                row = self.core.catalog.row_of(handle)
                assert row is not None
                assert self.core.catalog.state(row) == State.SEALED, "an object written whole is sealed"
        if conn != UNTRUSTED:
            self.granted[conn].clear()

    @rule(conn=CONNS, keys=KEY_LISTS)
    def announce_and_finish(self, conn: int, keys: list[bytes]) -> None:
        self.announce(conn, keys, conn % 2 == 0, None)
        self.finish_everything(conn)

    @precondition(lambda self: self.receiving)
    @rule(intact=st.booleans())
    def payload_arrives(self, intact: bool) -> None:
        conn, request, expected, trailer = self.receiving.pop(0)
        sums = expected if intact or not expected else bytes([expected[0] ^ 1]) + expected[1:]
        self.core.finish_payload(self.numbers[conn], request, sums, self.now, trailer)
        self._collect()
        reply = self.replies[request.id]
        if isinstance(request, m.Put):
            assert isinstance(reply, m.PutDone)
            assert (Stored.DAMAGED in reply.states) == (sums != expected)
        elif isinstance(reply, m.Done):
            for part in request.parts:
                self.written[part.handle].update(range(part.first, part.first + len(part.sums)))

    @rule(conn=CONNS, keys=KEY_LISTS, unsealed=st.booleans())
    def match(self, conn: int, keys: list[bytes], unsealed: bool) -> None:
        if conn not in self.live:
            return
        reply = self._ask(conn, m.Match(0, keys, 5.0, unsealed))
        assert isinstance(reply, m.Matched)
        assert reply.sealed <= len(reply.views)
        if not unsealed:
            assert reply.sealed == len(reply.views)
        if reply.lease:
            self.leases[conn].append(reply)

    @rule(conn=CONNS, pick=st.integers(0), layers=st.integers(1, 2))
    def wait(self, conn: int, pick: int, layers: int) -> None:
        if conn in self.live and self.leases[conn]:
            lease = self.leases[conn][pick % len(self.leases[conn])]
            self._ask(conn, m.Wait(0, lease.lease, layers, 3.0))

    @rule(conn=CONNS, pick=st.integers(0), index=st.integers(0, 3), first=st.integers(0, 3))
    def read(self, conn: int, pick: int, index: int, first: int) -> None:
        if conn in self.live and self.leases[conn]:
            lease = self.leases[conn][pick % len(self.leases[conn])]
            self._ask(conn, m.Read(0, lease.lease, [m.Range(index, first, 1)]))

    @rule(conn=CONNS, pick=st.integers(0), how=st.sampled_from([m.Release, m.Corrupt, m.Forget]))
    def end_lease(self, conn: int, pick: int, how: type[m.Request]) -> None:
        if conn not in self.live or not self.leases[conn]:
            return
        lease = self.leases[conn][pick % len(self.leases[conn])]
        if how is m.Corrupt:
            self._ask(conn, m.Corrupt(0, lease.lease, 0))
        elif how is m.Forget:
            self.leases[conn].remove(lease)
            assert isinstance(self._ask(conn, m.Forget(0, lease.id)), m.Done)
            assert not any(held.handle == lease.lease for held in self.core.reading.leases.values())
        else:
            self.leases[conn].remove(lease)
            self._ask(conn, m.Release(0, lease.lease))

    @precondition(lambda self: self.sending)
    @rule()
    def bytes_leave(self) -> None:
        self.core.transferred(self.sending.pop(0))

    @rule(conn=CONNS, pick=st.integers(0))
    def abort(self, conn: int, pick: int) -> None:
        if conn in self.live and self.granted[conn]:
            handle = sorted(self.granted[conn])[pick % len(self.granted[conn])]
            del self.granted[conn][handle]
            self._ask(conn, m.Abort(0, [handle]))

    @rule(conn=CONNS, keys=KEY_LISTS, group=st.booleans())
    def disclaim(self, conn: int, keys: list[bytes], group: bool) -> None:
        if conn in self.live:
            assert isinstance(self._ask(conn, m.Disclaim(0, f"g{group}", keys)), m.Done)
            for key in keys:
                row = self.core.store.catalog.find(self.core.desk.connections[self.numbers[conn]].tenant, key)
                entry = None if row is None else self.core.store.entries.get(row)
                assert entry is None or entry.group != f"g{group}", "nobody of the group writes it any more"

    @precondition(lambda self: self.next_id % 4 == 0)
    @rule(conn=CONNS, key=st.sampled_from(KEYS))
    def delete(self, conn: int, key: bytes) -> None:
        if conn in self.live:
            self._ask(conn, m.Delete(0, [key]))

    @rule(conn=CONNS, name=st.sampled_from(["t0", "t1"]), verb=st.sampled_from(["open", "end", "post", "collect"]))
    def ticket(self, conn: int, name: str, verb: str) -> None:
        if conn in self.live:
            self._ask(
                conn,
                {
                    "open": m.OpenTicket(0, name, 8.0),
                    "end": m.EndTicket(0, name),
                    "post": m.Post(0, name, b"note"),
                    "collect": m.Collect(0, name, 2.0),
                }[verb],
            )

    @precondition(lambda self: self.next_id % 3 == 0)
    @rule(seconds=st.sampled_from([0.5, 1.5, 2.5, 9.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.core.tick(self.now)
        self._collect()
        deadline = self.core.next_deadline()
        assert deadline is None or deadline > self.now

    @precondition(lambda self: self.next_id % 7 == 0)
    @rule(conn=CONNS)
    def die(self, conn: int) -> None:
        if conn in self.live:
            self.live.discard(conn)
            self.receiving = [entry for entry in self.receiving if entry[0] != conn]
            self.core.disconnected(self.numbers[conn], self.now)
            self.owed.clear()  # answers to the dead are dropped; those to the living come again below
            self._drop_actions()

    def _drop_actions(self) -> None:
        for action in self.core.take_actions():
            if isinstance(action, SendData):
                self.sending.append(action.transfer)
            else:
                assert not isinstance(action, Close)
                self.replies[action.reply.id] = action.reply
        self.owed = set(range(1, self.next_id + 1)) - set(self.replies)

    @precondition(lambda self: len(self.live) < 4)
    @rule(conn=CONNS)
    def come_back(self, conn: int) -> None:
        if conn not in self.live:
            self._connect(conn)

    @invariant()
    def nothing_is_lost_or_shared(self) -> None:
        self.core.check_integrity()

    @invariant()
    def sealed_objects_were_written_whole(self) -> None:
        for row in memoryview(self.core.catalog.page(None, 0, 1000, b"")[0]).cast("I"):
            info = self.core.catalog.info(row)
            if info.state != State.SEALED:
                continue
            if info.layers * info.segments == 1:
                assert self.core.catalog.sums(row, 0, 1) == u64([content(info.key, WHOLE)])
            else:
                assert self.written[self.core.catalog.handle(row)] == {0, 1, 2, 3}
                assert self.core.catalog.sums(row, 0, 4) == u64([content(info.key, segment) for segment in range(4)])

    def teardown(self) -> None:
        """When every connection is gone and writers have rested, only sealed objects hold bytes."""
        for conn in list(self.live):
            self.core.disconnected(self.numbers[conn], self.now)
        self.core.take_actions()
        for transfer in self.sending:
            self.core.transferred(transfer)
        self.core.tick(self.now + QUARANTINE_S)
        self.core.check_integrity()
        stats = self.core.stats()
        busy = ("unsealed", "leases", "tickets", "waiting", "lingering_bytes", "connections", "leased_objects")
        assert {name: stats[name] for name in busy} == dict.fromkeys(busy, 0)


TestPoolCore = PoolMachine.TestCase
TestPoolCore.settings = settings(max_examples=200, stateful_step_count=100, deadline=None)
pytestmark = pytest.mark.timeout(300)


# Hypothesis leaves out rules at random, and seldom has much to read; a walk with weights, over objects, does.

WEIGHTS = {
    "announce": 16, "announce_and_finish": 12, "write": 16, "put": 12, "room": 6, "end_batch": 8, "read_whole": 14,
    "keep": 3, "touch": 3, "purge": 0.5, "drain": 1, "finish_everything": 3, "payload": 14, "match": 24, "wait": 20,
    "read": 24, "end_lease": 8, "bytes_leave": 8, "abort": 3, "disclaim": 1, "delete": 2, "ticket": 8, "time": 3,
    "die": 1, "come_back": 5,
}  # fmt: skip
MUST_HAPPEN = {
    "Match: leased",
    "Match: leased, unsealed",
    "Match: nothing",
    "Read: done",
    "Read: lease_expired",
    "Locate: some",
    "Get: some",
    "Wait: done",
    "Wait, later: done",
    "Wait, later: writer_lost",
    "Wait, later: deadline",
    "Wait: lease_expired",
    "Release: done",
    "Corrupt: done",
    "Forget: done",
    "Collect, later: done",
    "Room: done",
    "Fill: done",
    "Written: done",
    "Announce: conflict",
    "Post: done",
    "EndTicket: done",
}


def walk(rng: random.Random, steps: int) -> Counter[str]:  # noqa: C901 (a table of what may happen)
    """Do ``steps`` things at random in a pool that holds objects, checking after each. What requests came to."""
    machine = PoolMachine()
    machine.start()
    for conn in (0, 1, 2):
        machine.announce_and_finish(conn, [KEYS[conn]])
    for _ in range(steps):
        conn, pick, yes = rng.choice([0, 1, 2, 3]), rng.randrange(1000), rng.random() < 0.5
        parted = rng.sample(KEYS[:3] if rng.random() < 0.9 else KEYS, rng.randint(1, 3))
        keys = rng.sample(KEYS[3:] if rng.random() < 0.9 else KEYS, rng.randint(1, 3))
        ticket, ttl = rng.choice(["t0", "t1"]), rng.choice([0.0, 4.0])
        match rng.choices([*WEIGHTS], [*WEIGHTS.values()])[0]:
            case "announce":
                machine.announce(conn, parted, yes, rng.choice([None, ticket]))
            case "announce_and_finish":
                machine.announce_and_finish(conn, parted)
            case "write":
                machine.write(conn, pick, rng.randint(0, 3), rng.randint(1, 4), yes, rng.random() < 0.1)
            case "put":
                machine.put(conn, keys, ttl, rng.choice([None, ticket]), yes)
            case "room":
                machine.room(conn, keys, ttl, rng.choice([2.0, 20.0]))
            case "end_batch":
                machine.end_batch(conn, pick, rng.choice(["fill", "fill", "abort"]))
            case "read_whole":
                machine.read_whole(conn, keys)
            case "keep":
                machine.keep(conn, keys, rng.choice([m.Pin, m.Unpin, m.Unpin, m.Exists]))
            case "touch":
                machine.touch(conn, keys, ttl)
            case "purge":
                machine.purge_and_list(conn)
            case "drain":
                machine.drain(rng.random() < 0.2)
            case "finish_everything":
                machine.finish_everything(conn)
            case "payload" if machine.receiving:
                machine.payload_arrives(rng.random() < 0.9)
            case "match":
                machine.match(conn, rng.choice([keys, parted, parted]), rng.random() < 0.8)
            case "wait":
                machine.wait(conn, pick if yes else -1, rng.randint(1, 2))
            case "read":
                machine.read(conn, pick, rng.choice([0, 0, 0, 1]), rng.randint(0, 3))
            case "end_lease":
                machine.end_lease(
                    conn, pick, rng.choice([m.Release, m.Release, m.Release, m.Release, m.Corrupt, m.Forget])
                )
            case "bytes_leave" if machine.sending:
                machine.bytes_leave()
            case "abort":
                machine.abort(conn, pick)
            case "disclaim":
                machine.disclaim(conn, keys, yes)
            case "delete":
                machine.delete(conn, keys[0])
            case "ticket":
                machine.ticket(conn, ticket, rng.choice(["open", "open", "end", "post", "collect"]))
            case "time":
                machine.time_passes(rng.choice([0.5, 0.5, 0.5, 1.5, 2.5, 9.0]))
            case "die":
                machine.die(conn)
            case "come_back":
                machine.come_back(conn)
        machine.nothing_is_lost_or_shared()
        machine.sealed_objects_were_written_whole()
    machine.teardown()
    return machine.seen


def test_long_walks_among_objects_break_nothing_and_come_across_everything() -> None:
    seen: Counter[str] = Counter()
    for seed in range(60):
        seen += walk(random.Random(seed), 500)
    assert not MUST_HAPPEN - seen.keys()
