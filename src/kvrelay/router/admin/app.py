"""The routes. They run in the admin thread; whatever they ask of the router goes over the `Bridge`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Depends, Query
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST

from kvrelay.admin.answers import bearer
from kvrelay.admin.app import new_app, probes
from kvrelay.router.admin import models
from kvrelay.router.core.fleet import Role, parse_address
from kvrelay.router.core.kv.settings import parse_endpoints
from kvrelay.router.core.router_state import combined
from kvrelay.wire.limits import MAX_LEASE_S

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping, Sequence

    from fastapi import FastAPI

    from kvrelay.admin.bridge import Bridge
    from kvrelay.router.core.fleet import Engine
    from kvrelay.router.core.router_state import EngineStatus
    from kvrelay.router.reloading import Applied
    from kvrelay.router.service import RouterService


def make_app(
    service: RouterService, bridge: Bridge, reload: Callable[[], Coroutine[Any, Any, Applied]], token: str | None
) -> FastAPI:
    """The API. ``reload``: see `Serving.reload`; it runs in the router's loop."""
    app = new_app(
        "router",
        "Looks at the engines of a running router and changes who they are.",
        (400, 401, 404, 409, 422, 503, 504),
    )
    app.include_router(
        probes(
            bridge,
            lambda: service.draining,
            ready="Whether the router takes requests: 503 once it is told to stop.",
            refusal="the router is draining: it ends soon",
        )
    )
    guarded: list[Any] = [Depends(bearer(token))] if token is not None else []
    app.include_router(_looking(service, bridge), dependencies=guarded)
    app.include_router(_managing(service, bridge, reload), dependencies=guarded)
    return app


def _looking(service: RouterService, bridge: Bridge) -> APIRouter:
    router = APIRouter(tags=["looking"])

    @router.get("/engines")
    async def engines() -> models.Engines:
        """Everybody, in the order in which they joined."""
        statuses = await bridge.wait(service.worker_sync.engine_statuses)
        views = await bridge.call(lambda: [_view(engine, statuses) for engine in service.fleet.engines])
        return models.Engines(engines=views)

    @router.get("/engines/{name}")
    async def engine(name: str) -> models.EngineView:
        """One of them; 404 once it has left."""
        statuses = await bridge.wait(service.worker_sync.engine_statuses)
        return await bridge.call(lambda: _view(service.fleet.find(name), statuses))

    @router.get("/metrics", response_class=Response, responses={200: {"content": {CONTENT_TYPE_LATEST: {}}}})
    async def scrape() -> Response:
        """As the router's own /metrics."""
        return Response(await bridge.wait(service.render_metrics), media_type=CONTENT_TYPE_LATEST)

    return router


def _managing(service: RouterService, bridge: Bridge, reload: Callable[[], Coroutine[Any, Any, Applied]]) -> APIRouter:
    router = APIRouter(tags=["managing"])
    fleet = service.fleet

    async def change(work: Callable[[], Engine]) -> models.EngineView:
        """Done by this worker, then by all others."""
        engine = await bridge.call(work)
        await bridge.wait(service.worker_sync.settled)
        statuses = await bridge.wait(service.worker_sync.engine_statuses)
        return await bridge.call(lambda: _view(engine, statuses))

    @router.post("/engines", status_code=201)
    async def add(new: models.NewEngine) -> models.EngineView:
        """Let an engine join: it is asked from now on."""
        address = parse_address(new.url)
        kv_events = None if new.kv_events is None else parse_endpoints(new.kv_events)
        return await change(lambda: fleet.add(Role(new.role), address, new.name, kv_events=kv_events))

    @router.delete("/engines/{name}", status_code=202)
    async def remove(
        name: str,
        timeout_s: Annotated[
            float | None,
            Query(ge=0, le=MAX_LEASE_S, description="what is not over then is cut off; --drain-timeout if not given"),
        ] = None,
    ) -> models.EngineView:
        """Let an engine go once nobody needs it: its requests are over, and what it prefilled has been taken."""
        given_s = service.drain_timeout_s if timeout_s is None else timeout_s
        return await change(lambda: fleet.remove(name, given_s))

    @router.post("/engines/{name}/drain")
    async def drain(name: str) -> models.EngineView:
        """Send an engine no new requests."""
        return await change(lambda: fleet.drain(name))

    @router.delete("/engines/{name}/drain")
    async def resume(name: str) -> models.EngineView:
        """Send it requests again; one that is about to leave stays."""
        return await change(lambda: fleet.resume(name))

    @router.put("/engines/{name}/role")
    async def set_role(name: str, new: models.NewRole) -> models.EngineView:
        """Ask an engine for the other thing from now on; what is under way ends as it began."""
        return await change(lambda: fleet.set_role(name, Role(new.role)))

    @router.put("/engines/{name}/kv-events")
    async def set_kv_events(name: str, new: models.KvEvents) -> models.EngineView:
        """Listen to what an engine publishes there, and nowhere else; what was heard elsewhere is forgotten."""
        kv_events = parse_endpoints(new.kv_events)
        return await change(lambda: fleet.set_kv_events(name, kv_events))

    @router.post("/reload")
    async def reload_configuration() -> models.Reloaded:
        """Read the configuration file again and go over to it, as SIGHUP does: all of it, or nothing."""
        applied = await bridge.wait(reload)
        await bridge.wait(service.worker_sync.settled)
        fleet = applied.fleet
        return models.Reloaded(
            added=fleet.added, kept=fleet.kept, moved=fleet.moved, leaving=fleet.leaving, settings=applied.settings
        )

    return router


def _view(engine: Engine, statuses: Sequence[Mapping[str, EngineStatus]]) -> models.EngineView:
    """``statuses``: each worker's; an engine that has left since is shown as nobody needs it."""
    status = combined(known[engine.name] for known in statuses if engine.name in known)
    return models.EngineView(
        name=engine.name,
        role=engine.role.value,
        url=engine.address.url,
        state="leaving" if engine.leaving else "draining" if engine.draining else "serving",
        resting=status.resting,
        down=status.down,
        failures=status.failures,
        in_flight=status.in_flight,
        handovers=status.handovers,
        configured=engine.configured,
        kv_events=[str(where) for where in engine.kv_events],
    )
