"""Nobody waits for another's large or many requests: a pool's connections are served in bounded turns."""

from __future__ import annotations

import asyncio
import itertools
import socket
import struct
from typing import TYPE_CHECKING

import pytest

from kvrelay.pool import peer as peers
from kvrelay.pool.core.pool import PoolCore
from kvrelay.pool.server import PoolServer
from kvrelay.testing.talker import Talker
from kvrelay.transport.checksum import checksum
from kvrelay.transport.shm import Arena
from kvrelay.transport.stream import Stream
from kvrelay.wire import messages as m
from kvrelay.wire.bulk import Stored
from kvrelay.wire.frames import encode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvrelay.testing.pool import PoolThread
    from kvrelay.transport.tls import TlsSocket

PAGE = 4096


def u64(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}Q", *values)


def stat(talker: Talker) -> dict[str, int]:
    reply, _ = talker.ask(m.Stat(9))
    assert isinstance(reply, m.Stats)
    return reply.values


@pytest.fixture
def talker(pool: PoolThread) -> Iterator[Talker]:
    talker = Talker(pool.tcp)
    yield talker
    talker.sock.close()


# --- what turns must not change ---


def test_batches_travel_there_and_back_whatever_of_them_is_taken(talker: Talker) -> None:
    datas = [bytes([number]) * size for number, size in enumerate((PAGE, 100, 3 * PAGE, 64, 70_000))]
    keys = [b"key %d" % number for number in range(len(datas))]
    sizes, sums = u64(*map(len, datas)), u64(*map(checksum, datas))
    first = m.Put(2, keys[1:3], sizes[8:24], sums[8:24])
    assert talker.ask(first, b"".join(datas[1:3]))[0] == m.PutDone(2, bytes(2))
    states = [Stored.STORED, Stored.PRESENT, Stored.PRESENT, Stored.STORED, Stored.STORED]
    assert talker.ask(m.Put(3, keys, sizes, sums), b"".join(datas))[0] == m.PutDone(3, bytes(states))
    reply, payload = talker.ask(m.Get(4, keys, sizes))
    assert reply == m.Got(4, len(keys), sums, 0)
    assert payload == b"".join(datas)
    absent = m.Put(5, [b"damaged", b"intact"], u64(PAGE, PAGE), u64(1, checksum(bytes(PAGE))))
    assert talker.ask(absent, bytes(2 * PAGE))[0] == m.PutDone(5, bytes([Stored.DAMAGED, Stored.STORED]))
    assert talker.ask(m.Exists(6, [b"damaged", b"intact"]))[0] == m.Existing(6, [False, True])


def test_checksums_may_follow_the_bytes_they_are_of(talker: Talker) -> None:
    datas = [bytes([number]) * size for number, size in enumerate((PAGE, 100, 70_000, 300_000))]
    keys = [b"key %d" % number for number in range(len(datas))]
    assert talker.ask(m.Put(2, keys[1:2], u64(100)), datas[1] + u64(checksum(datas[1])))[0] == m.PutDone(2, bytes(1))
    sums = [checksum(data) for data in datas]
    behind = u64(sums[0], sums[1] ^ 1, sums[2] ^ 1, sums[3])
    states = [Stored.STORED, Stored.PRESENT, Stored.DAMAGED, Stored.STORED]
    reply, _ = talker.ask(m.Put(3, keys, u64(*map(len, datas))), b"".join(datas) + behind)
    assert reply == m.PutDone(3, bytes(states))
    assert talker.ask(m.Exists(4, keys))[0] == m.Existing(4, [True, True, False, True])
    reply, payload = talker.ask(m.Get(5, keys, u64(*map(len, datas))))
    assert reply == m.Got(5, 2, u64(*sums[:2]), 0)
    assert payload == b"".join(datas[:2])


def test_a_payload_of_many_turns_arrives_whole_and_in_order_with_what_follows(
    talker: Talker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "TURN_BYTES", 64 << 10)
    monkeypatch.setattr("kvrelay.pool.server.TURN_BYTES", 64 << 10)
    datas = [number.to_bytes(2, "big") * (8 << 10) for number in range(100)]
    keys = [b"key %d" % number for number in range(len(datas))]
    sizes, sums = u64(*map(len, datas)), u64(*map(checksum, datas))
    talker.sock.sendall(
        encode(m.Put(2, keys, sizes, sums), 100 * (16 << 10))
        + b"".join(datas)
        + encode(m.CountPrefix(3, keys))
        + encode(m.Get(4, keys, sizes))
    )
    assert talker.hear()[0] == m.PutDone(2, bytes(100))
    assert talker.hear()[0] == m.Counted(3, 100, 100, 100)
    reply, payload = talker.hear()
    assert reply == m.Got(4, 100, sums, 0)
    assert payload == b"".join(datas)


