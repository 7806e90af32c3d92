"""The pool's memory, as clients of its host hold it: once, and no longer than the connection."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import threading
from typing import TYPE_CHECKING

import pytest

from kvrelay.client.aio import AsyncPoolClient
from kvrelay.client.blocking import PoolClient
from kvrelay.client.infinistore import ClientConfig, InfinityConnection
from kvrelay.errors import PoolUnavailableError
from kvrelay.testing.arenas import arenas_here
from kvrelay.testing.pool import PoolProcess, pool_process

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ONCE = [2]
"""One mapping, and the descriptor that Python's mmap keeps beside it."""


@pytest.fixture(autouse=True)
def no_garbage() -> None:
    """Arenas that the errors of earlier tests still hold would go amid this one."""
    gc.collect()


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[PoolProcess]:
    with pool_process(tmp_path) as pool:
        yield pool


def test_all_connections_of_a_process_share_one_mapping(pool: PoolProcess) -> None:
    before = arenas_here()
    clients: list[PoolClient] = []

    def connect() -> None:
        clients.append(PoolClient.connect(pool.unix, name="c"))

    threads = [threading.Thread(target=connect) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert list((arenas_here() - before).values()) == ONCE
    first, *others = clients
    first.put(b"k", b"bytes")
    first.close()
    assert [other.get(b"k") for other in others] == [b"bytes"] * 3
    for other in others:
        other.close()
    assert arenas_here() == before


def test_what_a_client_handed_out_stays_when_it_closes(pool: PoolProcess) -> None:
    before = arenas_here()
    with PoolClient.connect(pool.unix, name="c") as client:
        client.put(b"k", b"bytes")
        arena = client.arena
    assert arena is not None
    assert arena.nbytes == 64 << 20
    assert bytes(arena).find(b"bytes") >= 0
    assert len(arenas_here() - before) == 1
    del arena
    assert arenas_here() == before


def test_a_dead_pools_memory_goes_with_the_call_that_finds_it_dead(pool: PoolProcess) -> None:
    before = arenas_here()
    with PoolClient.connect(pool.unix, name="c") as client:
        pool.kill()
        with pytest.raises(PoolUnavailableError):
            client.stat()
        assert client.closed
        assert arenas_here() == before
        with pytest.raises(PoolUnavailableError):
            client.put_many([(b"k", b"bytes")])
        with pytest.raises(PoolUnavailableError):
            client.get(b"k")


async def test_a_dead_pools_memory_goes_from_an_idle_event_loop_by_itself(pool: PoolProcess) -> None:
    before = arenas_here()
    async with await AsyncPoolClient.connect(pool.unix, name="c") as client:
        assert len(arenas_here() - before) == 1
        pool.process.kill()
        async with asyncio.timeout(10):
            while arenas_here() != before:  # noqa: ASYNC110 - the kernel's view of it: nobody tells
                await asyncio.sleep(0.01)
        assert client.closed


@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
def test_a_client_that_is_only_dropped_leaves_nothing(pool: PoolProcess) -> None:
    before = arenas_here()
    client = PoolClient.connect(pool.unix, name="c")
    assert arenas_here() != before
    del client
    gc.collect()
    assert arenas_here() == before


def test_an_infinistore_client_that_connects_again_holds_one_arena(tmp_path: Path) -> None:
    before = arenas_here()
    with pool_process(tmp_path) as pool:
        connection = InfinityConnection(ClientConfig(address=pool.unix))
        connection.connect()
        pool.kill()
        with pytest.raises(PoolUnavailableError):
            connection.sync()
    with pool_process(tmp_path):
        connection.connect()
        assert list((arenas_here() - before).values()) == ONCE
        connection.close()
    assert arenas_here() == before


def test_an_arena_is_mapped_where_the_kernel_cannot_be_asked_to_touch_it(
    pool: PoolProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux before 5.14."""

    def refuse(*_: object) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    before = arenas_here()
    monkeypatch.setattr("kvrelay.transport.shm.touch", refuse)
    with PoolClient.connect(pool.unix, name="c") as client:
        client.put(b"k", b"bytes")
        assert (client.transport, client.get(b"k")) == ("shm", b"bytes")
    assert arenas_here() == before
