"""A program written for InfiniStore, after a change of its import and address."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kvrelay.client import infinistore
from kvrelay.errors import BadRequestError, ConfigError, PoolUnavailableError
from kvrelay.testing.pool import PoolThread
from kvrelay.transport.address import parse_address

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture
def conn(address: str) -> Iterator[infinistore.InfinityConnection]:
    connection = infinistore.InfinityConnection(infinistore.ClientConfig(address=address))
    connection.connect()
    yield connection
    connection.close()


def test_a_host_and_a_port_are_enough(pool: PoolThread) -> None:
    where = parse_address(pool.tcp)
    config = infinistore.ClientConfig(
        host_addr=where.host,
        service_port=where.port,
        log_level="warning",
        connection_type=infinistore.TYPE_RDMA,
        ib_port=1,
        link_type=infinistore.LINK_ETHERNET,
        dev_name="mlx5_0",
    )
    connection = infinistore.InfinityConnection(config)
    connection.connect()
    assert connection.rdma_connected
    with pytest.raises(BadRequestError, match="already"):
        connection.connect()
    connection.close()
    with pytest.raises(PoolUnavailableError):
        connection.sync()


def test_pages_of_a_tensor_are_written_and_read_by_elements(conn: infinistore.InfinityConnection) -> None:
    source = np.arange(4096, dtype=np.float32)
    conn.register_mr(source)
    assert conn.write_cache(source, [("key1", 0), ("key2", 1024), ("key3", 2048)], 1024) == 0
    conn.sync()
    target = np.zeros(4096, dtype=np.float32)
    conn.read_cache(target, [("key1", 0), ("key2", 1024)], 1024)
    conn.sync()
    assert (target[:2048] == source[:2048]).all()
    assert not target[2048:].any()


def test_pages_are_allocated_and_written_as_the_older_interface_does(conn: infinistore.InfinityConnection) -> None:
    source = np.arange(3 * 1024, dtype=np.float16)
    remote = conn.allocate_rdma(["a", "b", "c"], 1024 * 2)
    assert conn.rdma_write_cache(source, [0, 1024, 2048], 1024, remote) == 0
    conn.sync()
    target = np.zeros_like(source)
    conn.read_cache(target, [("a", 0), ("b", 1024), ("c", 2048)], 1024)
    assert (target == source).all()
    with pytest.raises(BadRequestError, match="2 offsets for 3"):
        conn.rdma_write_cache(source, [0, 1024], 1024, remote)


def test_pointers_count_bytes_and_need_registered_memory(conn: infinistore.InfinityConnection) -> None:
    source, target = np.arange(8192, dtype=np.uint8), np.zeros(8192, dtype=np.uint8)
    blocks = [("a", 0), ("b", 4096)]

    async def run() -> None:
        with pytest.raises(BadRequestError, match="register_mr"):
            await conn.rdma_write_cache_async(blocks, 4096, source.ctypes.data)
        assert conn.register_mr(source.ctypes.data, source.nbytes) == 0
        assert conn.register_mr(target.ctypes.data, target.nbytes) == 0
        with pytest.raises(BadRequestError, match="register_mr"):
            await conn.rdma_write_cache_async([("a", 4097)], 4096, source.ctypes.data)
        assert await conn.rdma_write_cache_async(blocks, 4096, source.ctypes.data) == 200
        assert await conn.rdma_read_cache_async(blocks, 4096, target.ctypes.data) == 200
        with pytest.raises(infinistore.InfiniStoreKeyNotFound, match="'c'"):
            await conn.rdma_read_cache_async([("a", 0), ("c", 4096)], 4096, target.ctypes.data)

    asyncio.run(run())
    assert (target == source).all()


def test_single_objects_travel_by_pointer_and_as_arrays(conn: infinistore.InfinityConnection) -> None:
    source = np.arange(100, dtype=np.uint8)
    conn.tcp_write_cache("k", source.ctypes.data, 100)
    assert (conn.tcp_read_cache("k") == source).all()
    with pytest.raises(infinistore.InfiniStoreKeyNotFound):
        conn.tcp_read_cache("absent")
    for pointer, size in ((0, 100), (source.ctypes.data, 0)):
        with pytest.raises(BadRequestError, match="cannot be used as memory"):
            conn.tcp_write_cache("l", pointer, size)


async def test_the_async_twins_do_not_block_the_loop(address: str) -> None:
    conn = infinistore.InfinityConnection(infinistore.ClientConfig(address=address))
    await conn.connect_async()
    try:
        source = np.arange(4096, dtype=np.int64)
        remote = await conn.allocate_rdma_async(["x"], 4096 * 8)
        assert remote[0].size == 4096 * 8
        await conn.write_cache_async(source, [("x", 0)], 4096)
        target = np.zeros_like(source)
        await conn.read_cache_async(target, [("x", 0)], 4096)
        assert (target == source).all()
        with pytest.raises(infinistore.InfiniStoreKeyNotFound):
            await conn.read_cache_async(target, [("absent", 0)], 4096)
        task = asyncio.create_task(conn.write_cache_async(source, [("y", 0)], 4096))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert conn.check_exist("y") or conn.get_match_last_index(["x", "y"]) == 0
    finally:
        conn.close()


class Held(np.ndarray[Any, Any]):
    """A page whose bytes are asked for, in the thread that stores it, and given when the test says so."""

    asked: threading.Event
    given: threading.Event

    @property
    def itemsize(self) -> int:
        self.asked.set()
        assert self.given.wait(30.0)
        return 1


def held_page() -> Held:
    page = np.arange(16, dtype=np.uint8).view(Held)
    page.asked, page.given = threading.Event(), threading.Event()
    return page


async def test_a_call_that_is_cancelled_again_and_again_ends_with_its_thread(address: str) -> None:
    """1. a thread uses the caller's memory; 2. the call is cancelled; 3. and again as it waits; 4. the thread ends."""
    conn = infinistore.InfinityConnection(infinistore.ClientConfig(address=address))
    await conn.connect_async()
    page = held_page()
    try:
        task = asyncio.create_task(conn.write_cache_async(page, [("k", 0)], 16))
        await asyncio.to_thread(page.asked.wait, 30.0)
        for _ in range(3):
            task.cancel()
            for _ in range(3):
                await asyncio.sleep(0)
            assert not task.done()
        page.given.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert conn.check_exist("k")
    finally:
        page.given.set()
        conn.close()


