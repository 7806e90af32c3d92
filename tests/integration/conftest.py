"""A real pool, and its address over each transport."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvrelay.testing.pool import PoolThread

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[PoolThread]:
    """In a thread; its books must balance when that has ended, and nobody writes in them any more."""
    with PoolThread(tmp_path) as thread:
        yield thread
    thread.server.core.check_integrity()


@pytest.fixture(params=["shm", "tcp"])
def address(request: pytest.FixtureRequest, pool: PoolThread) -> str:
    return pool.unix if request.param == "shm" else pool.tcp
