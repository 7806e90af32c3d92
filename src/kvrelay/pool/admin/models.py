"""What the admin API takes and gives, as its OpenAPI description shows it."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from kvrelay.admin.answers import Model


class Stat(Model):
    """Gauges and counters, by the names of `kvrelay pool stat`."""

    values: dict[str, int]


class ObjectView(Model):
    """One object."""

    key: str = Field(description="hexadecimal")
    size_bytes: int
    state: str = Field(description="sealed or writing")
    tier: str = Field(description="dram, or a lower tier's name")
    pins: int
    ttl_s: float = Field(description="left to live; 0: for ever")


class ObjectPage(Model):
    """Some of a tenant's objects. Objects that come and go meanwhile may be missed."""

    objects: list[ObjectView]
    cursor: int = Field(description="of the next page; 0 after the last")


class Deleted(Model):
    """How many objects are gone."""

    count: int


class Purged(Model):
    """How many objects are gone, and how many the tenant still has."""

    count: int
    kept: int = Field(description="leased, pinned, being written, or stored meanwhile")


class PurgeOrder(Model):
    """Whose objects to forget."""

    tenant: str = Field(description="a tenant's name")


class Draining(Model):
    """Whether new objects are refused, and what is still held."""

    draining: bool
    leases: int
    unsealed: int
    tickets: int
    sending: int = Field(description="answers whose bytes are on their way")


class Tenant(Model):
    """What a tenant holds now."""

    name: str
    objects: int = Field(description="sealed or being written")
    used_bytes: int
    connections: int
    quota_bytes: int | None = Field(description="null: all of the arena")
    max_objects: int | None = Field(description="null: any number")
    max_connections: int | None = Field(description="null: any number")
    shm: bool = Field(description="whether it is trusted with shared memory")


class Tenants(Model):
    """Every tenant there is."""

    tenants: list[Tenant]


class Quota(Model):
    """What a tenant may have."""

    quota_bytes: int | None = Field(default=None, ge=1, description="bytes of the arena; null: all of it")
    max_objects: int | None = Field(default=None, ge=1, description="sealed or being written; null: any number")
    max_connections: int | None = Field(default=None, ge=1, description="null: any number")

    @model_validator(mode="after")
    def _names_one(self) -> Self:
        if not self.model_fields_set:
            raise ValueError(f"name what to change: {', '.join(type(self).model_fields)}")
        return self


class EngineView(Model):
    """A registered engine."""

    engine: str
    role: str
    namespace: str
    facts: dict[str, str]


class Engines(Model):
    """The engines registered now."""

    engines: list[EngineView]


class TierView(Model):
    """A lower tier. Counters count since the start."""

    name: str
    kind: str
    up: bool
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


class Tiers(Model):
    """The lower tiers, fastest first."""

    tiers: list[TierView]
