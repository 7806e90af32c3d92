"""Every setting of a pool server: its type, its default, what it means, and its three names.

A setting has one dotted path, such as ``tls.cert``: its name in the TOML file. `flag_of` and `variable_of` derive the
flag of ``kvrelay pool serve`` and the environment variable from it. Lists of tables have no variable; tenants need the
file.
"""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 - pydantic reads the annotations at run time
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from kvrelay.errors import ConfigError
from kvrelay.settings import Settings, leaves_of
from kvrelay.sizes import format_size, parse_size
from kvrelay.transport.address import parse_address, parse_host_port

DEFAULT_LISTEN = "127.0.0.1:7420"
MIN_ARENA_BYTES = 1 << 20


def _said(error: ConfigError) -> ValueError:
    return ValueError(error.problems[0])  # pydantic reports ValueError


def _read_size(value: object) -> object:
    return parse_size(value) if isinstance(value, str) else value


def _large_enough(size: int) -> int:
    if size < MIN_ARENA_BYTES:
        raise ValueError(f"too small: at least {format_size(MIN_ARENA_BYTES)}")
    return size


def _host_port(text: str) -> str:
    try:
        parse_host_port(text)
    except ConfigError as error:
        raise _said(error) from None
    return text


def _listen(text: str) -> str:
    return text if text == "none" else _host_port(text)


def _socket(text: str) -> str:
    try:
        parse_address(f"unix:{text}")
    except ConfigError as error:
        raise _said(error) from None
    return text


def _numbers(value: object) -> object:
    """A list of numbers may be one string: ``0,1``."""
    if not isinstance(value, str):
        return value
    return [part.strip() for part in value.split(",") if part.strip()]


def _tables(value: object) -> object:
    """Tiers may be given in short, as flags are: ``disk:PATH:SIZE``."""
    if not isinstance(value, list | tuple) or not any(isinstance(entry, str) for entry in value):
        return value
    from kvrelay.pool.tiers.config import parse_flag

    try:
        return [parse_flag(entry) if isinstance(entry, str) else entry for entry in value]
    except ConfigError as error:
        raise _said(error) from None


def _off(value: object) -> object:
    return None if value in ("none", "off", False) else value


Size = Annotated[int, BeforeValidator(_read_size), Field(gt=0)]
Most = Annotated[int, Field(gt=0)]
Fraction = Annotated[float, Field(gt=0, le=1)]
Node = Annotated[int, Field(ge=0, lt=1024)]


class TenantSettings(Settings):
    """One ``[[tenants]]`` table: whoever presents its token, or its certificate, sees its objects alone."""

    name: str = Field(min_length=1, max_length=64, pattern=r"^[\w.-]+$", description="its name, in metrics and logs")
    token_file: Path | None = Field(default=None, description="file with the token its clients present")
    certificate: str | None = Field(
        default=None, min_length=1, description="common name of its clients' certificates (needs tls.client_ca)"
    )
    quota: Size | None = Field(default=None, description="bytes of the arena it may hold (all of it if unset)")
    max_objects: Most | None = Field(default=None, description="objects it may have, sealed or being written")
    max_connections: Most | None = Field(default=None, description="connections its clients may have at once")
    shm: bool = Field(default=False, description="trusted with shared memory: it can see and change the whole arena")


class WatermarkSettings(Settings):
    """When room is made before it is asked for."""

    high: Fraction = Field(
        default=1.0,
        description="share of the arena in use above which objects are evicted; with tiers 0.9 instead of 1",
    )
    low: Fraction = Field(default=1.0, description="share down to which they are; with tiers 0.8 instead of 1")


class AdminSettings(Settings):
    """The admin HTTP API."""

    listen: Annotated[str, AfterValidator(_host_port)] | None = Field(
        default=None, description="HOST:PORT of the admin HTTP API (none if unset); keep it on loopback"
    )
    token_file: Path | None = Field(default=None, description="file with the bearer token the admin API asks for")


class TlsSettings(Settings):
    """TLS on the TCP address."""

    cert: Path | None = Field(default=None, description="PEM file of the pool's certificate chain: TCP speaks TLS only")
    key: Path | None = Field(default=None, description="PEM file of its private key (in tls.cert if unset)")
    client_ca: Path | None = Field(
        default=None, description="PEM file of the authorities clients need a certificate of"
    )


class PoolSettings(Settings):
    """All of a pool server."""

    listen: Annotated[str, AfterValidator(_listen)] = Field(
        default=DEFAULT_LISTEN, description="HOST:PORT of the data protocol; none for no TCP, port 0 for a free one"
    )
    unix: Annotated[str, AfterValidator(_socket)] | None = Field(
        default=None, description="path of a UNIX socket (at most 107 bytes); its clients share the arena's memory"
    )
    size: Annotated[int, BeforeValidator(_read_size), AfterValidator(_large_enough)] = Field(
        default=4 << 30, description="the arena, such as 64GiB; at least 1MiB, at most the memory available"
    )
    token_file: Path | None = Field(
        default=None, description="file with the token clients present (KVRELAY_POOL_TOKEN holds it if unset)"
    )
    tenants: tuple[TenantSettings, ...] = Field(
        default=(), description="tables: name, token_file, certificate, quota, max_objects, max_connections, shm"
    )
    ttl_s: float = Field(
        default=0.0,
        ge=0,
        allow_inf_nan=False,
        description="seconds an object lives unless its writer says; 0: for ever",
    )
    watermarks: WatermarkSettings = WatermarkSettings()
    huge_pages: Annotated[Literal["2MiB", "1GiB"] | None, BeforeValidator(_off)] = Field(
        default=None, description="back the arena with huge pages of this size: 2MiB or 1GiB"
    )
    numa_nodes: Annotated[tuple[Node, ...], BeforeValidator(_numbers)] = Field(
        default=(), description="NUMA nodes the arena's memory comes from, such as 0 or 0,1 (interleaved)"
    )
    mlock: bool = Field(default=False, description="lock the arena in memory: never swapped out")
    tls: TlsSettings = TlsSettings()
    admin: AdminSettings = AdminSettings()
    tiers: Annotated[tuple[dict[str, Any], ...], BeforeValidator(_tables)] = Field(
        default=(), description="list of tables: the lower tiers, fastest first; as a flag in short, one a flag"
    )
    index: bool = Field(
        default=True, description="clients of the UNIX socket look keys up in shared memory, without asking"
    )
    nixl: bool = Field(default=False, description="offer the arena over NIXL (RDMA where there is some)")
    drain_timeout_s: float = Field(
        default=5.0, ge=0, le=3600, description="seconds leases, unsealed objects and answers get at a stop"
    )
    flush_timeout_s: float = Field(
        default=0.0, ge=0, le=86_400, description="seconds a stop may take to copy to the tiers what is in memory only"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="debug, info, warning or error"
    )


def leaves() -> dict[str, Any]:
    """Every setting: dotted path to its pydantic field, in order."""
    return leaves_of(PoolSettings)


def flag_of(path: str) -> str | None:
    """The flag that sets ``path``; None for tenants, which need the file."""
    if path == "tenants":
        return None
    if path == "tiers":
        return "--tier"
    return "--" + path.removesuffix("_s").replace("watermarks.", "watermark.").replace(".", "-").replace("_", "-")


def variable_of(path: str) -> str | None:
    """The environment variable that sets ``path``; None for lists of tables."""
    if path in {"tenants", "tiers"}:
        return None
    return "KVRELAY_POOL_" + path.replace(".", "_").upper()
