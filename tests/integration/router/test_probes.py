"""Engines are looked at from time to time, off the way of requests."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from kvrelay.errors import PoolUnavailableError
from kvrelay.router import background
from kvrelay.router.core.health import HealthSettings
from kvrelay.router.core.resilience import Resilience
from kvrelay.testing.fake_tickets import FakePool
from kvrelay.testing.raw_http import get, post

if TYPE_CHECKING:
    import pytest

    from kvrelay.router.service import RouterService

OFTEN = Resilience(probe_interval_s=0.02)
ASK = {"prompt": "a", "max_tokens": 2}


async def engines_of(service: RouterService) -> list[dict[str, Any]]:
    views: list[dict[str, Any]] = (await get(service.port, "/health")).json["engines"]
    return views


async def until_down(service: RouterService, name: str, *, down: bool) -> None:
    """Wait for it; asking the router for its health is what lets time pass."""
    async with asyncio.timeout(20):
        while {view["name"]: view["resting"] for view in await engines_of(service)}[name] is not down:
            pass


async def test_an_engine_that_dies_is_passed_over_before_a_request_finds_out(engine: Any, router: Any) -> None:
    prefill, dying, living = await engine(), await engine(), await engine()
    service = await router([prefill], [dying, living], resilience=OFTEN)
    port = dying.port
    await dying.stop()
    await until_down(service, "D0", down=True)
    for _ in range(4):
        answer = await post(service.port, "/v1/completions", ASK)
        assert (answer.status, answer.headers["x-kvrelay-decode"]) == (200, "d1")
    text = (await get(service.port, "/metrics")).body.decode()
    assert 'kvrelay_router_engine_resting{engine="D0",role="decode"} 1.0' in text
    assert "kvrelay_router_engine_failures_total{" not in text
    again = await engine(port=port)
    await until_down(service, "D0", down=False)
    for _ in range(2):
        await post(service.port, "/v1/completions", ASK)
    assert len(again.requests) == 1


async def test_an_engine_whose_health_is_an_error_is_down(engine: Any, router: Any) -> None:
    async def unwell(exchange: Any) -> None:
        exchange.answer(503 if exchange.request.target == "/health" else 200, b"{}")

    prefill, sick, well = await engine(), await engine(default=unwell), await engine()
    service = await router([prefill], [sick, well], resilience=OFTEN)
    await until_down(service, "D0", down=True)
    await post(service.port, "/v1/completions", ASK)
    await post(service.port, "/v1/completions", ASK)
    assert sick.requests == []


async def test_when_all_engines_are_down_by_their_probes_they_are_asked_all_the_same(engine: Any, router: Any) -> None:
    well_but_for_health = await engine()

    async def unwell(exchange: Any) -> None:
        if exchange.request.method == "POST":
            await well_but_for_health.answer_well(exchange)
        else:
            exchange.answer(500, b"")

    decode = await engine(default=unwell)
    service = await router([await engine()], [decode], resilience=OFTEN, health=HealthSettings(failures=1, rest_s=60.0))
    await until_down(service, "D0", down=True)
    assert (await post(service.port, "/v1/completions", ASK)).status == 200


async def test_a_bug_ends_neither_the_probes_of_an_engine_nor_the_care_for_the_pool(
    engine: Any, router: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """1. A probe raises what nobody expects, and so does making a connection. 2. Both go on, and the log says why."""
    monkeypatch.setattr(background, "AGAIN_S", 0.0)
    pool, tries = FakePool(), 0

    async def connect() -> FakePool:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise PoolUnavailableError("not yet")
        if tries == 2:
            raise ValueError("a bug")
        return await pool.connect()

    service = await router([await engine()], [await engine()], resilience=OFTEN, pool=connect)
    probe, probed, (decode,) = service.engines.probe, asyncio.Event(), service.engines.decodes
    bugs = [decode]

    async def buggy(one: Any, *args: Any, **options: Any) -> int:
        if one in bugs:
            bugs.remove(one)
            raise ValueError("a bug")
        status: int = await probe(one, *args, **options)
        if one is decode and not bugs:
            probed.set()
        return status

    monkeypatch.setattr(service.engines, "probe", buggy)
    async with asyncio.timeout(20):
        await probed.wait()
        while "kvrelay_router_pool_up 1.0" not in (await get(service.port, "/metrics")).body.decode():
            pass
    said = [record.getMessage() for record in caplog.records if record.exc_info]
    assert any("the probes of D0" in line for line in said)
    assert any("the connection to the pool" in line for line in said)
