"""Several workers have one fleet: the first one's, whoever comes late, goes, or does not hear."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from kvrelay.errors import ConflictError, DeadlineError, NotFoundError
from kvrelay.router import worker_peers, worker_sync
from kvrelay.router.config import RouterSettings, check_settings
from kvrelay.router.core.fleet import Role, parse_address
from kvrelay.router.core.resilience import Resilience
from kvrelay.router.saved_state import SavedState
from kvrelay.router.service import RouterService
from kvrelay.router.worker_peers import WorkerGroup
from kvrelay.router.workers import Seat, _listen
from kvrelay.testing.fake_engine import DONE, stream
from kvrelay.testing.raw_http import RawClient

if TYPE_CHECKING:
    from kvrelay.testing.fake_engine import FakeEngine

FIRST = b'data: {"choices":[{"text":"a"}]}\n\n'
STREAM = {"prompt": "a", "max_tokens": 2, "stream": True}
LONG_S = 60.0
Start = Callable[..., Awaitable[RouterService]]


@pytest.fixture
async def engines(engine: Any) -> list[FakeEngine]:
    return [await engine() for _ in range(4)]


@pytest.fixture
async def worker(engines: list[FakeEngine], monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Start]:
    """Start the router's worker of a number, of two, in front of the first two engines, or with other ``decodes``."""
    monkeypatch.setattr(worker_sync, "AGAIN_S", 0.01)
    group, saved, told = WorkerGroup.new(), SavedState.new(), os.open(os.devnull, os.O_WRONLY)
    started: list[RouterService] = []

    async def start(number: int, *decodes: FakeEngine) -> RouterService:
        decode = [engine.url for engine in decodes or engines[1:2]]
        settings = RouterSettings(
            prefill=[engines[0].url], decode=decode, port=0, drain_timeout_s=0.2,
            resilience=Resilience(probe_interval_s=0.0), workers=2,
        )  # fmt: skip
        seat = Seat(number, 2, _listen("127.0.0.1", 0), group, saved, told)
        service = RouterService(await asyncio.to_thread(check_settings, settings), None, seat=seat)
        await service.start()
        started.append(service)
        return service

    yield start
    for service in started:
        with suppress(Exception):
            await service.stop()
    os.close(told)
    saved.close()


def told_of(service: RouterService) -> dict[str, tuple[str, str, str]]:
    return {
        engine.name: (engine.role, engine.address.url, "draining" if engine.draining else "serving")
        for engine in service.fleet.engines
    }


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not true():  # noqa: ASYNC110 - what changes is told to nobody here
            await asyncio.sleep(0.01)


async def test_what_changes_at_the_first_worker_changes_at_all(engines: list[FakeEngine], worker: Start) -> None:
    first, second = await worker(0), await worker(1)
    fleet = first.fleet
    fleet.add(Role.DECODE, parse_address(engines[2].url))
    fleet.add(Role.PREFILL, parse_address(engines[3].url), "spare")
    await first.worker_sync.settled()
    assert told_of(second) == told_of(first)
    assert set(told_of(second)) == {"P0", "D0", "D1", "spare"}
    fleet.drain("D0")
    fleet.set_role("spare", Role.DECODE)
    await first.worker_sync.settled()
    assert told_of(second) == told_of(first)
    assert told_of(second)["D0"][2] == "draining"
    fleet.resume("D0")
    fleet.set_role("D0", Role.PREFILL)
    fleet.remove("P0", 0.0)
    await until(lambda: "P0" not in told_of(first))
    await first.worker_sync.settled()
    assert told_of(second) == told_of(first)
    applied = first.apply(replace(first.config, prefills=(), decode_timeout_s=33.0))
    assert applied.settings == ["prefill", "decode_timeout"]
    await until(lambda: told_of(second) == told_of(first))
    assert second.config.decode_timeout_s == second._disaggregator.timeouts.decode_s == 33.0
    assert second.fleet.numbers == first.fleet.numbers


async def test_roles_may_be_exchanged_in_one_go(engines: list[FakeEngine], worker: Start) -> None:
    first, second = await worker(0), await worker(1)
    config = first.config
    first.apply(replace(config, prefills=config.decodes, decodes=config.prefills))
    await first.worker_sync.settled()
    assert told_of(second) == told_of(first)
    assert told_of(second)["P0"][0] == "decode"
    assert engines


async def test_an_engine_has_not_left_while_any_worker_needs_it(engines: list[FakeEngine], worker: Start) -> None:
    """1. The second worker has a stream on D1. 2. The first removes D1, and has nothing there itself: D1 stays, and
    its address is not free. 3. The stream ends: D1 is gone everywhere.
    """
    first, second = await worker(0), await worker(1)
    url = parse_address(engines[2].url)
    first.fleet.add(Role.DECODE, url)
    await first.worker_sync.settled()
    second.fleet.drain("D0")  # so that the second's stream goes to D1
    gate = asyncio.Semaphore(1)
    engines[2].script(stream([FIRST, DONE], gate=gate))
    async with await RawClient.open(second.port) as client:
        client.post("/v1/completions", STREAM)
        await client.head()
        assert await client.chunk() == FIRST
        first.fleet.remove("D1", LONG_S)
        await first.worker_sync.settled()
        assert second.fleet.find("D1").leaving
        seen = [duties["D1"].in_flight for duties in await first.worker_sync.engine_statuses()]
        assert seen == [0, 1]
        with pytest.raises(ConflictError, match="which is leaving"):
            first.fleet.add(Role.DECODE, url)
        gate.release()
        assert await client.chunk() == DONE
        assert await client.chunk() == b""
    await until(lambda: not any("D1" in told_of(service) for service in (first, second)))
    assert first.fleet.add(Role.DECODE, url).name == "D2"


