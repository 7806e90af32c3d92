"""Engines are looked at from time to time, off the way of requests."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from kvrelay.router.core.health import HealthSettings
from kvrelay.router.core.resilience import Resilience
from kvrelay.testing.raw_http import get, post

if TYPE_CHECKING:
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
