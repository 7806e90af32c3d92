"""Engines come, drain, change their role and go while requests are under way."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvrelay.errors import ConflictError
from kvrelay.router.core.fleet import Role, parse_address
from kvrelay.testing.fake_engine import DONE, FakeEngine, hang, stream
from kvrelay.testing.raw_http import RawClient, get, post

ASK = {"prompt": "a", "max_tokens": 2}
STREAM = {**ASK, "stream": True}
FIRST = b'data: {"choices":[{"text":"a"}]}\n\n'
LONG_S = 60.0


async def decodes_of(port: int, count: int) -> list[str]:
    return [(await post(port, "/v1/completions", ASK)).headers["x-kvrelay-decode"] for _ in range(count)]


async def names_of(port: int) -> list[str]:
    return [view["name"] for view in (await get(port, "/health")).json["engines"]]


async def until_gone(port: int, name: str) -> None:
    """Wait for it; asking the router is what lets time pass."""
    async with asyncio.timeout(20):
        while name in await names_of(port):
            pass


async def series_of(port: int, name: str) -> list[str]:
    lines = (await get(port, "/metrics")).body.decode().splitlines()
    return [line for line in lines if f'="{name}"' in line]


async def test_an_engine_that_joins_is_asked_and_one_that_drains_is_not(engine: Any, router: Any) -> None:
    prefill, first, second = await engine(), await engine(), await engine()
    service = await router([prefill], [first])
    service.fleet.add(Role.DECODE, parse_address(second.url))
    assert sorted(await decodes_of(service.port, 2)) == ["d0", "d1"]
    service.fleet.drain("D0")
    assert await decodes_of(service.port, 3) == ["d1"] * 3
    (drained,) = [view for view in (await get(service.port, "/health")).json["engines"] if view["name"] == "D0"]
    assert drained["draining"]
    service.fleet.resume("D0")
    assert "d0" in await decodes_of(service.port, 2)


async def test_an_engine_that_is_removed_ends_what_it_has_begun(engine: Any, router: Any) -> None:
    """1. A stream is under way on D0. 2. It is removed: nothing new goes there. 3. The stream ends; D0 is gone, and
    with it its series and connections.
    """
    prefill, going, staying = await engine(), await engine(), await engine()
    gate = asyncio.Semaphore(1)
    going.script(stream([FIRST, DONE], gate=gate))
    service = await router([prefill], [going, staying])
    async with await RawClient.open(service.port) as client:
        client.post("/v1/completions", STREAM)
        await client.head()
        service.fleet.remove("D0", LONG_S)
        assert await decodes_of(service.port, 3) == ["d1"] * 3
        assert "D0" in await names_of(service.port)
        assert await client.chunk() == FIRST
        gate.release()
        assert await client.chunk() == DONE
        assert await client.chunk() == b""
    await until_gone(service.port, "D0")
    await going.left_alone()
    assert await series_of(service.port, "D0") == []
    assert await series_of(service.port, "D1")


async def test_what_is_not_over_at_the_deadline_is_cut_off_and_told(engine: Any, router: Any) -> None:
    prefill, going, staying = await engine(), await engine(), await engine()
    going.script(stream([FIRST], ending="hang"))
    service = await router([prefill], [going, staying])
    async with await RawClient.open(service.port) as client:
        client.post("/v1/completions", STREAM)
        await client.head()
        assert await client.chunk() == FIRST
        service.fleet.remove("D0", 0.1)
        assert b'"code":"connection_lost"' in await client.chunk()
    await until_gone(service.port, "D0")
    assert await series_of(service.port, "D0") == []


async def test_a_request_that_is_cut_off_before_its_first_byte_is_answered_by_another_engine(
    engine: Any, router: Any
) -> None:
    prefill, going, staying = await engine(), await engine(), await engine()
    going.script(hang())
    service = await router([prefill], [going, staying])
    asked = asyncio.create_task(post(service.port, "/v1/completions", ASK))
    await going.asked(1)
    service.fleet.remove("D0", 0.0)
    answer = await asked
    assert (answer.status, answer.headers["x-kvrelay-decode"]) == (200, "d1")
    await until_gone(service.port, "D0")


async def test_a_p_is_not_gone_before_the_d_that_reads_from_it_has_begun(engine: Any, router: Any) -> None:
    """1. P has prefilled; D has been asked, and reads. 2. P is removed: it stays. 3. D begins to answer: P goes."""
    going, staying, decode = await engine(), await engine(), await engine()
    going.carried = {"remote_block_ids": [[1]]}
    gate = asyncio.Semaphore(0)
    decode.script(stream([FIRST, DONE], gate=gate))
    service = await router([going, staying], [decode], connector="nixl")
    async with await RawClient.open(service.port) as client:
        client.post("/v1/completions", STREAM)
        await decode.asked(1)
        removed = service.fleet.remove("P0", LONG_S)
        assert (removed.load.in_flight, removed.load.handovers) == (0, 1)
        assert "P0" in await names_of(service.port)
        assert decode.requests[0].json["kv_transfer_params"] == going.carried
        gate.release()
        await client.head()
        await until_gone(service.port, "P0")
        gate.release()
        assert await client.chunk() == FIRST
        assert await client.chunk() == DONE


@pytest.mark.parametrize("leaving", ["client", "engine"])
async def test_hand_overs_that_come_to_nothing_hold_no_p(engine: Any, router: Any, leaving: str) -> None:
    prefill, decode = await engine(), await engine()
    decode.script(hang())
    service = await router([prefill], [decode])
    async with await RawClient.open(service.port) as client:
        client.post("/v1/completions", ASK)
        await decode.asked(1)
        if leaving == "client":
            client.abort()
        else:
            await decode.stop()
            assert (await client.head())[0] == 502
        service.fleet.remove("P0", LONG_S)
        await until_gone(service.port, "P0")


async def test_an_engine_changes_its_role_and_back(engine: Any, router: Any) -> None:
    first, second, third = await engine(), await engine(), await engine()
    service = await router([first], [second, third])
    service.fleet.set_role("D0", Role.PREFILL)
    prefills = [(await post(service.port, "/v1/completions", ASK)).headers["x-kvrelay-prefill"] for _ in range(4)]
    assert sorted(prefills) == ["d0", "d0", "p0", "p0"]
    assert await decodes_of(service.port, 2) == ["d1"] * 2
    assert not [line for line in await series_of(service.port, "D0") if 'role="decode"' in line]
    service.fleet.set_role("D0", Role.DECODE)
    assert sorted(await decodes_of(service.port, 2)) == ["d0", "d1"]
    service.fleet.set_role("D1", Role.PREFILL)
    with pytest.raises(ConflictError):
        service.fleet.set_role("D0", Role.PREFILL)


async def test_a_leg_under_way_ends_as_it_began_when_its_engine_changes_role(engine: Any, router: Any) -> None:
    prefill, moving, staying = await engine(), await engine(), await engine()
    gate = asyncio.Semaphore(1)
    moving.script(stream([FIRST, DONE], gate=gate))
    service = await router([prefill], [moving, staying])
    async with await RawClient.open(service.port) as client:
        client.post("/v1/completions", STREAM)
        await client.head()
        moved = service.fleet.set_role("D0", Role.PREFILL)
        assert moved.load.in_flight == 1
        assert await client.chunk() == FIRST
        gate.release()
        assert await client.chunk() == DONE
        assert await client.chunk() == b""
    text = (await get(service.port, "/metrics")).body.decode()
    assert 'kvrelay_router_in_flight{role="decode"} 0.0' in text
    assert 'kvrelay_router_in_flight{role="prefill"} 0.0' in text
    assert moved.load.idle


async def test_engines_come_and_go_under_load_and_no_request_is_lost(engine: Any, router: Any) -> None:
    """Clients keep asking while each engine in turn is removed and comes back under another name."""
    fakes: list[FakeEngine] = [await engine() for _ in range(5)]
    service = await router(fakes[:2], fakes[2:])
    statuses: list[int] = []
    ended = asyncio.Event()

    async def keep_asking() -> None:
        while not ended.is_set():
            statuses.append((await post(service.port, "/v1/completions", STREAM)).status)

    clients = [asyncio.create_task(keep_asking()) for _ in range(4)]
    for _ in range(3):
        for before in service.fleet.engines:
            service.fleet.remove(before.name, LONG_S)
            await until_gone(service.port, before.name)
            service.fleet.add(before.role, before.address)
    ended.set()
    await asyncio.gather(*clients)
    assert len(statuses) >= len(clients)
    assert set(statuses) == {200}
    assert all(known.load.idle for known in service.fleet.engines)
