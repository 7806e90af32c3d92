"""What each tenant may have, and why one that is refused has reached its bound."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from kvrelay.errors import PoolFullError
from kvrelay.pool.core.blocks import rounded

if TYPE_CHECKING:
    from kvrelay.pool.core.catalog import Catalog
    from kvrelay.pool.core.desk import Desk
    from kvrelay.pool.core.tenants import Quota, Tenants


class Quotas:
    """The bounds of every tenant, by its number."""

    def __init__(self, tenants: Tenants, catalog: Catalog) -> None:
        self._tenants = tenants
        self._catalog = catalog
        self._quotas = [tenant.quota for _, tenant in tenants]
        for number, quota in enumerate(self._quotas):
            catalog.set_quota(number, quota.quota_bytes, quota.max_objects)

    def __getitem__(self, tenant: int) -> Quota:
        return self._quotas[tenant]

    def change(self, tenant: int, changes: dict[str, int | None]) -> Quota:
        """Give a tenant other bounds, by the names of `Quota`: those not named stay; all it may have now."""
        quota = self._quotas[tenant] = replace(self._quotas[tenant], **changes)
        self._catalog.set_quota(tenant, quota.quota_bytes, quota.max_objects)
        return quota

    def __len__(self) -> int:
        return len(self._quotas)

    def above(self, tenant: int, share: float) -> int:
        """Bytes a tenant holds above a share of what it may have; objects it has above it count as its usual ones."""
        quota = self._quotas[tenant]
        if quota.quota_bytes is None and quota.max_objects is None:
            return 0
        objects, held = self._catalog.usage(tenant)
        above = 0 if quota.quota_bytes is None else held - int(share * quota.quota_bytes)
        if quota.max_objects is not None and objects > 0:
            above = max(above, (objects - int(share * quota.max_objects)) * held // objects)
        return max(0, above)

    def over(self, tenant: int, size_bytes: int, objects: int) -> int:
        """How many bytes of its own a tenant has to lose before so much more is within its bounds."""
        quota = self._quotas[tenant]
        if quota.quota_bytes is None and quota.max_objects is None:
            return 0
        named, held = self._catalog.usage(tenant)
        over = 0 if quota.quota_bytes is None else held + size_bytes - quota.quota_bytes
        if quota.max_objects is not None and named > 0:
            over = max(over, (named + objects - quota.max_objects) * held // named)
        return max(0, over)

    def why_full(self, tenant: int, size_bytes: int) -> str:
        """Which bound of its tenant had the catalog refuse an object of ``size_bytes`` just now; empty if none."""
        quota, name = self._quotas[tenant], self._tenants[tenant].name
        objects, held = self._catalog.usage(tenant)
        stays = "and what is leased, pinned or being written stays"
        if quota.max_objects is not None and objects >= quota.max_objects:
            return f"tenant {name!r} may have {quota.max_objects} objects (max_objects), it has {objects}, {stays}"
        if quota.quota_bytes is not None and held + rounded(size_bytes) > quota.quota_bytes:
            return f"tenant {name!r} may hold {quota.quota_bytes} bytes (its quota), it holds {held}, {stays}"
        return ""

    def check_connections(self, tenant: int, desk: Desk) -> None:
        """Refuse one connection more than a tenant may have.

        Raises:
            PoolFullError: it has them all.
        """
        most = self._quotas[tenant].max_connections
        if most is not None and desk.connections_of(tenant) >= most:
            desk.counters.connections_refused += 1
            raise PoolFullError(
                f"tenant {self._tenants[tenant].name!r} may have {most} connections (max_connections) and has them "
                "all: close one, or have its limit raised"
            )
