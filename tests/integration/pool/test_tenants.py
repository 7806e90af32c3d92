"""What tenants of one pool can learn and take of each other, over real sockets: nothing."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import pytest

from kvrelay.pool.core.tenants import Tenant
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
