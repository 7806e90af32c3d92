"""What the admin side may ask of a pool, and what it is answered.

Every method is called in the pool's loop and returns at once: what grows with the number of objects is asked for in
pages. Errors are those of `kvrelay.errors`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvrelay.pool.core.tenants import Quota
    from kvrelay.wire.bulk import ObjectInfo
    from kvrelay.wire.messages import Engine


class TenantState(Struct, frozen=True, kw_only=True):
    """What a tenant holds now."""

    name: str
    objects: int
    """Sealed or being written."""
    used_bytes: int
    connections: int
    quota: Quota
    shm: bool


class TierState(Struct, frozen=True, kw_only=True):
    """One lower tier. Counters count since the start."""

    name: str
    kind: str
    up: bool
    """False: it failed, and is passed over."""
    objects: int
    used_bytes: int
    capacity_bytes: int | None
    hits: int
    misses: int
    read_bytes: int
    written_bytes: int
    errors: int
    corrupt: int
    evictions: int
    looks: int
    look_seconds: float
    reads: int
    read_seconds: float
    writes: int
    write_seconds: float
    throttled_seconds: float


class Page(Struct, frozen=True):
    """Some of a tenant's objects; ``cursor`` of the next page, 0 after the last. It may be short before that."""

    objects: Sequence[ObjectInfo]
    cursor: int


class Control(Protocol):
    """A pool, as the admin side sees it."""

    @property
    def draining(self) -> bool:
        """Whether new objects are refused."""

    def drain(self, *, on: bool) -> None:
        """Refuse new objects and go on serving what there is; or take them again."""

    def stats(self) -> Mapping[str, int]:
        """Gauges and counters, as `kvrelay.pool.core.stats` names them."""

    def tenants(self) -> Sequence[TenantState]:
        """Every tenant there is."""

    def objects(self, tenant: str, cursor: int, limit: int, prefix: bytes) -> Page:
        """A page of at most ``limit`` objects. NotFoundError: no such tenant."""

    def delete(self, tenant: str, key: bytes) -> bool:
        """Forget an object; whether there was one. NotFoundError: no such tenant."""

    def purge(self, tenant: str, cursor: int) -> tuple[int, int]:
        """Forget a page of what nobody has leased or pinned: how many, and the next cursor (0: done)."""

    def set_quota(self, tenant: str, **changes: int | None) -> Quota:
        """Bound what a tenant may have from now on, by the names of `Quota`; all its bounds.

        Raises:
            NotFoundError: there is no such tenant.
        """

    def engines(self) -> Sequence[Engine]:
        """The engines that are registered now."""

    def tiers(self) -> Sequence[TierState]:
        """The lower tiers, fastest first."""
