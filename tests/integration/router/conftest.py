"""A router on a real socket in front of fake engines, in one uvloop event loop that may not be blocked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
import uvloop
from blockbuster import BlockBuster, blockbuster_ctx

from kvrelay.router.config import RouterSettings, check_settings
from kvrelay.router.core.resilience import Resilience
from kvrelay.router.core.routing import RoutingSettings
from kvrelay.router.service import RouterService
from kvrelay.testing.fake_engine import FakeEngine
from kvrelay.testing.fake_tickets import FakePool
from kvrelay.testing.raw_http import Answer, get, post

if TYPE_CHECKING:
    from kvrelay.router.core.health import HealthSettings
    from kvrelay.router.http.server import Limits

StartEngine = Callable[..., Awaitable[FakeEngine]]
StartRouter = Callable[..., Awaitable[RouterService]]


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture(autouse=True)
def no_blocking() -> Iterator[BlockBuster]:
    with blockbuster_ctx("kvrelay") as buster:
        yield buster


@pytest.fixture
async def fakes() -> AsyncIterator[list[FakeEngine]]:
    """The engines of this test."""
    engines: list[FakeEngine] = []
    yield engines
    for engine in engines:
        await engine.stop()


@pytest.fixture
async def engine(fakes: list[FakeEngine]) -> StartEngine:
    """Start a fake engine."""

    async def start(**options: Any) -> FakeEngine:
        fakes.append(await FakeEngine.start(**options))
        return fakes[-1]

    return start


@pytest.fixture
async def router(fakes: list[FakeEngine]) -> AsyncIterator[StartRouter]:
    """Start a router. After the test nothing of it may be left: no task, no connection to an engine."""
    before = asyncio.all_tasks()
    started: list[RouterService] = []

    async def start(
        prefill: list[FakeEngine] | list[str],
        decode: list[FakeEngine] | list[str],
        *,
        pool: Callable[[], Awaitable[Any]] | None = None,
        limits: Limits | None = None,
        health: HealthSettings | None = None,
        **settings: Any,
    ) -> RouterService:
        urls = [[e if isinstance(e, str) else e.url for e in role] for role in (prefill, decode)]
        address = None if pool is None else "unix:given"
        options = {
            "drain_timeout_s": 0.2,
            "ticket_timeout_s": 20.0,
            "pool": address,
            "resilience": Resilience(probe_interval_s=0.0),
            **settings,
        }
        config = await asyncio.to_thread(
            check_settings, RouterSettings(prefill=urls[0], decode=urls[1], port=0, **options)
        )
        service = RouterService(config, pool, limits=limits, health=health)
        await service.start()
        started.append(service)
        return service

    yield start
    for service in started:
        await service.stop()
    for fake in fakes:
        await fake.left_alone()
    left = {task for task in asyncio.all_tasks() - before if _is_ours(task)}
    if ending := {task for task in left if task.cancelling()}:
        await asyncio.wait(ending, timeout=20)
    assert not [task for task in left if not task.done()]


def _is_ours(task: asyncio.Task[Any]) -> bool:
    code = getattr(task.get_coro(), "cr_code", None)
    return code is not None and "/kvrelay/" in code.co_filename


@pytest.fixture
async def pair(engine: StartEngine, router: StartRouter) -> tuple[FakeEngine, FakeEngine, int]:
    """One P, one D, and the port of a router in front of them."""
    prefill, decode = await engine(), await engine()
    service = await router([prefill], [decode])
    return prefill, decode, service.port


class Fleet:
    """Engines of both roles, a pool and a router."""

    def __init__(
        self, prefills: list[FakeEngine], decodes: list[FakeEngine], pool: FakePool, service: RouterService
    ) -> None:
        self.prefills, self.decodes, self.pool, self.service = prefills, decodes, pool, service

    @property
    def port(self) -> int:
        return self.service.port

    @property
    def routing(self) -> Any:
        return self.service._disaggregator.routing

    async def ask(
        self, prompt: object = "ten words " * 4, headers: str = "", path: str = "/v1/completions", **more: Any
    ) -> Answer:
        return await post(self.port, path, {"prompt": prompt, "model": "m", "max_tokens": 2, **more}, headers=headers)

    async def record(self, answer: Answer) -> dict[str, Any]:
        return (await get(self.port, f"/kvrelay/handovers/{answer.headers['x-kvrelay-handover']}")).json

    async def metric(self, line: str) -> bool:
        return line in (await get(self.port, "/metrics")).body.decode()

    @property
    def asked(self) -> tuple[list[int], list[int]]:
        """How many requests each engine got."""
        prefills = [len(engine.requests) for engine in self.prefills]
        return prefills, [len(engine.requests) for engine in self.decodes]


@pytest.fixture
async def fleet_of(engine: StartEngine, router: StartRouter) -> Any:
    async def begin(
        prefills: int = 1, decodes: int = 1, *, pool: bool = False, settings: Any = None, **routing: Any
    ) -> Fleet:
        p, d, fake = [await engine() for _ in range(prefills)], [await engine() for _ in range(decodes)], FakePool()
        given = {"pool": fake.connect} if pool else {}
        service = await router(p, d, routing=RoutingSettings(**routing), **given, **(settings or {}))
        return Fleet(p, d, fake, service)

    return begin
