"""The connector's connection to the pool at an engine's start."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvrelay.connector.link import PoolLink
from kvrelay.testing.pool import PoolThread

if TYPE_CHECKING:
    from pathlib import Path


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