def test_a_loop_that_ends_amid_a_call_waits_for_its_thread(conn: infinistore.InfinityConnection) -> None:
    """Its end cancels all tasks, whoever made them."""
    page = held_page()
    ended: list[bool] = []

    async def call() -> None:
        try:
            await conn.write_cache_async(page, [("k", 0)], 16)
        finally:
            ended.append(conn.check_exist("k"))

    async def main() -> asyncio.Task[None]:
        task = asyncio.create_task(call())
        await asyncio.to_thread(page.asked.wait, 30.0)
        asyncio.get_running_loop().call_later(0.05, page.given.set)  # after the end of main
        return task

    assert asyncio.run(main()).cancelled()
    assert ended == [True]


def test_keys_are_looked_up_matched_and_deleted(conn: infinistore.InfinityConnection) -> None:
    page = np.zeros(16, dtype=np.uint8)
    for key in ("key0", "key1", "key3"):
        conn.write_cache(page, [(key, 0)], 16)
    assert conn.check_exist("key1")
    assert not conn.check_exist("key2")
    assert conn.get_match_last_index(["key0", "key1", "key2", "key3"]) == 1  # up to the hole
    with pytest.raises(infinistore.InfiniStoreException, match="can't find a match"):
        conn.get_match_last_index(["A", "key1"])
    assert conn.delete_keys(["key0", "key2", "key3"]) == 2


def test_keys_written_twice_keep_their_first_bytes(conn: infinistore.InfinityConnection) -> None:
    for value in (1, 2):
        conn.write_cache(np.full(16, value, np.uint8), [("k", 0)], 16)
    assert conn.tcp_read_cache("k")[0] == 1


def test_long_keys_become_their_digest_and_stay_apart(conn: infinistore.InfinityConnection) -> None:
    long = ["é" * 32, "é" * 33, "x" * 500, "x" * 501]
    for number, key in enumerate(long):
        conn.write_cache(np.full(16, number, np.uint8), [(key, 0)], 16)
    assert [conn.tcp_read_cache(key)[0] for key in long] == [0, 1, 2, 3]
    assert infinistore.key_of("é" * 32) == ("é" * 32).encode()
    assert len(infinistore.key_of("x" * 500)) == 32
    with pytest.raises(BadRequestError, match="empty"):
        conn.check_exist("")


async def test_what_is_no_key_pointer_or_number_is_named(conn: Any) -> None:
    page = np.arange(16, dtype=np.uint8)
    pointer = np.int64(page.ctypes.data)
    with pytest.raises(BadRequestError, match="not registered"):
        await conn.rdma_write_cache_async([("a", 0)], 8, pointer)
    conn.register_mr(pointer, np.int32(16))
    assert await conn.rdma_write_cache_async([("a", np.int64(8))], np.int64(8), pointer) == 200
    assert bytes(conn.tcp_read_cache("a")) == bytes(page[8:])
    calls: list[tuple[Callable[[], Any], str]] = [
        (lambda: conn.check_exist(b"a"), "b'a' of type bytes is not a key"),
        (lambda: conn.check_exist("\ud800"), "is not a key"),
        (lambda: conn.delete_keys("a"), "keys = 'a' of type str: legal is a sequence of keys"),
        (lambda: conn.get_match_last_index(None), "keys = None of type NoneType"),
        (lambda: conn.write_cache(page, {"a": 0}, 8), "blocks = {'a': 0} of type dict"),
        (lambda: conn.register_mr(-5, 16), "16 bytes at -0x5 cannot be used as memory"),
        (lambda: conn.register_mr(5, "16"), "size = '16' of type str"),
        (lambda: conn.tcp_write_cache("b", 1 << 64, 8), "8 bytes at 0x10000000000000000 cannot be used as memory"),
        (lambda: conn.tcp_write_cache("b", None, 8), "address = None of type NoneType"),
    ]
    for call, why in calls:
        with pytest.raises(BadRequestError, match=why):
            call()
    for blocks, size, why in (
        ([("b", 0.5)], 8, "offset = 0.5 of type float"),
        ([("b", 12)], 8, "not registered"),
        ([("b", 0)], -8, "-8 bytes at"),
        (None, 8, "blocks = None"),
    ):
        with pytest.raises(BadRequestError, match=why):
            await conn.rdma_write_cache_async(blocks, size, pointer)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadRequestError, match="no pool is named"):
        infinistore.InfinityConnection(infinistore.ClientConfig()).connect()
    with pytest.raises(BadRequestError, match="not_a_setting"):
        infinistore.ClientConfig(not_a_setting=1)
    with pytest.raises(ConfigError):
        infinistore.InfinityConnection(infinistore.ClientConfig(address="nowhere")).connect()
    with pytest.raises(PoolUnavailableError, match="connect"):
        infinistore.InfinityConnection(infinistore.ClientConfig(address="tcp:127.0.0.1:1")).sync()
    with PoolThread(tmp_path, token="sesame") as pool:
        connection = infinistore.InfinityConnection(infinistore.ClientConfig(address=pool.unix, token="sesame"))
        connection.connect()
        connection.sync()
        connection.close()
