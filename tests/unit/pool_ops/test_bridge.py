"""Between the admin thread and the pool's loop nobody waits without a limit, and nobody queues without one."""

from __future__ import annotations

import asyncio
import threading

import pytest

from kvrelay.admin.bridge import Bridge
from kvrelay.errors import DeadlineError, NotFoundError, PoolUnavailableError


async def test_a_call_runs_in_the_pools_loop_and_its_result_comes_back(pool_loop: asyncio.AbstractEventLoop) -> None:
    async def where() -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    bridge = Bridge(pool_loop)
    assert await bridge.call(threading.get_ident) != threading.get_ident()
    assert await bridge.call(asyncio.get_running_loop) is pool_loop
    assert await where() is not pool_loop


async def test_an_error_is_raised_where_the_call_was_made(pool_loop: asyncio.AbstractEventLoop) -> None:
    def fail() -> None:
        raise NotFoundError("no such thing")

    with pytest.raises(NotFoundError, match="no such thing"):
        await Bridge(pool_loop).call(fail)


async def test_a_pool_that_is_busy_is_not_waited_for_and_what_was_given_up_never_runs(
    pool_loop: asyncio.AbstractEventLoop,
) -> None:
    busy, ran = threading.Event(), threading.Event()
    pool_loop.call_soon_threadsafe(busy.wait, 10)
    bridge = Bridge(pool_loop, timeout_s=0.05)
    with pytest.raises(DeadlineError, match=r"busy for 0\.05 s"):
        await bridge.call(ran.set)
    busy.set()
    await Bridge(pool_loop).call(lambda: None)  # behind the other in the queue
    assert not ran.is_set()


async def test_more_calls_than_are_allowed_are_refused_at_once(pool_loop: asyncio.AbstractEventLoop) -> None:
    busy = threading.Event()
    pool_loop.call_soon_threadsafe(busy.wait, 10)
    bridge = Bridge(pool_loop, max_calls=2)
    waiting = [asyncio.create_task(bridge.call(lambda: 7)) for _ in range(2)]
    await asyncio.sleep(0)  # both have begun
    with pytest.raises(PoolUnavailableError, match="2 admin requests are waiting"):
        await bridge.call(lambda: 8)
    busy.set()
    assert await asyncio.gather(*waiting) == [7, 7]
    assert await bridge.call(lambda: 9) == 9


async def test_between_two_calls_the_pool_comes_to_its_own_work(pool_loop: asyncio.AbstractEventLoop) -> None:
    """1. Four calls wait while the loop is busy. 2. Each finds what the loop was given by the one before it done."""
    busy, order = threading.Event(), list[str]()
    pool_loop.call_soon_threadsafe(busy.wait, 10)
    bridge = Bridge(pool_loop)

    def note(name: str) -> None:
        order.append(name)
        pool_loop.call_soon(order.append, "own work")

    waiting = [asyncio.create_task(bridge.call(lambda name=name: note(name))) for name in "abcd"]  # type: ignore[misc]
    await asyncio.sleep(0)  # all have begun
    busy.set()
    await asyncio.gather(*waiting)
    await bridge.call(lambda: None)
    assert order == ["a", "own work", "b", "own work", "c", "own work", "d", "own work"]


async def test_a_pool_that_has_stopped_is_unavailable() -> None:
    loop = asyncio.new_event_loop()
    loop.close()
    bridge = Bridge(loop)
    for _ in range(20):  # none of them counts as waiting
        with pytest.raises(PoolUnavailableError, match="the pool has stopped"):
            await bridge.call(lambda: None)
