"""The admin API over a pool of dictionaries."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

import httpx
import pytest

from kvrelay.admin.bridge import Bridge
from kvrelay.pool.admin.app import make_app
from kvrelay.pool.latency import Latencies
from kvrelay.pool.metrics import PoolMetrics
from kvrelay.pool.traffic import Traffic
from kvrelay.testing.fake_control import FakeControl

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

TOKEN = "admin token"


@pytest.fixture
def pool_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """The loop of a thread of its own, as the pool's is."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join(5)
    loop.close()


@pytest.fixture
def control() -> FakeControl:
    return FakeControl()


@pytest.fixture
def latencies() -> Latencies:
    return Latencies()


@pytest.fixture
async def api(
    control: FakeControl, latencies: Latencies, pool_loop: asyncio.AbstractEventLoop
) -> AsyncIterator[httpx.AsyncClient]:
    """A client with the right token."""
    app = make_app(control, Bridge(pool_loop), PoolMetrics(control, latencies, Traffic()).snapshot, TOKEN)
    transport = httpx.ASGITransport(app)
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with httpx.AsyncClient(transport=transport, base_url="http://pool", headers=headers) as client:
        yield client
