"""The connector's connection to the pool at an engine's start."""

from __future__ import annotations

import errno
import time
from typing import TYPE_CHECKING, Any

from kvrelay.connector.link import PoolLink
from kvrelay.testing.pool import PoolThread
from kvrelay.transport.address import Address

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_a_link_that_has_settled_has_its_connection(tmp_path: Path) -> None:
    with PoolThread(tmp_path) as pool:
        link = PoolLink(pool.unix, name="loads", token=None, map_arena=True)
        link.start()
        link.settle(10.0)
        try:
            client = link.client()
            assert client is not None
            assert client.stat()["connections"] == 1
        finally:
            link.close()


def test_a_link_without_a_pool_settles_at_once_and_says_so(tmp_path: Path) -> None:
    link = PoolLink(f"unix:{tmp_path / 'nobody'}", name="loads", token=None, map_arena=True)
    link.start()
    link.settle(10.0)
    try:
        assert not link.hopeful
        assert link.client() is None
    finally:
        link.close()


def test_a_link_goes_on_trying_when_its_process_has_no_descriptor_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = iter(range(3))
    make = Address.new_socket

    def scarce(address: Address) -> Any:
        if next(tries, None) is not None:
            raise OSError(errno.EMFILE, "Too many open files")
        return make(address)

    with PoolThread(tmp_path) as pool:
        link = PoolLink(pool.unix, name="loads", token=None, map_arena=True)
        monkeypatch.setattr("kvrelay.transport.address.Address.new_socket", scarce)
        link.start()
        link.settle(10.0)
        try:
            assert not link.hopeful
            deadline = time.monotonic() + 10.0
            while (client := link.client()) is None:
                assert time.monotonic() < deadline, "it has given up"
                time.sleep(0.01)
            assert client.stat()["connections"] == 1
        finally:
            link.close()
