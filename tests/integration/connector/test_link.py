"""The connector's connection to the pool at an engine's start."""

from __future__ import annotations

import errno
import itertools
import threading
import time
from typing import TYPE_CHECKING, Any

from kvrelay.connector.link import PoolLink
from kvrelay.testing.arenas import arenas_here
from kvrelay.testing.pool import PoolThread, pool_process
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


def test_a_link_that_was_idle_while_two_pools_came_and_went_gives_the_connection_to_the_third(tmp_path: Path) -> None:
    """1. The owner has a connection. 2. Its pool ends, another starts and ends. 3. A third starts; the owner asks."""
    connected = threading.Semaphore(0)
    link = PoolLink(
        f"unix:{tmp_path / 'pool.sock'}", name="loads", token=None, map_arena=True, reconnect_s=0.1,
        greet=lambda _: connected.release(),
    )  # fmt: skip
    try:
        for number in range(3):
            with PoolThread(tmp_path) as pool:
                assert pool.unix == f"unix:{tmp_path / 'pool.sock'}"
                if number == 0:
                    link.connect()
                    assert link.client() is not None
                assert connected.acquire(timeout=10.0)
                if number == 2:
                    deadline = time.monotonic() + 10.0
                    while (client := link.client()) is None:
                        assert time.monotonic() < deadline
                        time.sleep(0.01)
                    assert client.stat()["connections"] == 1
    finally:
        link.close()


def test_an_idle_link_does_not_keep_the_memory_of_a_pool_that_died(tmp_path: Path) -> None:
    """Its owner does nothing: a pool that starts again would find the old one's arena allocated."""
    link = PoolLink(f"unix:{tmp_path / 'pool.sock'}", name="loads", token=None, map_arena=True, reconnect_s=0.1)
    before = arenas_here()
    try:
        with pool_process(tmp_path) as pool:
            link.connect()
            assert link.connected
            (arena,) = arenas_here() - before
            pool.kill()
            deadline = time.monotonic() + 10.0
            while arena in arenas_here():
                assert time.monotonic() < deadline
                time.sleep(0.01)
        with pool_process(tmp_path):
            assert (client := link.wait(10.0)) is not None
            assert client.stat()["connections"] == 1
    finally:
        link.close()


def test_a_link_goes_on_trying_when_its_process_has_no_descriptor_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries, seen = itertools.count(), threading.Event()
    make = Address.new_socket

    def scarce(address: Address) -> Any:
        number = next(tries)
        if number == 1:
            seen.wait(10.0)
        if number < 3:
            raise OSError(errno.EMFILE, "Too many open files")
        return make(address)

    with PoolThread(tmp_path) as pool:
        link = PoolLink(pool.unix, name="loads", token=None, map_arena=True)
        monkeypatch.setattr("kvrelay.transport.address.Address.new_socket", scarce)
        link.start()
        link.settle(10.0)
        try:
            assert not link.hopeful
            assert link.client() is None
            seen.set()
            deadline = time.monotonic() + 10.0
            while (client := link.client()) is None:
                assert time.monotonic() < deadline, "it has given up"
                time.sleep(0.01)
            assert client.stat()["connections"] == 1
        finally:
            link.close()
