"""Both clients, over shared memory and over TCP, against a real server."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import threading
from typing import TYPE_CHECKING

import pytest

from kvrelay.client.aio import AsyncPoolClient
from kvrelay.client.blocking import PoolClient
from kvrelay.client.core.operations import StagePart
from kvrelay.errors import (
    BadRequestError,
    ConfigError,
    ConflictError,
    CorruptionError,
    DeadlineError,
    NotFoundError,
    PoolFullError,
    PoolUnavailableError,
    UnauthorizedError,
    VersionError,
    WriterLostError,
)
from kvrelay.testing.pool import PoolThread
from kvrelay.transport.checksum import checksum
from kvrelay.wire import limits
from kvrelay.wire import messages as m

if TYPE_CHECKING:
    from pathlib import Path

rng = random.Random(7)


def blob(size: int) -> bytes:
    return rng.randbytes(size)


def write_layers(client: PoolClient, grant: m.Grant, spec: m.Spec, data: bytes, layers: range) -> None:
    size = spec.size // spec.layers
    parts = [StagePart(grant, spec, layer * spec.segments, spec.segments) for layer in layers]
    views = client.stage(parts)
    for view, layer in zip(views, layers, strict=True):
        view[:] = data[layer * size : (layer + 1) * size]
    client.commit(parts, views)


def test_what_was_put_is_got_back(client: PoolClient) -> None:
    items = {bytes([i]) * 8: blob(size) for i, size in enumerate([1, 100, 4096, 65_537, 1 << 20])}
    client.put_many([(key, memoryview(data)) for key, data in items.items()])
    assert [client.get(key) for key in items] == list(items.values())
    buffers = [memoryview(bytearray(len(data))) for data in items.values()]
    assert client.get_many(list(items), buffers) == len(items)
    assert [bytes(buffer) for buffer in buffers] == list(items.values())
    assert client.get(b"absent") is None
    assert client.exists([b"absent", *items]) == [False, *[True] * len(items)]
    assert client.delete([*items, b"absent"]) == len(items)
    assert client.stat()["objects"] == 0


def test_a_thousand_small_objects_travel_in_one_batch(client: PoolClient) -> None:
    items = [(i.to_bytes(4, "big"), memoryview(blob(64 + i % 64))) for i in range(2000)]
    client.put_many(items)
    buffers = [memoryview(bytearray(data.nbytes)) for _, data in items]
    assert client.get_many([key for key, _ in items], buffers) == 2000
    assert buffers == [data for _, data in items]


def test_objects_of_different_geometry_are_got_together(client: PoolClient) -> None:
    specs = [m.Spec(b"kv", 4 * 3 * 1000, 4, 3), m.Spec(b"plain", 500), m.Spec(b"two", 2000, 2, 1)]
    blobs = [blob(spec.size) for spec in specs]
    for spec, data in zip(specs, blobs, strict=True):
        grant = client.announce([spec], group="P", lease_s=10.0).grants[0]
        write_layers(client, grant, spec, data, range(spec.layers))
    buffers = [memoryview(bytearray(spec.size)) for spec in specs]
    assert client.get_many([spec.key for spec in specs], buffers) == 3
    assert [bytes(buffer) for buffer in buffers] == blobs
    assert client.stat()["leases"] == 0


def test_more_checksums_than_one_message_holds_come_in_several(client: PoolClient) -> None:
    specs = [m.Spec(bytes([n]), 1 << 21, 1 << 8, 1 << 8) for n in range(5)]
    blobs = [blob(spec.size) for spec in specs]
    for spec, data in zip(specs, blobs, strict=True):
        grant = client.announce([spec], group="P", lease_s=10.0).grants[0]
        write_layers(client, grant, spec, data, range(spec.layers))
    prefix = client.match_prefix([spec.key for spec in specs], lease_s=10.0)
    assert client.wait(prefix, 256, timeout_s=5.0) == 256
    views = client.fetch(prefix, [m.Range(4, 255 * 256, 256), m.Range(0, 0, 256)])
    assert [bytes(view) for view in views] == [blobs[4][-8192:], blobs[0][:8192]]
    client.release(prefix)


def test_a_reader_follows_a_writer_layer_by_layer(address: str) -> None:
    spec = m.Spec(b"kv", 4 * 3 * 1000, 4, 3)
    data = blob(spec.size)
    with PoolClient.connect(address, name="P") as writer, PoolClient.connect(address, name="D") as reader:
        grant = writer.announce([spec], group="P", lease_s=10.0).grants[0]
        prefix = reader.match_prefix([b"kv"], lease_s=10.0)
        assert (len(prefix), prefix.sealed) == (1, 0)
        got = b""
        for layer in range(4):
            write_layers(writer, grant, spec, data, range(layer, layer + 1))
            assert reader.wait(prefix, layer + 1, timeout_s=5.0) >= layer + 1
            got += bytes(reader.fetch(prefix, [m.Range(0, layer * 3, 3)])[0])
        assert got == data
        reader.release(prefix)
        assert reader.exists([b"kv"]) == [True]


def test_part_of_a_layer_can_be_read(client: PoolClient) -> None:
    spec = m.Spec(b"kv", 2 * 4 * 500, 2, 4)
    data = blob(spec.size)
    grant = client.announce([spec], group="P", lease_s=10.0).grants[0]
    write_layers(client, grant, spec, data, range(2))
    prefix = client.match_prefix([b"kv"], lease_s=10.0)
    client.wait(prefix, 2, timeout_s=10.0)
    views = client.fetch(prefix, [m.Range(0, 1, 2), m.Range(0, 6, 1)])
    assert [bytes(view) for view in views] == [data[500:1500], data[3000:3500]]


def test_a_waiting_reader_is_told_when_its_writer_dies(address: str) -> None:
    writer = PoolClient.connect(address, name="P")
    with PoolClient.connect(address, name="D") as reader:
        writer.announce([m.Spec(b"kv", 4096)], group="P", lease_s=60.0)
        prefix = reader.match_prefix([b"kv"], lease_s=60.0)
        pending = reader.start(m.Wait(0, prefix.lease, 1, 30.0), m.Ready)
        assert not pending.poll()
        writer.close()
        with pytest.raises(WriterLostError):
            pending.result(5.0)


def test_a_writer_learns_that_its_object_was_given_up(address: str) -> None:
    spec = m.Spec(b"kv", 4096)
    with PoolClient.connect(address, name="P") as writer, PoolClient.connect(address, name="x") as other:
        grant = writer.announce([spec], group="P", lease_s=60.0).grants[0]
        assert other.delete([b"kv"]) == 1
        with pytest.raises(NotFoundError):
            write_layers(writer, grant, spec, blob(4096), range(1))
        stats = writer.stat()
        assert (stats["unsealed"], stats["lingering_bytes"]) == (0, 0)


def test_damaged_bytes_are_an_error_of_their_own_and_reach_nobody_twice(pool: PoolThread, address: str) -> None:
    with PoolClient.connect(address, name="D") as client, PoolClient.connect(pool.unix, name="vandal") as vandal:
        client.put(b"kv", blob(5000))
        offset = client.match_prefix([b"kv"]).views[0].offset
        assert vandal.arena is not None
        vandal.arena[offset + 4000] ^= 1
        with pytest.raises(CorruptionError):
            client.get(b"kv")
        assert client.get(b"kv") is None
        assert client.stat()["corrupt"] == 1


def test_a_full_pool_says_so_and_takes_more_once_leases_end(client: PoolClient) -> None:
    big = 6 << 20
    client.put(b"a", blob(big))
    client.put(b"b", blob(big))
    lease = client.match_prefix([b"a", b"b"], lease_s=60.0)
    with pytest.raises(PoolFullError):
        client.put(b"c", blob(big))
    client.release(lease)
    client.put(b"c", blob(big))
    assert client.get(b"c") is not None


def test_errors_arrive_as_their_classes(client: PoolClient) -> None:
    client.open_ticket("t", 5.0)
    with pytest.raises(ConflictError):
        client.open_ticket("t", 5.0)
    client.end_ticket("t")
    with pytest.raises(NotFoundError):
        client.post("t", b"late")


@pytest.mark.parametrize("key", [b"", bytes(limits.MAX_KEY_BYTES + 1)])
def test_a_request_outside_its_bounds_is_the_callers_fault_and_the_connection_goes_on(
    client: PoolClient, key: bytes
) -> None:
    with pytest.raises(BadRequestError, match="is not a key: a key is 1 to 64 bytes"):
        client.match_prefix([key])
    with pytest.raises(BadRequestError, match="is not a key: a key is 1 to 64 bytes"):
        client.put(key, b"data")
    with pytest.raises(BadRequestError, match="100000 keys in one request: at most 16384"):
        client.match_prefix([bytes(64)] * 100_000)
    with pytest.raises(BadRequestError, match="fetch"):
        client.start(m.Read(0, 1, [m.Range(0, 0, 1)]), m.Data).result(1.0)
    assert client.stat()["connections"] == 1


def test_many_calls_are_under_way_at_once_and_answered_in_any_order(client: PoolClient) -> None:
    client.open_ticket("t", 30.0)
    slow = client.start(m.Collect(0, "t", 20.0), m.Notes)
    quick = [client.start(m.Exists(0, [b"x"]), m.Existing) for _ in range(100)]
    assert all(isinstance(call.result(5.0), m.Existing) for call in quick)
    assert not slow.poll()
    with pytest.raises(DeadlineError):
        slow.result(0.001)
    client.post("t", b"now")
    notes = slow.result(5.0)
    assert isinstance(notes, m.Notes)
    assert notes.notes == [b"now"]


def test_a_lost_pool_fails_every_call(tmp_path: Path) -> None:
    with PoolThread(tmp_path) as pool:
        client = PoolClient.connect(pool.unix, name="c")
        client.open_ticket("t", 30.0)
        pending = client.start(m.Collect(0, "t", 20.0), m.Notes)
        assert not pending.poll()
    with pytest.raises(PoolUnavailableError):
        pending.result(5.0)
    with pytest.raises(PoolUnavailableError):
        client.stat()
    assert client.closed
    client.close()


def test_nobody_there_is_told_at_once(tmp_path: Path) -> None:
    for address in (f"unix:{tmp_path}/nothing", "tcp:127.0.0.1:1"):
        with pytest.raises(PoolUnavailableError, match="no pool answers"):
            PoolClient.connect(address, name="c")


def no_descriptor(*_: object, **__: object) -> None:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


@pytest.mark.parametrize("scarce", ["kvrelay.transport.address.Address.new_socket", "kvrelay.client.lead.os.eventfd"])
def test_a_process_without_descriptors_is_told_so_and_connects_when_it_has_some(
    address: str, monkeypatch: pytest.MonkeyPatch, scarce: str
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(scarce, no_descriptor)
        with pytest.raises(PoolUnavailableError, match="open files"):
            PoolClient.connect(address, name="c")
    with PoolClient.connect(address, name="c") as client:
        assert client.stat()["connections"] == 1


async def test_an_event_loop_without_descriptors_is_told_so(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("kvrelay.transport.address.Address.new_socket", no_descriptor)
        with pytest.raises(PoolUnavailableError, match="open files"):
            await AsyncPoolClient.connect(address, name="c")
    async with await AsyncPoolClient.connect(address, name="c") as client:
        assert (await client.stat())["connections"] == 1


@pytest.mark.parametrize(
    "address", ["", "pool", "tcp:host", "tcp:host:99999", "unix:", "http://x", "unix:" + "x" * 200]
)
def test_a_bad_address_is_named(address: str) -> None:
    with pytest.raises(ConfigError):
        PoolClient.connect(address, name="c")


def test_a_token_is_needed_where_one_is_set(tmp_path: Path) -> None:
    with PoolThread(tmp_path, token="sesame") as pool:
        for address in (pool.unix, pool.tcp):
            for wrong in (None, "open", "sesamesesame"):
                with pytest.raises(UnauthorizedError):
                    PoolClient.connect(address, name="c", token=wrong)
            with PoolClient.connect(address, name="c", token="sesame") as client:
                assert client.stat()["connections"] == 1


def test_another_protocol_version_is_refused_at_the_handshake(
    pool: PoolThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "VERSIONS", (99,))
    monkeypatch.setattr("kvrelay.pool.core.pool.limits", type("Limits", (), {"VERSIONS": (1,)}))
    with pytest.raises(VersionError, match=r"\[99\].*\[1\]"):
        PoolClient.connect(pool.unix, name="c")


async def test_asyncio_tasks_share_a_connection(address: str) -> None:
    async with await AsyncPoolClient.connect(address, name="c") as client:
        items = {bytes([i]) * 4: blob(10_000 + i) for i in range(50)}
        await asyncio.gather(*(client.put(key, data) for key, data in items.items()))
        assert await asyncio.gather(*(client.get(key) for key in items)) == list(items.values())
        await client.open_ticket("t", 30.0)
        waiting = asyncio.create_task(client.collect("t", 20.0))
        await client.post("t", b"note")
        assert await waiting == [b"note"]


async def test_a_cancelled_wait_leaves_the_connection_usable(address: str) -> None:
    async with await AsyncPoolClient.connect(address, name="c") as client:
        await client.open_ticket("t", 30.0)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await client.collect("t", 20.0)
        await client.post("t", b"note")  # answered to the request nobody waits for any more
        assert (await client.stat())["tickets"] == 1


@pytest.mark.parametrize("what", ["match", "announce", "get"])
async def test_a_cancelled_task_leaves_nothing_held(address: str, what: str) -> None:
    """Cancelled after 1, 2, 3, ... turns of the loop: what comes back later, or is held already, is given back."""
    async with await AsyncPoolClient.connect(address, name="c") as client:
        await client.put(b"k", blob(1000))
        for turns in range(1, 100):
            match what:
                case "match":
                    task: asyncio.Task[object] = asyncio.create_task(client.match_prefix([b"k"], lease_s=3000.0))
                case "announce":
                    specs = [m.Spec(b"new", 4096)]
                    task = asyncio.create_task(client.announce(specs, group="g", lease_s=3000.0))
                case _:
                    task = asyncio.create_task(client.get(b"k"))
            for _ in range(turns):
                await asyncio.sleep(0)
            if not task.cancel():
                break
            with pytest.raises(asyncio.CancelledError):
                await task
            if client.closed:  # a transfer over TCP was cut half-way: everything went with the connection
                return
            async with asyncio.timeout(10):
                while (held := await client.stat())["leases"] or held["unsealed"]:
                    pass


def test_threads_hammering_one_pool_never_see_each_others_bytes(pool: PoolThread, address: str) -> None:
    """More objects than fit: reads race with evictions, and are right or misses."""
    failures: list[str] = []

    def work(number: int) -> None:
        local = random.Random(number)
        with PoolClient.connect(address, name=f"w{number}") as client:
            for _ in range(60):
                seed = local.randrange(40)
                key, data = seed.to_bytes(4, "big"), random.Random(seed).randbytes(600_000 + seed)
                if local.random() < 0.5:
                    client.put(key, data)
                else:
                    got = client.get(key)
                    if got is not None and checksum(memoryview(got)) != checksum(memoryview(data)):
                        failures.append(f"wrong bytes for {seed}")

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    with PoolClient.connect(pool.unix, name="check") as client:
        stats = client.stat()
    assert stats["evictions"] > 0
    assert {name: stats[name] for name in ("unsealed", "leases", "lingering_bytes", "corrupt")} == {
        "unsealed": 0, "leases": 0, "lingering_bytes": 0, "corrupt": 0,
    }  # fmt: skip
