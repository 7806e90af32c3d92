"""A pool as the admin side sees it, made of dictionaries."""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from kvrelay.errors import NotFoundError
from kvrelay.pool.admin.control import Page, TenantState, TierState
from kvrelay.pool.core.pool import PoolCore
from kvrelay.pool.core.tenants import Quota
from kvrelay.wire.bulk import ObjectInfo
from kvrelay.wire.messages import Engine


class FakeTenant(Struct):
    """One tenant's objects, and which of them cannot be purged."""

    objects: dict[bytes, int]
    held: set[bytes]
    quota: Quota = Quota()


class FakeControl:
    """Satisfies `kvrelay.pool.admin.control.Control`. ``purge_page``: how many objects one call forgets."""

    def __init__(self, *, purge_page: int = 2) -> None:
        self.tenants_by_name = {
            "default": FakeTenant({}, set()),
            "b": FakeTenant({}, set(), Quota(quota_bytes=1 << 20, max_connections=7)),
        }
        self.draining = False
        self.values = PoolCore(1 << 20, pool="p", server="s").stats()
        self.calls = 0
        self._purge_page = purge_page

    def drain(self, *, on: bool) -> None:
        """Note it."""
        self.draining = on

    def stats(self) -> dict[str, int]:
        """What ``values`` has."""
        self.calls += 1
        return self.values

    def tenants(self) -> list[TenantState]:
        """All of them."""
        return [
            TenantState(
                name=name,
                objects=len(tenant.objects),
                used_bytes=sum(tenant.objects.values()),
                connections=2,
                quota=tenant.quota,
                shm=name == "default",
            )
            for name, tenant in self.tenants_by_name.items()
        ]

    def objects(self, tenant: str, cursor: int, limit: int, prefix: bytes) -> Page:
        """In the order of their keys."""
        keys = sorted(key for key in self._tenant(tenant).objects if key.startswith(prefix))
        sizes = self._tenant(tenant).objects
        found = [ObjectInfo(key, sizes[key], "sealed", "dram", 0, 0.0) for key in keys[cursor : cursor + limit]]
        return Page(found, cursor + limit if cursor + limit < len(keys) else 0)

    def delete(self, tenant: str, key: bytes) -> bool:
        """Forget it."""
        return self._tenant(tenant).objects.pop(key, None) is not None

    def purge(self, tenant: str, cursor: int) -> tuple[int, int]:
        """A page of them, from the last on."""
        owner = self._tenant(tenant)
        free = [key for key in owner.objects if key not in owner.held]
        for key in free[: self._purge_page]:
            del owner.objects[key]
        return min(len(free), self._purge_page), cursor + 1 if len(free) > self._purge_page else 0

    def set_quota(self, tenant: str, **changes: int | None) -> Quota:
        """Note it."""
        owner = self._tenant(tenant)
        owner.quota = replace(owner.quota, **changes)
        return owner.quota

    def engines(self) -> list[Engine]:
        """One."""
        return [Engine("P0", "prefill", "ns", {"model": "m"})]

    def tiers(self) -> list[TierState]:
        """One."""
        return [
            TierState(
                name="ssd", kind="disk", up=True, objects=3, used_bytes=300, capacity_bytes=None,
                hits=5, misses=6, read_bytes=500, written_bytes=700, errors=0, corrupt=1,
                evictions=2, looks=4, look_seconds=0.5, reads=3, read_seconds=1.5, writes=1, write_seconds=0.25,
                throttled_seconds=0.125,
            )
        ]  # fmt: skip

    def _tenant(self, name: str) -> FakeTenant:
        if name not in self.tenants_by_name:
            raise NotFoundError(f"no tenant {name!r}: there are {', '.join(self.tenants_by_name)}")
        return self.tenants_by_name[name]
