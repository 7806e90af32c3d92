"""The pool as a process: its command line, hostile peers, and death of either side."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from kvrelay.client.blocking import PoolClient
from kvrelay.client.core.operations import StagePart
from kvrelay.errors import PoolUnavailableError
from kvrelay.pool.server import PoolServer
from kvrelay.testing.pool import PoolThread, pool_process
from kvrelay.transport.address import Address
from kvrelay.transport.shm import Arena
from kvrelay.transport.stream import Stream
from kvrelay.wire import limits
from kvrelay.wire import messages as m
from kvrelay.wire.frames import FrameDecoder, encode

if TYPE_CHECKING:
    from pathlib import Path

    from kvrelay.wire.base import Message

HEADER = struct.Struct("<2sBBIQ")
FIRST_HANDLE = 1 << 32
"""That of a pool's first object."""


def run(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvrelay", "pool", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env={**os.environ, **env})


def eventually(client: PoolClient, **wanted: int) -> dict[str, int]:
    deadline = time.monotonic() + 10.0
    while True:
        stats = client.stat()
        if all(stats[name] == value for name, value in wanted.items()):
            return stats
        if time.monotonic() > deadline:
            pytest.fail(f"still { ({name: stats[name] for name in wanted}) }, wanted {wanted}")


HOSTILE = {
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "zeros": bytes(4096),
    "huge body": HEADER.pack(b"KV", 1, 0, 0xFFFFFFFF, 0),
    "large body before hello": HEADER.pack(b"KV", 1, 0, limits.MAX_HELLO_BYTES + 1, 0),
    "huge payload": HEADER.pack(b"KV", 1, 0, 10, 1 << 62),
    "not msgpack": HEADER.pack(b"KV", 1, 0, 4, 0) + b"\xc1\xc1\xc1\xc1",
    "a reply": encode(m.Done(1)),
    "other version of frames": HEADER.pack(b"KV", 9, 0, 4, 0),
    "payload behind hello": encode(m.Hello(1, [1], "x"), 100) + bytes(100),
    "no hello": encode(m.Stat(1)),
    "write without hello": encode(m.Write(1, [m.Part(1, 0, [1])]), 10) + bytes(10),
}


@pytest.mark.parametrize("kind", sorted(HOSTILE))
def test_a_hostile_peer_is_disconnected_and_harms_nobody(pool: PoolThread, kind: str) -> None:
    host, port = pool.tcp.removeprefix("tcp:").split(":")
    with PoolClient.connect(pool.unix, name="good") as good, socket.create_connection((host, int(port)), 10) as bad:
        bad.settimeout(10)
        bad.sendall(HOSTILE[kind])
        if kind == "payload behind hello":
            bad.sendall(HOSTILE["zeros"])
        answers = b""
        try:
            while piece := bad.recv(4096):
                answers += piece
        except ConnectionResetError:
            pass
        assert len(answers) < 1000
        good.put(b"k", b"still here")
        assert good.get(b"k") == b"still here"
        eventually(good, connections=1)


def test_random_bytes_never_break_the_server(pool: PoolThread) -> None:
    rng = random.Random(3)
    host, port = pool.tcp.removeprefix("tcp:").split(":")
    good = encode(m.Hello(1, [1], "x")) + encode(m.Announce(2, "g", [m.Spec(b"k", 4096)], 5.0)) + encode(m.Stat(3))
    for _ in range(150):
        data = bytearray(good)
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        with socket.create_connection((host, int(port)), 10) as peer:
            peer.sendall(data[: rng.randrange(len(data))])
    with PoolClient.connect(pool.unix, name="good") as client:
        eventually(client, connections=1, unsealed=0, lingering_bytes=0)


def test_a_slow_peer_does_not_hold_up_the_others(pool: PoolThread) -> None:
    """It announces a large payload, sends half of it and stalls."""
    host, port = pool.tcp.removeprefix("tcp:").split(":")
    with socket.create_connection((host, int(port)), 10) as slow, PoolClient.connect(pool.tcp, name="good") as good:
        slow.sendall(encode(m.Hello(1, [1], "slow")) + encode(m.Announce(2, "g", [m.Spec(b"slow", 1 << 20)], 60.0)))
        slow.recv(10)
        slow.sendall(encode(m.Write(3, [m.Part(FIRST_HANDLE, 0, [1])]), 1 << 20) + bytes(1 << 19))
        good.put(b"k", bytes(1 << 20))
        assert good.get(b"k") == bytes(1 << 20)
    with PoolClient.connect(pool.unix, name="check") as check:
        eventually(check, unsealed=0, lingering_bytes=0)


def test_a_peer_that_stalls_inside_a_message_is_disconnected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a payload holds arena bytes: not for ever."""
    monkeypatch.setattr("kvrelay.pool.server.STALL_S", 0.2)
    monkeypatch.setattr("kvrelay.pool.server.SWEEP_S", 0.05)
    with PoolThread(tmp_path) as swift, PoolClient.connect(swift.unix, name="idle") as idle:
        host, port = swift.tcp.removeprefix("tcp:").split(":")
        with socket.create_connection((host, int(port)), 10) as slow:
            slow.sendall(encode(m.Hello(1, [1], "slow")) + encode(m.Announce(2, "g", [m.Spec(b"slow", 1 << 20)], 60.0)))
            slow.sendall(encode(m.Write(3, [m.Part(FIRST_HANDLE, 0, [1])]), 1 << 20) + bytes(1 << 19))
            while slow.recv(4096):
                pass
        eventually(idle, connections=1, unsealed=0, lingering_bytes=0)


def trickle(sock: socket.socket, seconds: float) -> None:
    """Send a byte now and then."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sock.sendall(b"x")
        time.sleep(0.01)


def test_a_payload_that_trickles_does_not_hold_its_room_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It never stops: only all of it is too slow."""
    monkeypatch.setattr("kvrelay.pool.server.STALL_S", 2.0)
    monkeypatch.setattr("kvrelay.pool.server.SWEEP_S", 0.05)
    size = 32 << 10
    with PoolThread(tmp_path) as pool, PoolClient.connect(pool.unix, name="idle") as idle:
        host, port = pool.tcp.removeprefix("tcp:").split(":")
        with socket.create_connection((host, int(port)), 10) as slow:
            slow.sendall(encode(m.Hello(1, [1], "slow")))
            slow.sendall(encode(m.Put(2, [b"slow"], size.to_bytes(8, "little"), bytes(8)), size))
            eventually(idle, unsealed=1)
            with pytest.raises((ConnectionResetError, BrokenPipeError)):
                trickle(slow, 30.0)
        eventually(idle, connections=1, unsealed=0, lingering_bytes=0)


def test_an_answer_that_cannot_be_sent_ends_its_connection_only(
    pool: PoolThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    with PoolClient.connect(pool.tcp, name="good") as good, PoolClient.connect(pool.tcp, name="other") as other:
        with monkeypatch.context() as patch:
            patch.setattr(limits, "MAX_BODY_BYTES", 200)
            with pytest.raises(PoolUnavailableError):
                other.stat()
        eventually(good, connections=1)


class OutOfDescriptors:
    """A listener with somebody at the door and no descriptor left to let him in."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.tries = 0

    def fileno(self) -> int:
        return self.sock.fileno()

    def accept(self) -> None:
        self.tries += 1
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    def close(self) -> None:
        self.sock.close()


async def test_a_server_out_of_descriptors_pauses_instead_of_spinning() -> None:
    arena = Arena.create(1 << 20)
    server = PoolServer(arena)
    ours, theirs = socket.socketpair()
    theirs.send(b"knock")
    door = OutOfDescriptors(ours)
    server._listeners.append((door, Address(host="127.0.0.1", port=1)))  # type: ignore[arg-type]
    serving = asyncio.create_task(server.run())
    for _ in range(50):
        await asyncio.sleep(0)
    assert door.tries == 1
    server.stop()
    await serving
    theirs.close()
    arena.close()


def test_serve_prints_where_it_listens_and_stops_cleanly(tmp_path: Path) -> None:
    with pool_process(tmp_path) as pool:
        with PoolClient.connect(pool.tcp, name="c") as client:
            client.put(b"k", b"v")
        stat = run("stat", pool.unix, "--json")
        assert json.loads(stat.stdout)["objects"] == 1
        table = run("stat", pool.tcp)
        assert "arena_bytes" in table.stdout
        assert "64 MiB" in table.stdout
        assert pool.terminate() == 0
    assert not pool.socket.exists()


def test_ctrl_c_stops_it_without_a_traceback() -> None:
    command = [sys.executable, "-m", "kvrelay", "pool", "serve", "--listen", "127.0.0.1:0", "--size", "1MiB"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
        assert process.returncode == 130
        assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["--size", "many"], "'many'"),
        (["--size", "0"], "too small"),
        (["--size", "1KiB"], "at least 1 MiB"),
        (["--size", "900TiB"], "available"),
        (["--listen", "nowhere"], "'nowhere'"),
        (["--listen", "none"], "--unix"),
        (["--listen", "127.0.0.1:1", "--unix", "/nonexistent/dir/s"], "cannot listen"),
        (["--token-file", "/nonexistent"], "/nonexistent"),
    ],
)
def test_bad_input_is_one_line_that_names_it(args: list[str], named: str) -> None:
    done = run("serve", "--size", "1MiB", *args)
    assert done.returncode == 2
    assert done.stderr.count("kvrelay: error:") == 1
    assert named in done.stderr
    assert "Traceback" not in done.stderr


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run("serve", "--size", "1MiB", "--listen", f"127.0.0.1:{port}")
    assert done.returncode == 2
    assert f"127.0.0.1:{port}" in done.stderr
    assert "in use" in done.stderr


