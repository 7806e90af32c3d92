"""The admin side of a `PoolServer`: `Control` over its core."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvrelay.pool.admin.control import Page, TenantState

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvrelay.pool.admin.control import TierState
    from kvrelay.pool.core.tenants import Quota
    from kvrelay.pool.server import PoolServer
    from kvrelay.wire.messages import Engine

PURGE_OBJECTS = 256
"""Objects forgotten in one turn of the pool's loop, about."""


class CoreControl:
    """Satisfies `kvrelay.pool.admin.control.Control`. ``tiers``: what the lower tiers tell of themselves."""

    def __init__(self, server: PoolServer, tiers: Callable[[], Sequence[TierState]] = tuple) -> None:
        self._server = server
        self._core = server.core
        self._tiers = tiers

    @property
    def draining(self) -> bool:
        """Whether new objects are refused."""
        return self._core.desk.draining

    def drain(self, *, on: bool) -> None:
        """Refuse new objects, or take them again."""
        self._core.drain(on=on)
        self._server.settle()

    def stats(self) -> dict[str, int]:
        """Gauges and counters."""
        return self._core.stats()

    def tenants(self) -> list[TenantState]:
        """Every tenant there is."""
        return [
            TenantState(
                name=use.name,
                objects=use.objects,
                used_bytes=use.held_bytes,
                connections=use.connections,
                quota=use.quota,
                shm=use.shm,
            )
            for use in self._core.tenant_uses()
        ]

    def objects(self, tenant: str, cursor: int, limit: int, prefix: bytes) -> Page:
        """A page of a tenant's objects."""
        following, found = self._core.objects(
            self._server.now(), tenant=tenant, cursor=cursor, limit=limit, prefix=prefix
        )
        return Page([shown for _, shown in found], following)

    def delete(self, tenant: str, key: bytes) -> bool:
        """Forget an object, here and below; whether it was here."""
        found = self._core.delete(tenant, key, self._server.now())
        self._server.settle()
        return found

    def purge(self, tenant: str, cursor: int) -> tuple[int, int]:
        """Forget about `PURGE_OBJECTS` of what nobody has leased or pinned; how many, and whether to go on."""
        number = self._core.tenants.number(tenant)
        objects, held_bytes = self._core.catalog.usage(number)
        share = held_bytes * PURGE_OBJECTS // objects if objects else held_bytes
        purged, _ = self._core.catalog.trim(max(share, 1), number)
        self._core.desk.counters.purged += purged
        if not purged and self._core.seeking.lower is not None:
            self._core.seeking.lower.purge(number, self._server.now())
        self._server.settle()
        return purged, cursor + 1 if purged else 0

    def set_quota(self, tenant: str, **changes: int | None) -> Quota:
        """Bound what a tenant may have from now on."""
        return self._core.set_quota(tenant, **changes)

    def engines(self) -> list[Engine]:
        """The engines of all tenants."""
        return [conn.engine for conn in self._core.desk.connections.values() if conn.engine is not None]

    def tiers(self) -> Sequence[TierState]:
        """The lower tiers."""
        return self._tiers()
