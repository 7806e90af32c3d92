"""The admin API's routes. They run in the admin thread; whatever they ask of the pool goes over the `Bridge`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Path, Query
from fastapi.responses import Response
from msgspec.structs import asdict
from prometheus_client import CONTENT_TYPE_LATEST

from kvrelay.admin.answers import bearer
from kvrelay.admin.app import new_app, probes
from kvrelay.errors import NotFoundError
from kvrelay.pool.admin import models
from kvrelay.pool.core.pool import DEFAULT_TENANT
from kvrelay.wire.limits import MAX_KEY_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastapi import FastAPI

    from kvrelay.admin.bridge import Bridge
    from kvrelay.pool.admin.control import Control

MAX_PAGE = 512
"""Objects in an answer: some milliseconds' work, between which data requests are served."""
Hex = Annotated[str, Path(pattern=r"^([0-9a-fA-F]{2})+$", max_length=2 * MAX_KEY_BYTES, description="hexadecimal")]
TenantName = Annotated[str, Query(min_length=1, max_length=64, description="a tenant's name")]


def make_app(
    control: Control, bridge: Bridge, metrics: Callable[[], Callable[[], bytes]], token: str | None
) -> FastAPI:
    """The API. ``metrics`` is called in the pool's loop, what it returns then outside of it."""
    app = new_app(
        "pool",
        "Looks into a running pool and manages it. Keys are hexadecimal, sizes are bytes.",
        (401, 404, 422, 503, 504),
    )
    app.include_router(
        probes(
            bridge,
            lambda: control.draining,
            ready="Whether the pool takes new objects: 503 while it drains.",
            refusal="the pool is draining: it takes no new objects",
        )
    )
    guarded: list[Any] = [Depends(bearer(token))] if token is not None else []
    app.include_router(_looking(control, bridge, metrics), dependencies=guarded)
    app.include_router(_managing(control, bridge), dependencies=guarded)
    return app


def _looking(control: Control, bridge: Bridge, metrics: Callable[[], Callable[[], bytes]]) -> APIRouter:
    router = APIRouter(tags=["looking"])

    @router.get("/stat")
    async def stat() -> models.Stat:
        """Gauges and counters."""
        return models.Stat(values=dict(await bridge.call(control.stats)))

    @router.get("/metrics", response_class=Response, responses={200: {"content": {CONTENT_TYPE_LATEST: {}}}})
    async def scrape() -> Response:
        """The same and more, for Prometheus."""
        render = await bridge.call(metrics)
        return Response(render(), media_type=CONTENT_TYPE_LATEST)

    @router.get("/objects", response_model=models.ObjectPage)
    async def objects(
        tenant: TenantName = DEFAULT_TENANT,
        cursor: Annotated[int, Query(ge=0, lt=1 << 62, description="0: the first page")] = 0,
        limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 256,
        prefix: Annotated[
            str, Query(pattern=r"^([0-9a-fA-F]{2})*$", max_length=2 * MAX_KEY_BYTES, description="of keys, hexadecimal")
        ] = "",
    ) -> Response:
        """A page of a tenant's objects, in no order. It may be short, even empty, before the last."""
        wanted = bytes.fromhex(prefix)
        page = await bridge.call(lambda: control.objects(tenant, cursor, limit, wanted))
        views = [
            {
                "key": o.key.hex(),
                "size_bytes": o.size,
                "state": o.state,
                "tier": o.tier,
                "pins": o.pins,
                "ttl_s": o.ttl_s,
            }
            for o in page.objects
        ]
        # encoded here: FastAPI would check each of them again, with the interpreter's lock in its hands
        return Response(msgspec.json.encode({"objects": views, "cursor": page.cursor}), media_type="application/json")

    @router.get("/tenants")
    async def tenants() -> models.Tenants:
        """Every tenant there is, and what it holds."""
        found = await bridge.call(control.tenants)
        return models.Tenants(
            tenants=[
                models.Tenant(
                    name=t.name,
                    objects=t.objects,
                    used_bytes=t.used_bytes,
                    connections=t.connections,
                    shm=t.shm,
                    **asdict(t.quota),
                )
                for t in found
            ]
        )

    @router.get("/tenants/{name}/quota")
    async def quota(name: str) -> models.Quota:
        """What a tenant may have."""
        for tenant in await bridge.call(control.tenants):
            if tenant.name == name:
                return models.Quota(**asdict(tenant.quota))
        raise NotFoundError(f"no tenant {name!r}: GET /tenants lists them")

    @router.get("/engines")
    async def engines() -> models.Engines:
        """The engines that registered, and what made their namespaces."""
        found = await bridge.call(control.engines)
        views = [models.EngineView(engine=e.engine, role=e.role, namespace=e.namespace, facts=e.facts) for e in found]
        return models.Engines(engines=views)

    @router.get("/tiers")
    async def tiers() -> models.Tiers:
        """The lower tiers, fastest first."""
        found = await bridge.call(control.tiers)
        names = models.TierView.model_fields
        return models.Tiers(tiers=[models.TierView(**{name: getattr(tier, name) for name in names}) for tier in found])

    return router


def _managing(control: Control, bridge: Bridge) -> APIRouter:
    router = APIRouter(tags=["managing"])

    @router.delete("/objects/{key}")
    async def delete(key: Hex, tenant: TenantName = DEFAULT_TENANT) -> models.Deleted:
        """Forget one object. A leased one loses its name now and its bytes when the last lease ends."""
        if not await bridge.call(lambda: control.delete(tenant, bytes.fromhex(key))):
            raise NotFoundError(f"tenant {tenant!r} has no object {key}")
        return models.Deleted(count=1)

    @router.post("/purge")
    async def purge(order: models.PurgeOrder) -> models.Purged:
        """Forget every object of a tenant that nobody has leased or pinned; the pool serves others meanwhile."""
        count, cursor = 0, 0
        while True:
            some, cursor = await bridge.call(lambda at=cursor: control.purge(order.tenant, at))  # type: ignore[misc]
            count += some
            if not cursor:
                kept = next(t.objects for t in await bridge.call(control.tenants) if t.name == order.tenant)
                return models.Purged(count=count, kept=kept)

    @router.post("/drain")
    async def drain() -> models.Draining:
        """Take no new objects; go on serving what there is."""
        return await bridge.call(lambda: _set_drain(control, on=True))

    @router.get("/drain")
    async def draining() -> models.Draining:
        """Whether the pool drains, and what is still held."""
        return await bridge.call(lambda: _draining(control))

    @router.delete("/drain")
    async def resume() -> models.Draining:
        """Take new objects again."""
        return await bridge.call(lambda: _set_drain(control, on=False))

    @router.put("/tenants/{name}/quota")
    async def set_quota(name: str, quota: models.Quota) -> models.Quota:
        """Bound what a tenant may have from now on: what is named, the rest stays as it is.

        Objects it has beyond that are evicted as it writes; of connections it gets no more.
        """
        changes = quota.model_dump(exclude_unset=True)
        return models.Quota(**asdict(await bridge.call(lambda: control.set_quota(name, **changes))))

    return router


def _set_drain(control: Control, *, on: bool) -> models.Draining:
    control.drain(on=on)
    return _draining(control)


def _draining(control: Control) -> models.Draining:
    stats = control.stats()
    return models.Draining(
        draining=control.draining,
        leases=stats["leases"],
        unsealed=stats["unsealed"],
        tickets=stats["tickets"],
        sending=stats["sending"],
    )