def test_a_peer_that_leaves_amid_its_payload_leaves_nothing(pool: PoolThread) -> None:
    with Talker(pool.tcp) as leaving:
        leaving.say(m.Put(2, [b"a", b"b"], u64(*[1 << 19] * 2), u64(1, 2)), bytes(700_000), announced=1 << 20)
        with Talker(pool.tcp) as check:
            while stat(check)["unsealed"] < 2:
                pass
    with Talker(pool.tcp) as check:
        while (stats := stat(check))["connections"] > 1:  # the other's end is still to be noticed
            pass
    assert [stats[name] for name in ("objects", "unsealed", "lingering_bytes")] == [0, 0, 0]


# --- fairness ---


class Loop:
    """A server in this test's loop, whose connections exist before it looks at any of them."""

    def __init__(self) -> None:
        self.arena = Arena.create(64 << 20)
        self.server = PoolServer(self.arena)

    def connect(self, *messages: bytes) -> socket.socket:
        """A connection that has said hello and ``messages``."""
        ours, theirs = socket.socketpair()
        for side in (ours, theirs):
            side.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
        ours.setblocking(False)
        for data in (encode(m.Hello(1, [1], "c")), *messages):
            assert ours.send(data) == len(data)
        self.server._admit(theirs, shm_capable=False)
        return ours

    async def turn(self, until: Callable[[], bool]) -> None:
        """Let the loop run until something is so."""
        for _ in range(10_000):
            if until():
                return
            await asyncio.sleep(0)
        pytest.fail("it never came to it")

    def close(self, *socks: socket.socket) -> None:
        for peer in list(self.server._peers.values()):
            self.server._close(peer, "")
        for sock in socks:
            sock.close()
        self.arena.close()


async def test_many_requests_of_one_connection_do_not_hold_up_anothers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time passes with every look at the clock, so that a turn is over after a few requests."""
    clock = itertools.count(1000.0, peers.TURN_S / 4)
    monkeypatch.setattr(PoolServer, "now", staticmethod(lambda: next(clock)))
    order: list[int] = []
    handle = PoolCore.handle

    def noted(core: PoolCore, number: int, request: m.Request, now: float) -> None:
        order.append(number)
        handle(core, number, request, now)

    monkeypatch.setattr(PoolCore, "handle", noted)
    loop = Loop()
    greedy = loop.connect(b"".join(encode(m.Stat(n)) for n in range(1000)))
    modest = loop.connect(encode(m.Stat(1)))
    await loop.turn(lambda: len(order) == 1003)
    assert order.count(2) == 2
    last = max(index for index, number in enumerate(order) if number == 2)
    assert last < 20, "it was heard after a few of the other's requests"
    loop.close(greedy, modest)


async def test_a_large_answer_leaves_in_pieces_between_which_others_are_heard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its socket takes whatever it is given: nothing but the turn's bound ends a turn."""
    loop = Loop()
    sent: list[tuple[int, int]] = []
    flush = Stream.flush

    def noted(stream: Stream[m.Request], max_bytes: int = 1 << 62) -> bool:
        before = stream.queued_bytes
        done = flush(stream, max_bytes)
        sent.append((stream.fileno(), before - stream.queued_bytes))
        return done

    monkeypatch.setattr(Stream, "flush", noted)
    size = 24 << 20
    keys = [b"large %d" % number for number in range(2)]
    _, rows, _ = loop.server.core.catalog.reserve(0, keys, u64(size, size))
    loop.server.core.catalog.publish(rows, u64(1, 2), float("inf"))
    greedy = loop.connect(encode(m.Get(2, keys, u64(size, size))))
    peer = next(iter(loop.server._peers.values()))
    peer.stream.sock = Greedy(peer.stream.sock)  # type: ignore[assignment]
    modest = loop.connect(encode(m.Stat(1)))
    await loop.turn(lambda: sum(count for _, count in sent) > 2 * size)
    fd = peer.stream.fileno()
    assert max(count for _, count in sent) <= peers.TURN_BYTES + (4 << 20)
    others = [index for index, (number, _) in enumerate(sent) if number != fd]
    assert others
    assert others[-1] < 10, "the other was answered long before the large answer had left"
    loop.close(greedy, modest)


class Greedy:
    """A socket whose other end takes everything at once."""

    def __init__(self, sock: socket.socket | TlsSocket) -> None:
        self._sock = sock

    def __getattr__(self, name: str) -> object:
        return getattr(self._sock, name)

    def sendmsg(self, buffers: list[memoryview]) -> int:
        return sum(buffer.nbytes for buffer in buffers)
