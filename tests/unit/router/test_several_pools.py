"""Tickets in several pools at once, on pools made of dictionaries."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from kvrelay.errors import NotFoundError, PoolUnavailableError, UnauthorizedError
from kvrelay.router import several_pools
from kvrelay.router.config import pool_addresses
from kvrelay.router.several_pools import SeveralPools
from kvrelay.testing.fake_tickets import FakePool, a_loss
from kvrelay.wire.messages import Engine

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

TOLD = {"handover": "h", "worker": "D0", "attempt": 1}


class Away:
    """A pool that can come and go; each connection to it is a new one."""

    def __init__(self) -> None:
        self.there = True
        self.connections: list[FakePool] = []

    @property
    def now(self) -> FakePool:
        return self.connections[-1]

    async def connect(self) -> FakePool:
        if not self.there:
            raise PoolUnavailableError("nobody listens")
        self.connections.append(FakePool())
        return self.now


class Holding(Away):
    """A pool at which these engines are registered."""

    def __init__(self, *engines: str) -> None:
        super().__init__()
        self.engines = engines

    async def connect(self) -> FakePool:
        pool = await super().connect()
        pool.registered = [Engine(engine=name, role="kv_both", namespace="n", facts={}) for name in self.engines]
        return pool


async def reached(*pools: Away) -> SeveralPools:
    return await SeveralPools([(f"unix:/{at}", pool.connect) for at, pool in enumerate(pools)]).reach()


def run(work: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(20):
            await work()

    asyncio.run(bounded())


def test_a_ticket_is_open_everywhere_until_it_is_ended_everywhere() -> None:
    async def work() -> None:
        one, other = Away(), Away()
        pools = await reached(one, other)
        await pools.open_ticket("h", 60.0)
        assert one.now.open == other.now.open == {"h": 60.0}
        await pools.seal_ticket("h")
        await pools.end_ticket("h")
        for pool in (one.now, other.now):
            assert (pool.open, pool.sealed, pool.ended) == ({}, ["h"], ["h"])
        with pytest.raises(NotFoundError):
            await pools.collect("h", 0.01)
        await pools.close()
        assert one.now.closed
        assert other.now.closed

    run(work)


def test_notes_come_from_whichever_pool_has_one() -> None:
    async def work() -> None:
        one, other = Away(), Away()
        pools = await reached(one, other)
        await pools.open_ticket("h", 60.0)
        assert await pools.collect("h", 0.01) == []
        for pool in (other, one, other):
            pool.now.post(a_loss(TOLD))
            assert len(await pools.collect("h", 5.0)) == 1
        await pools.end_ticket("h")
        await pools.close()

    run(work)


def test_one_that_is_gone_is_left_out_and_found_again() -> None:
    async def work() -> None:
        one, other = Away(), Away()
        pools = await reached(one, other)
        await pools.open_ticket("before", 60.0)
        one.there, one.now.closed = False, True
        assert not pools.closed
        await pools.open_ticket("h", 60.0)
        other.now.post(a_loss(TOLD))
        assert len(await pools.collect("h", 5.0)) == 1
        await pools.end_ticket("before")
        assert other.now.ended == ["before"]
        assert await pools.stat() == {"pools": 1}
        one.there = True
        assert await pools.stat() == {"pools": 2}
        await pools.open_ticket("after", 60.0)
        assert one.now.open == {"after": 60.0}
        await pools.close()

    run(work)


def test_without_any_there_is_none() -> None:
    async def work() -> None:
        one, other = Away(), Away()
        one.there = False
        pools = await reached(one, other)
        await pools.open_ticket("h", 60.0)
        other.there, other.now.closed = False, True
        assert pools.closed
        for call in (pools.stat(), pools.engines(), pools.open_ticket("i", 60.0)):
            with pytest.raises(PoolUnavailableError):
                await call
        with pytest.raises(NotFoundError):
            await pools.collect("h", 5.0)  # nobody can say anything any more
        with pytest.raises(PoolUnavailableError):
            await reached(one, other)

    run(work)


def test_one_that_is_slow_holds_up_one_request_and_is_asked_again_when_it_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(several_pools, "OPEN_S", 0.01)

    async def work() -> None:
        one, other = Away(), Away()
        pools = await reached(one, other)
        one.now.hold = asyncio.Event()
        await pools.open_ticket("a", 60.0)
        await pools.open_ticket("b", 60.0)
        assert one.now.num_asked == 1
        assert set(other.now.open) == {"a", "b"}
        await pools.end_ticket("a")
        one.now.hold = None
        await pools.stat()
        await pools.open_ticket("c", 60.0)
        assert set(one.now.open) == {"c"}
        await pools.close()

    run(work)


def test_a_pool_that_refuses_is_no_reason_to_do_without_the_others() -> None:
    async def work() -> None:
        async def refuse() -> Any:
            raise UnauthorizedError("another token")

        other = Away()
        pools = await SeveralPools([("unix:/0", refuse), ("unix:/1", other.connect)]).reach()
        await pools.open_ticket("h", 60.0)
        assert other.now.open

    run(work)


def test_engines_are_counted_once_and_prefixes_where_they_are_longest() -> None:
    async def work() -> None:
        one, other = Holding("P0", "D0"), Holding("P1", "D0")
        pools = await reached(one, other)
        assert sorted(engine.engine for engine in await pools.engines()) == ["D0", "P0", "P1"]
        other.now.held = {b"a", b"b"}
        assert (await pools.count_prefix([b"a", b"b", b"c"])).sealed == 2

    run(work)


def test_engines_are_orphans_while_their_own_pool_is_gone() -> None:
    async def work() -> None:
        one, other = Holding("P0", "D0"), Holding("P1", "D0")
        pools = await reached(one, other)
        await pools.engines()
        assert pools.orphans == frozenset()
        one.there, one.now.closed = False, True
        assert pools.orphans == {"P0"}
        await pools.engines()
        assert pools.orphans == {"P0"}
        one.there = True
        await pools.stat()
        assert pools.orphans == frozenset()

    run(work)


def test_addresses_are_joined_by_commas_that_begin_another() -> None:
    assert pool_addresses("unix:/a,b/pool.sock") == ["unix:/a,b/pool.sock"]
    assert pool_addresses("unix:/a.sock,tcp:h:1,tls:h:2?ca=f") == ["unix:/a.sock", "tcp:h:1", "tls:h:2?ca=f"]