@pytest.mark.parametrize("flag", ["--listen", "--admin-listen"])
def test_a_pool_that_cannot_be_all_it_is_asked_for_leaves_no_socket(flag: str, tmp_path: Path) -> None:
    path = tmp_path / "pool.sock"
    other = ["--listen", "none"] if flag == "--admin-listen" else []
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        done = run("serve", "--size", "1MiB", "--unix", str(path), *other, flag, where)
    assert done.returncode == 2
    assert where in done.stderr
    assert not path.exists()


def test_a_socket_left_by_a_crash_is_taken_over_and_a_live_one_is_not(tmp_path: Path) -> None:
    with pool_process(tmp_path) as crashed:
        crashed.kill()
        assert crashed.socket.exists()
        with pool_process(tmp_path):
            done = run("serve", "--size", "1MiB", "--listen", "none", "--unix", str(crashed.socket))
            assert done.returncode == 2
            assert "another process" in done.stderr
    ordinary = tmp_path / "file"
    ordinary.write_text("precious")
    done = run("serve", "--size", "1MiB", "--listen", "none", "--unix", str(ordinary))
    assert done.returncode == 2
    assert ordinary.read_text() == "precious"


def test_stat_of_a_pool_that_is_not_there_fails_in_one_line(tmp_path: Path) -> None:
    done = run("stat", f"unix:{tmp_path}/none")
    assert done.returncode == 1
    assert done.stderr.startswith("kvrelay: error: no pool answers")