async def test_who_comes_later_stands_as_the_others_do(engines: list[FakeEngine], worker: Start) -> None:
    first = await worker(0)
    first.fleet.add(Role.DECODE, parse_address(engines[2].url))
    await first.worker_sync.settled()  # nobody else is there
    second = await worker(1)
    assert told_of(second) == told_of(first)
    await first.stop()
    successor = await worker(0)
    assert told_of(successor) == told_of(second)
    successor.fleet.add(Role.DECODE, parse_address(engines[3].url))
    await successor.worker_sync.settled()
    assert set(told_of(second)) == {"P0", "D0", "D1", "D2"}
    with pytest.raises(NotFoundError):
        second.fleet.find("D3")


async def test_who_comes_later_with_another_configuration_stands_as_the_others_do(
    engines: list[FakeEngine], worker: Start
) -> None:
    """Names are by place in the configuration at first: there D0 and D1 are other engines than here."""
    first = await worker(0)
    first.fleet.add(Role.DECODE, parse_address(engines[2].url))
    first.fleet.remove("D0", 0.0)
    await until(lambda: set(told_of(first)) == {"P0", "D1"})
    second = await worker(1, engines[3], engines[1], engines[2])
    assert told_of(second) == told_of(first)
    first.fleet.add(Role.DECODE, parse_address(engines[1].url))
    await first.worker_sync.settled()
    assert told_of(second) == told_of(first)
    assert set(told_of(second)) == {"P0", "D1", "D2"}


async def test_who_comes_once_all_are_gone_stands_as_they_did(engines: list[FakeEngine], worker: Start) -> None:
    first, second = await worker(0), await worker(1)
    first.fleet.add(Role.DECODE, parse_address(engines[2].url))
    first.fleet.drain("D0")
    await first.worker_sync.settled()
    stood = told_of(first)
    await first.stop()
    await second.stop()
    second, first = await worker(1), await worker(0)
    assert told_of(second) == told_of(first) == stood
    first.fleet.add(Role.DECODE, parse_address(engines[3].url))
    await first.worker_sync.settled()
    assert set(told_of(second)) == {"P0", "D0", "D1", "D2"}


async def test_what_the_first_worker_had_told_nobody_before_it_ended_is_told_by_its_successor(
    engines: list[FakeEngine], worker: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = await worker(0), await worker(1)
    await first.worker_sync.settled()
    with monkeypatch.context() as deaf:
        deaf.setattr(second.worker_sync, "told", lambda _: b"not heard")
        first.fleet.add(Role.DECODE, parse_address(engines[2].url))
        await first.stop()
    await worker(0)
    await until(lambda: "D1" in told_of(second))


async def test_a_worker_that_does_not_hear_is_named_and_told_again(
    engines: list[FakeEngine], worker: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_peers, "WAIT_S", 0.1)
    first, second = await worker(0), await worker(1)
    await first.worker_sync.settled()
    hearing = second.worker_sync.told
    monkeypatch.setattr(second.worker_sync, "told", lambda _: b"I would rather not")
    first.fleet.add(Role.DECODE, parse_address(engines[2].url))
    with pytest.raises(DeadlineError, match="not yet by all workers: 1 did not"):
        await first.worker_sync.settled()
    assert "D1" not in told_of(second)
    monkeypatch.setattr(second.worker_sync, "told", hearing)
    await until(lambda: "D1" in told_of(second))
    await first.worker_sync.settled()


async def test_an_address_that_one_worker_has_not_let_go_is_taken_up_later(
    engines: list[FakeEngine], worker: Start
) -> None:
    """1. The second worker alone has an engine at an address, with a stream. 2. The first has another engine there:
    the second cannot have it yet, and is told again. 3. The stream ends: it has.
    """
    first, second = await worker(0), await worker(1)
    await first.worker_sync.settled()
    url = parse_address(engines[2].url)
    second.fleet.add(Role.DECODE, url, "old")
    second.fleet.drain("D0")
    gate = asyncio.Semaphore(1)
    engines[2].script(stream([FIRST, DONE], gate=gate))
    async with await RawClient.open(second.port) as client:
        client.post("/v1/completions", STREAM)
        await client.head()
        assert await client.chunk() == FIRST
        second.fleet.resume("D0")
        second.fleet.remove("old", LONG_S)
        first.fleet.add(Role.DECODE, url, "new")
        with pytest.raises(DeadlineError, match="workers: 1"):
            await first.worker_sync.settled()
        gate.release()
        assert await client.chunk() == DONE
        assert await client.chunk() == b""
    await until(lambda: "new" in told_of(second) and "old" not in told_of(second))
