"""Every transport, under both shells, against pools in processes of their own; nothing may be held after a test."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from kvrelay.client.blocking import PoolClient
from kvrelay.testing.paths import SHELLS, WAYS, Blocking, Looped, Pools, Way
from kvrelay.testing.pool import PoolProcess
from kvrelay.transport import nixl

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

GAUGES = ("leases", "unsealed", "lingering_bytes", "waiting", "tickets")


@pytest.fixture(scope="module")
def pools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pools]:
    """Not kept for the session: with NIXL on, a pool's progress threads take the cores from whatever runs beside it."""
    running = Pools(tmp_path_factory.mktemp("pools"), PoolProcess)
    yield running
    for pool in running:
        pool.terminate()
        assert pool.process.stdout is not None
        pool.process.stdout.close()


@pytest.fixture(params=list(WAYS))
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Way:
    chosen = WAYS[request.param]
    if chosen.ucx_tls is not None:
        if not nixl.available():
            pytest.skip(f"NIXL is not installed: {nixl.INSTALL}")
        monkeypatch.setenv("UCX_TLS", chosen.ucx_tls)
    return chosen


@pytest.fixture
def pool(pools: Pools, way: Way) -> Iterator[PoolProcess]:
    """The way's pool: empty before, and with nothing held after, whatever the test did."""
    running = pools.of(way)
    yield running
    with PoolClient.connect(running.unix, name="leak gate") as client:
        deadline = time.monotonic() + 10.0
        while any((stats := client.stat())[name] for name in GAUGES):
            if time.monotonic() > deadline:
                pytest.fail(f"still held: { {name: stats[name] for name in GAUGES} }")
        client.unpin([info.key for info in client.list_objects()] or [b"none"])
        client.purge()
        assert client.stat()["objects"] == 0


@pytest.fixture
def vandal(pool: PoolProcess) -> Iterator[PoolClient]:
    """A client that has the arena mapped, whatever the way under test is."""
    with PoolClient.connect(pool.unix, name="vandal", transport="shm") as client:
        yield client


@pytest.fixture(params=list(SHELLS))
def connect(
    request: pytest.FixtureRequest, pools: Pools, pool: PoolProcess, way: Way
) -> Iterator[Callable[[], Blocking | Looped]]:
    """Makes clients of one shell; they are closed afterwards."""
    made: list[Blocking | Looped] = []

    def new() -> Blocking | Looped:
        made.append(SHELLS[request.param](pools.address(pool, way), way))
        assert made[-1].one.transport == way.transport
        return made[-1]

    yield new
    for client in made:
        client.close()


@pytest.fixture
def client(connect: Callable[[], Blocking | Looped]) -> Blocking | Looped:
    return connect()
