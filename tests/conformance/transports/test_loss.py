"""What happens when a lease, a task or the pool is lost in the midst of a transfer."""

from __future__ import annotations

import asyncio
import random
import socket
import time
from typing import TYPE_CHECKING, Any

import pytest

from kvrelay.client.aio import AsyncPoolClient
from kvrelay.client.core import gets
from kvrelay.errors import KvRelayError, LeaseExpiredError, PoolUnavailableError
from kvrelay.testing.amid import hook
from kvrelay.testing.paths import SHELLS, Pools, Way

if TYPE_CHECKING:
    from pathlib import Path

    from kvrelay.client.blocking import PoolClient
    from kvrelay.testing.paths import Blocking, Looped
    from kvrelay.testing.pool import PoolProcess

rng = random.Random(13)
ITEMS = {b"%03d" % n: rng.randbytes(100_000) for n in range(300)}
MANY = {b"%d %s" % (n, key): data for n in range(5) for key, data in ITEMS.items()}
"""More than the sockets' buffers hold."""


def transfer(client: Blocking | Looped, what: str) -> None:
    if what == "put":
        client.do("put_many", list(MANY.items()))
    else:
        client.do("get_many", list(MANY), [bytearray(len(data)) for data in MANY.values()])


def wait_for_no_lease(vandal: PoolClient) -> None:
    deadline = time.monotonic() + 10
    while vandal.stat()["leases"]:
        assert time.monotonic() < deadline


def test_a_read_whose_lease_ran_out_is_refused(
    way: Way, client: Blocking | Looped, vandal: PoolClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not way.direct:
        pytest.skip("bytes in frames are held by the pool until they have left: there is no lease to lose")
    client.do("put_many", list(ITEMS.items()))
    monkeypatch.setattr(gets, "LEASE_S", 0.02)
    hook(client, 2, lambda: wait_for_no_lease(vandal))
    with pytest.raises(LeaseExpiredError):
        client.do("get_many", list(ITEMS), [bytearray(len(data)) for data in ITEMS.values()])
    hook(client, 1, lambda: wait_for_no_lease(vandal))
    with pytest.raises(LeaseExpiredError):
        client.do("get", b"000")


@pytest.mark.parametrize("shell", list(SHELLS))
@pytest.mark.parametrize("what", ["put", "get"])
def test_the_death_of_the_pool_amid_a_transfer_is_told_soon(
    way: Way, pools: Pools, tmp_path: Path, shell: str, what: str
) -> None:
    pool = pools.fresh(way, tmp_path, size="256MiB")
    client = SHELLS[shell](pools.address(pool, way), way)
    try:
        if what == "get":
            client.do("put_many", list(MANY.items()))
        hook(client, 2, pool.kill)
        begun = time.monotonic()
        with pytest.raises(PoolUnavailableError):
            transfer(client, what)
        assert time.monotonic() - begun < 10
        with pytest.raises(PoolUnavailableError):
            transfer(client, what)
    finally:
        client.close()
        if pool.process.poll() is None:
            pool.kill()
        assert pool.process.stdout is not None
        pool.process.stdout.close()


@pytest.mark.parametrize("what", ["put", "get"])
async def test_a_task_cancelled_amid_a_transfer_leaves_nothing_half_done(
    way: Way, pools: Pools, pool: PoolProcess, what: str
) -> None:
    """Cancelled after 1, 2, 4, ... turns of the loop. What can be read afterwards is whole."""
    address = pools.address(pool, way)
    async with await AsyncPoolClient.connect(address, name="other", transport="tcp") as other:
        for turns in (1, 2, 4, 8, 16, 64):
            async with await AsyncPoolClient.connect(address, name="test", transport=way.transport) as client:
                if what == "get":
                    await other.put_many(ITEMS.items())
                    into = [bytearray(len(data)) for data in ITEMS.values()]
                    task: asyncio.Task[object] = asyncio.create_task(client.get_many(list(ITEMS), into))
                else:
                    await other.delete(list(ITEMS))
                    task = asyncio.create_task(client.put_many(ITEMS.items()))
                for _ in range(turns):
                    await asyncio.sleep(0)
                if not task.cancel():
                    break
                with pytest.raises(asyncio.CancelledError):
                    await task
                if not client.closed:  # nothing was on its way: the connection is as good as new
                    await client.put(b"after", b"data")
                    assert await client.get(b"after") == b"data"
            for key, there in zip(ITEMS, await other.exists(list(ITEMS)), strict=True):
                if there:
                    assert await other.get(key) == ITEMS[key]


def test_a_lost_connection_of_several_is_named_and_the_others_go_on(way: Way, client: Blocking | Looped) -> None:
    if way.connections == 1:
        pytest.skip("one connection has no others")
    striped: Any = client.client
    striped.clients[1]._stream.sock.shutdown(socket.SHUT_RDWR)
    with pytest.raises(PoolUnavailableError, match="connection 2 of 3"):
        client.do("put_many", list(ITEMS.items()))
    client.do("put_many", list(ITEMS.items()))
    into = [bytearray(len(data)) for data in ITEMS.values()]
    assert client.do("get_many", list(ITEMS), into) == len(ITEMS)
    assert into == list(ITEMS.values())


def test_a_connection_that_was_closed_says_so(client: Blocking | Looped) -> None:
    client.do("put", b"k", b"data")
    client.do("close")
    client.do("close")
    for what, args in (("get", (b"k",)), ("put", (b"l", b"data")), ("put_many", (ITEMS.items(),))):
        with pytest.raises(KvRelayError):
            client.do(what, *args)
