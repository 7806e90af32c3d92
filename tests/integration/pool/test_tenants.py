"""What tenants of one pool can learn and take of each other, over real sockets: nothing."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import pytest

from kvrelay.client.aio import AsyncPoolClient
from kvrelay.client.blocking import PoolClient
from kvrelay.errors import PoolFullError
from kvrelay.pool.core.tenants import Quota, Tenant
from kvrelay.testing.pool import PoolThread
from kvrelay.testing.talker import Talker
from kvrelay.transport.checksum import checksum
from kvrelay.wire import messages as m

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SECRET = b"secret of the first tenant. " * 1024
TENANTS = (Tenant(name="first", token="1"), Tenant(name="second", token="2"))


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[PoolThread]:
    with PoolThread(tmp_path, size=1 << 20, tenants=TENANTS) as pool:
        yield pool


def u64(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}Q", *values)


def leave_a_secret(pool: PoolThread) -> None:
    """The first tenant stores an object, and deletes it: its bytes lie where the next object goes."""
    with Talker(pool.tcp, token="1") as owner:
        put = m.Put(2, [b"k"], u64(len(SECRET)), u64(checksum(SECRET)))
        assert owner.ask(put, SECRET)[0] == m.PutDone(2, b"\0")
        assert owner.ask(m.Delete(3, [b"k"]))[0] == m.Deleted(3, 1)


@pytest.mark.parametrize("where", ["tcp", "unix"])
def test_bytes_that_were_freed_cannot_be_published_by_a_tenant_that_did_not_send_its_own(
    shared: PoolThread, where: str
) -> None:
    leave_a_secret(shared)
    with Talker(shared.unix if where == "unix" else shared.tcp, token="2") as thief:
        room, _ = thief.ask(m.Room(2, [b"mine"], u64(len(SECRET)), 60.0))
        if isinstance(room, m.RoomGiven):
            thief.ask(m.Fill(3, room.batch, u64(checksum(SECRET))))
        announced, _ = thief.ask(m.Announce(4, "g", [m.Spec(b"mine too", len(SECRET))], 60.0))
        assert isinstance(announced, m.Announced)
        written, _ = thief.ask(m.Written(5, [m.Part(announced.grants[0].handle, 0, [checksum(SECRET)])]))
        for key in (b"mine", b"mine too"):
            got, payload = thief.ask(m.Get(6, [key], u64(len(SECRET))))
            assert isinstance(got, m.Got)
            assert payload == b""
        assert isinstance(room, m.Failed)
        assert isinstance(written, m.Failed)
        assert room.code == written.code == "bad_request"


SMALL = (Tenant(name="small", token="1", quota=Quota(max_objects=2, max_connections=1), shm=True),)


@pytest.mark.parametrize("where", ["tcp", "unix"])
def test_a_client_learns_which_bound_it_reached(tmp_path: Path, where: str) -> None:
    with (
        PoolThread(tmp_path, size=1 << 20, tenants=SMALL) as pool,
        PoolClient.connect(pool.unix if where == "unix" else pool.tcp, name="c", token="1") as client,
    ):
        for key in (b"a", b"b", b"c"):
            client.put(key, key)
        assert client.exists([b"a", b"b", b"c"]).count(True) == 2
        client.pin([b"a", b"b", b"c"])
        told = r"tenant 'small' may have 2 objects \(max_objects\), it has 2"
        with pytest.raises(PoolFullError, match=told):
            client.put(b"d", b"4")
        with pytest.raises(PoolFullError, match=told):
            client.write_ranges(b"d", 8, [(0, b"12345678")], segment_bytes=8)
        with pytest.raises(PoolFullError, match=r"tenant 'small' may have 1 connections \(max_connections\)"):
            PoolClient.connect(pool.tcp, name="one too many", token="1")
        assert client.stat()["connections_refused"] == 1


async def test_an_asynchronous_client_over_the_limit_is_refused_too(tmp_path: Path) -> None:
    with PoolThread(tmp_path, size=1 << 20, tenants=SMALL) as pool:
        async with await AsyncPoolClient.connect(pool.tcp, name="c", token="1") as client:
            with pytest.raises(PoolFullError, match="may have 1 connections"):
                await AsyncPoolClient.connect(pool.unix, name="one too many", token="1")
            await client.put(b"k", b"v")