def test_a_killed_pool_is_noticed_by_its_clients_at_once(tmp_path: Path) -> None:
    with pool_process(tmp_path) as pool, PoolClient.connect(pool.unix, name="c") as client:
        client.open_ticket("t", 60.0)
        pending = client.start(m.Collect(0, "t", 60.0), m.Notes)
        pool.kill()
        with pytest.raises(PoolUnavailableError):
            pending.result(5.0)


WRITER = """
import sys, time
from kvrelay.client.blocking import PoolClient
from kvrelay.client.core.operations import StagePart
from kvrelay.wire import messages as m
client = PoolClient.connect(sys.argv[1], name="P")
spec = m.Spec(b"kv", 8 * 4096, 8, 1)
grant = client.announce([spec], group="P", lease_s=60.0).grants[0]
stage = sys.argv[2]
for layer in range(8):
    parts = [StagePart(grant, spec, layer, 1)]
    views = client.stage(parts)
    views[0][:] = bytes([layer]) * 4096
    if stage == "before commit" and layer == 4:
        break
    client.commit(parts, views)
    if stage == "after commit" and layer == 4:
        break
lease = client.match_prefix([b"kv"], lease_s=60.0)
client.open_ticket("t", 60.0)
print("here", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("transport", ["unix", "tcp"])
@pytest.mark.parametrize("stage", ["before commit", "after commit", "sealed"])
def test_a_killed_writer_leaves_nothing_behind_but_what_it_sealed(tmp_path: Path, transport: str, stage: str) -> None:
    with pool_process(tmp_path) as pool, PoolClient.connect(pool.unix, name="check") as check:
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, getattr(pool, transport), stage], stdout=subprocess.PIPE, text=True
        )
        assert writer.stdout is not None
        assert writer.stdout.readline() == "here\n"
        writer.kill()
        writer.wait(10)
        writer.stdout.close()
        sealed = int(stage == "sealed")
        eventually(check, unsealed=0, leases=0, tickets=0, lingering_bytes=0, connections=1, objects=sealed)
        spec = m.Spec(b"kv", 8 * 4096, 8, 1)
        grant = check.announce([spec], group="again", lease_s=5.0).grants[0]
        assert grant.state == ("sealed" if sealed else "granted")


def test_reading_a_payload_too_slowly_only_stalls_oneself(pool: PoolThread) -> None:
    """A reader asks for much and takes nothing; what it was promised stays its own, others go on."""
    with PoolClient.connect(pool.tcp, name="stalled") as stalled, PoolClient.connect(pool.tcp, name="good") as good:
        good.put(b"big", bytes(8 << 20))
        prefix = stalled.match_prefix([b"big"], lease_s=60.0)
        for _ in range(3):
            stalled.start(m.Read(0, prefix.lease, [m.Range(0, 0, 1)]), m.Data)
        for number in range(20):
            good.put(number.to_bytes(4, "big"), bytes([number]) * (1 << 20))
            assert good.get(number.to_bytes(4, "big")) == bytes([number]) * (1 << 20)
        assert good.exists([b"big"]) == [True]


@pytest.mark.parametrize("bound", ["MAX_QUEUED_BYTES", "MAX_QUEUED_MESSAGE_BYTES"])
def test_answers_nobody_takes_hold_back_the_requests_behind_them(
    pool: PoolThread, monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    """3,000 requests arrive at once; what is queued for their sender stays bounded, and every one is answered."""
    limit, queued = 64 << 10, [0]
    send = Stream.send

    def noted(stream: Stream[m.Request], message: Message, *args: object, **options: object) -> None:
        send(stream, message, *args, **options)  # type: ignore[arg-type]
        assert stream.queued_message_bytes >= stream.queued_bytes, "what is answered here has no payload"
        queued.append(stream.queued_message_bytes)

    monkeypatch.setattr(f"kvrelay.pool.peer.{bound}", limit)
    monkeypatch.setattr(Stream, "send", noted)
    host, port = pool.tcp.removeprefix("tcp:").split(":")
    with socket.create_connection((host, int(port)), 10) as peer:
        peer.sendall(encode(m.Hello(1, [1], "greedy")) + b"".join(encode(m.Stat(n)) for n in range(3000)))
        replies: FrameDecoder[m.Reply] = FrameDecoder(m.AnyReply)
        answered: list[int] = []
        while len(answered) < 3001:
            replies.feed(peer.recv(1 << 16))
            while (frame := replies.next()) is not None:
                answered.append(frame.message.id)
    assert sorted(answered[1:]) == list(range(3000))
    assert max(queued) < 2 * limit + 2048, "those of the first answer count until it has left whole"


def test_the_limits_hold_a_part_of_the_largest_messages() -> None:
    """16,384 keys of 32 bytes, the most a client may ask for, fit the body limit."""
    assert len(encode(m.Match(1, [bytes(32)] * limits.MAX_KEYS))) < limits.MAX_BODY_BYTES


def test_staging_reuses_one_buffer_over_tcp(pool: PoolThread) -> None:
    with PoolClient.connect(pool.tcp, name="c") as client:
        spec = m.Spec(b"k", 4096)
        grant = client.announce([spec], group="g", lease_s=5.0).grants[0]
        first = client.stage([StagePart(grant, spec, 0, 1)])[0].obj
        second = client.stage([StagePart(grant, spec, 0, 1)])[0].obj
        assert first is second
