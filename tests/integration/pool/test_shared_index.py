"""Lookups of clients on the pool's host: answered from shared memory, and as the pool would answer them."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import sys
import time
from typing import TYPE_CHECKING

import pytest

from kvrelay.client import connection
from kvrelay.client.aio import AsyncPoolClient
from kvrelay.client.blocking import PoolClient
from kvrelay.client.index import SharedIndex
from kvrelay.errors import BadRequestError, PoolUnavailableError
from kvrelay.native import native
from kvrelay.pool.core.tenants import Tenant
from kvrelay.testing.pool import PoolProcess, PoolThread, pool_process
from kvrelay.transport.index import IndexMemory
from kvrelay.wire import messages as m

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.sharedctypes import SynchronizedArray
    from pathlib import Path

pytestmark = pytest.mark.skipif(native is None, reason="the native module was not built")


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[PoolThread]:
    with PoolThread(tmp_path) as running:
        yield running


@pytest.fixture
def client(pool: PoolThread) -> Iterator[PoolClient]:
    with PoolClient.connect(pool.unix, name="client") as connected:
        yield connected


def lookups_of(client: PoolClient) -> int:
    return client.stat()["lookups"]


def test_a_client_of_the_host_looks_up_without_a_request(client: PoolClient) -> None:
    client.put_many([(b"a", b"bytes"), (b"b", b"more")])
    before = client.stat()
    assert client.count_prefix([b"a", b"b", b"c"]) == (2, 2, 2)
    assert client.exists([b"c", b"b"]) == [False, True]
    after = client.stat()
    assert {name: after[name] - before[name] for name in ("requests", "lookups", "hits", "misses")} == {
        "requests": 1,  # for the numbers themselves
        "lookups": 2,
        "hits": 2,
        "misses": 1,
    }
    client.delete([b"a"])
    assert client.count_prefix([b"a", b"b"]) == (0, 0, 0)


def test_names_are_in_the_index_before_its_first_client_comes(pool: PoolThread) -> None:
    """Whoever attaches first to a pool with millions of objects holds nobody up."""
    keys = [b"%d" % number for number in range(2_000)]
    with PoolClient.connect(pool.tcp, name="writer") as writer:
        empty_bytes = writer.stat()["index_bytes"]
        writer.put_many([(key, b"bytes") for key in keys])
        filled_bytes = writer.stat()["index_bytes"]
        assert filled_bytes > empty_bytes
        with PoolClient.connect(pool.unix, name="first") as first:
            assert first.count_prefix(keys) == (2_000, 2_000, 2_000)
        assert (writer.stat()["lookups"], writer.stat()["index_bytes"]) == (1, filled_bytes)


def test_what_a_client_is_told_happened_another_sees(pool: PoolThread, client: PoolClient) -> None:
    with PoolClient.connect(pool.tcp, name="far") as far:
        for number in range(50):
            far.put(b"%d" % number, b"bytes")
            assert client.exists([b"%d" % number]) == [True]
            far.delete([b"%d" % number])
            assert client.exists([b"%d" % number]) == [False]


def test_an_event_loop_looks_up_too_and_a_task_that_asks_again_and_again_stops_nobody(pool: PoolThread) -> None:
    async def main() -> None:
        async with await AsyncPoolClient.connect(pool.unix, name="loop") as client:

            async def until_there() -> int:
                asked = 1
                while not (await client.exists([b"k"]))[0]:
                    asked += 1
                return asked

            waiting = asyncio.create_task(until_there())
            await asyncio.sleep(0)
            await client.put(b"k", b"bytes")
            assert await asyncio.wait_for(waiting, 10.0) > 1
            assert await client.count_prefix([b"k"]) == (1, 1, 1)
            assert (await client.stat())["lookups"] > 2

    asyncio.run(main())


def test_what_has_expired_is_not_seen(client: PoolClient) -> None:
    client.put(b"short", b"bytes", ttl_s=0.02)
    end = time.monotonic() + 0.02
    while time.monotonic() < end:
        client.exists([b"short"])
    assert client.exists([b"short"]) == [False]


def test_nonsense_that_a_client_writes_spoils_numbers_and_ends_no_connection(
    pool: PoolThread, client: PoolClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    marks: list[memoryview] = []

    class Kept(SharedIndex):
        def __init__(self, table: memoryview, marks_: memoryview, *, tiered: bool) -> None:
            super().__init__(table, marks_, tiered=tiered)
            marks.append(marks_)

    monkeypatch.setattr(connection, "SharedIndex", Kept)
    client.put_many([(b"a", b"bytes")])
    client.match_prefix([b"a", b"b"])
    with PoolClient.connect(pool.unix, name="rogue"):
        marks[0][:24] = b"\xff" * 24
    assert client.stat()["hits"] > 0


def test_other_users_may_not_open_the_table_for_writing() -> None:
    memory = IndexMemory.create(1 << 20)
    assert os.fstat(memory.descriptors[0]).st_mode & 0o377 == 0
    memory.close()


def test_a_key_that_is_none_is_refused_as_ever(client: PoolClient) -> None:
    with pytest.raises(BadRequestError):
        client.exists([b""])
    with pytest.raises(BadRequestError):
        client.count_prefix([b"k" * 65])
    assert client.count_prefix([]) == (0, 0, 0)


def test_without_shared_memory_or_an_index_the_pool_is_asked(
    tmp_path: Path, pool: PoolThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other").mkdir()
    with PoolThread(tmp_path / "other", index=False) as without:
        for address, transport in ((pool.unix, "tcp"), (pool.tcp, "auto"), (without.unix, "shm")):
            with PoolClient.connect(address, name="asking", transport=transport) as client:
                client.put(b"k", b"bytes")
                assert client.count_prefix([b"k", b"l"]) == (1, 1, 1)
                assert client.exists([b"k", b"l"]) == [True, False]
                assert lookups_of(client) == 0
        with PoolClient.connect(without.unix, name="asking") as client, pytest.raises(BadRequestError, match="index"):
            client.start(m.MapIndex(0), m.IndexMapped).result(5.0)
    monkeypatch.setattr(connection, "can_look", False)
    with PoolClient.connect(pool.unix, name="pure") as client:
        assert client.exists([b"k"]) == [True]
        assert lookups_of(client) == 0


def test_tenants_see_their_own_index_and_those_without_shared_memory_none(tmp_path: Path) -> None:
    tenants = [Tenant(name=name, token=name, shm=name != "c") for name in "abc"]
    with (
        PoolThread(tmp_path, tenants=tenants) as pool,
        PoolClient.connect(pool.unix, name="a", token="a") as a,
        PoolClient.connect(pool.unix, name="b", token="b") as b,
        PoolClient.connect(pool.unix, name="c", token="c") as c,
    ):
        a.put(b"of a", b"bytes")
        c.put(b"of c", b"bytes")
        keys = [b"of a", b"of c"]
        assert (a.exists(keys), b.exists(keys), c.exists(keys)) == ([True, False], [False, False], [False, True])
        assert lookups_of(a) == 2
        assert not c.welcome.index


def test_the_death_of_the_pool_is_told_and_another_pool_has_another_index(tmp_path: Path) -> None:
    with pool_process(tmp_path) as pool:
        client = PoolClient.connect(pool.unix, name="client")
        client.put(b"k", b"bytes")
        assert client.exists([b"k"]) == [True]
        pool.kill()
        with pytest.raises(PoolUnavailableError):
            client.exists([b"k"])
        with pytest.raises(PoolUnavailableError):
            client.count_prefix([b"k"])
        client.close()
    with pool_process(tmp_path) as pool, PoolClient.connect(pool.unix, name="client") as client:
        assert client.exists([b"k"]) == [False]
        assert lookups_of(client) == 1


def test_a_closed_client_refuses(pool: PoolThread) -> None:
    client = PoolClient.connect(pool.unix, name="client")
    client.close()
    with pytest.raises(PoolUnavailableError):
        client.exists([b"k"])


# --- beside a pool that writes ---

STABLE = [b"stable %d" % number for number in range(300)]
ABSENT = [b"absent %d" % number for number in range(300)]
ROUNDS, KEPT, BATCH = 100, 60, 500
PUT, GOING, GONE, DONE, WRONG, LOOKS = range(6)


def _key(number: int) -> bytes:
    return b"passing %d" % number


def _hammer(address: str, told: SynchronizedArray[int]) -> None:
    """Look up until the writer is done: what it said before a lookup must hold in that lookup."""
    with PoolClient.connect(address, name="reader") as client:
        while not told[DONE]:
            told[LOOKS] += 1
            right = client.count_prefix(STABLE) == (300, 300, 300) and not any(client.exists(ABSENT))
            put, gone = told[PUT], told[GONE]
            latest = range(max(0, put - 40), put)
            there = client.exists([_key(number) for number in latest])
            going = told[GOING]
            right &= all(found or number < going for number, found in zip(latest, there, strict=True))
            right &= not any(client.exists([_key(number) for number in range(max(0, gone - 40), gone)]))
            if not right:
                told[WRONG] += 1
        if client.stat()["lookups"] < told[LOOKS]:
            told[WRONG] += 1  # it asked the pool instead


@pytest.mark.skipif(sys.platform != "linux", reason="the index is Linux shared memory")
def test_a_reader_beside_a_writer_sees_all_that_was_said_to_be_there_and_nothing_that_was_said_to_be_gone(
    tmp_path: Path,
) -> None:
    """The index grows to 64 times its size meanwhile, at last in memory another thread gets; names come and go."""
    context = multiprocessing.get_context("spawn")
    told: SynchronizedArray[int] = context.Array("q", 6)
    with pool_process(tmp_path) as pool, PoolClient.connect(pool.unix, name="writer") as writer:
        writer.put_many([(key, b"bytes") for key in STABLE])
        readers = [context.Process(target=_hammer, args=(pool.unix, told), daemon=True) for _ in range(2)]
        for reader in readers:
            reader.start()
        small = writer.stat()["index_bytes"]
        written = 0
        deadline = time.monotonic() + 60.0
        while written < ROUNDS * BATCH or (told[LOOKS] < 200 and time.monotonic() < deadline):
            keys = [_key(number) for number in range(written, written + BATCH)]
            writer.put_many([(key, b"bytes") for key in keys])
            written += BATCH
            told[PUT] = written
            if written > KEPT * BATCH:  # so many stay, and the index grows
                gone = written - KEPT * BATCH
                told[GOING] = gone
                writer.delete([_key(number) for number in range(gone - BATCH, gone)])
                told[GONE] = gone
        told[DONE] = 1
        for reader in readers:
            reader.join(30.0)
            assert reader.exitcode == 0
        assert writer.stat()["index_bytes"] > 40 * small
    assert told[LOOKS] >= 200
    assert told[WRONG] == 0


def test_a_pool_process_can_be_told_to_keep_none(tmp_path: Path) -> None:
    pool = PoolProcess(tmp_path, options=["--no-index"])
    try:
        with PoolClient.connect(pool.unix, name="client") as client:
            assert client.exists([b"k"]) == [False]
            assert client.stat()["index_bytes"] == 0
    finally:
        pool.terminate()
        assert pool.process.stdout is not None
        pool.process.stdout.close()
