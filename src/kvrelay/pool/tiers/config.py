"""A tier's settings: from a table of the configuration file or a flag, checked, to an open tier."""

from __future__ import annotations

import os
import socket
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from msgspec import Struct, convert

from kvrelay.errors import ConfigError
from kvrelay.pool.tiers.disk import MIN_SIZE_BYTES, DiskTier
from kvrelay.pool.tiers.folder import FolderTier
from kvrelay.pool.tiers.guard import Guard
from kvrelay.pool.tiers.s3 import S3Tier
from kvrelay.sizes import format_size, parse_size

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvrelay.pool.tiers.core.tier import Tier

FLAG_FORM = "disk:PATH:SIZE, folder:PATH, folder:PATH:SIZE or s3://BUCKET/PREFIX"
_FIELDS = {
    "disk": {"path", "size"},
    "folder": {"path", "size"},
    "s3": {"url", "endpoint", "region"},
}
_COMMON = {"kind", "name", "read_limit", "write_limit", "fill", "readers", "writers"}
_NEEDED = {"disk": ("path", "size"), "folder": ("path",), "s3": ("url",)}
_THREADS = {"disk": (2, 1), "folder": (4, 2), "s3": (2, 2)}
"""Loading and storing; the S3 tier has threads of its own besides."""
MAX_THREADS = 64


class Fill(StrEnum):
    """When objects are copied to a tier."""

    EVICTED = "evicted"
    """When they are about to be evicted from the arena."""
    SEALED = "sealed"
    """As soon as they are whole."""


class TierConfig(Struct, frozen=True, kw_only=True):
    """One tier. Limits in bytes a second, None for no limit; ``size_bytes`` None for no bound."""

    kind: str
    name: str
    path: str = ""
    size_bytes: int | None = None
    url: str = ""
    endpoint: str | None = None
    region: str | None = None
    read_limit: int | None = None
    write_limit: int | None = None
    fill: Fill = Fill.EVICTED
    readers: int = 1
    writers: int = 1


def parse_flag(text: str) -> dict[str, Any]:
    """The table that ``disk:PATH:SIZE``, ``folder:PATH[:SIZE]`` or ``s3://BUCKET/PREFIX`` stands for.

    Raises:
        ConfigError: it is none of these.
    """
    kind, _, rest = text.partition(":")
    if kind == "s3" and rest.startswith("//"):
        return {"kind": "s3", "url": text}
    path, colon, size = rest.rpartition(":")
    if kind == "disk" and path and size:
        return {"kind": "disk", "path": path, "size": size}
    if kind == "folder" and rest:
        return {"kind": "folder", "path": path, "size": size} if colon else {"kind": "folder", "path": rest}
    raise ConfigError(f"--tier {text!r}: a tier is {FLAG_FORM}")


def parse_tiers(tables: Sequence[Mapping[str, Any]]) -> tuple[TierConfig, ...]:
    """The tiers of a pool, fastest first.

    Raises:
        ConfigError: with one line for every problem there is.
    """
    problems: list[str] = []
    tiers: list[TierConfig] = []
    for number, table in enumerate(tables, 1):
        where = f"tier {number}"
        found, tier = _parse(table, where)
        problems += found
        if tier is None:
            continue
        if any(tier.name == other.name for other in tiers):
            problems.append(f"{where}: the name {tier.name!r} is taken: give each tier a name of its own")
        same = [
            other.name for other in tiers if tier.path and os.path.realpath(other.path) == os.path.realpath(tier.path)
        ]
        if same:
            problems.append(f"{where}: {tier.path} is the directory of tier {same[0]!r} already: give it another")
        tiers.append(tier)
    if problems:
        raise ConfigError(*problems)
    return tuple(tiers)


def _parse(table: Mapping[str, Any], where: str) -> tuple[list[str], TierConfig | None]:
    kind = table.get("kind")
    if not isinstance(kind, str) or kind not in _FIELDS:
        return [f"{where}: kind {kind!r}: legal are disk, folder and s3"], None
    problems = [
        f"{where} ({kind}): unknown key {key!r}: legal are {', '.join(sorted(_FIELDS[kind] | _COMMON))}"
        for key in table
        if key not in _FIELDS[kind] | _COMMON
    ]
    problems += [f"{where} ({kind}): {key} is missing" for key in _NEEDED[kind] if not table.get(key)]
    texts: dict[str, str] = {}
    for key in ("name", "path", "url", "endpoint", "region"):
        value = table.get(key)
        if value is not None and not isinstance(value, str):
            problems.append(f"{where} ({kind}): {key} {value!r}: must be a text")
        elif value is not None and not value.isprintable():
            problems.append(f"{where} ({kind}): {key} {value!r}: has characters that cannot be printed: leave them out")
        elif value is not None:
            texts[key] = value
    numbers = {
        "size_bytes": _bytes(table, "size", where, problems, least=MIN_SIZE_BYTES),
        "read_limit": _bytes(table, "read_limit", where, problems),
        "write_limit": _bytes(table, "write_limit", where, problems),
    }
    fill = table.get("fill", Fill.EVICTED.value)
    if fill not in list(Fill):
        problems.append(f"{where} ({kind}): fill {fill!r}: legal are {' and '.join(Fill)}")
    threads: dict[str, int] = {}
    for key, default in zip(("readers", "writers"), _THREADS[kind], strict=True):
        value = table.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= MAX_THREADS:
            problems.append(f"{where} ({kind}): {key} {value!r}: a number of threads from 1 to {MAX_THREADS}")
        else:
            threads[key] = value
    if problems:
        return problems, None
    return [], convert({"kind": kind, "name": kind, "fill": fill, **texts, **numbers, **threads}, TierConfig)


def _bytes(table: Mapping[str, Any], key: str, where: str, problems: list[str], least: int = 1) -> int | None:
    value = table.get(key)
    if value is None:
        return None
    try:
        size = parse_size(str(value)) if isinstance(value, (str, int)) and not isinstance(value, bool) else 0
    except ValueError as error:
        problems.append(f"{where}: {key} {value!r}: {error}")
        return None
    if size < least:
        problems.append(f"{where}: {key} {value!r}: at least {format_size(least)}")
    return size


def open_tier(config: TierConfig) -> Guard:
    """Open a tier.

    Raises:
        ConfigError: it cannot be used.
    """
    tier: Tier
    match config.kind:
        case "disk":
            tier = DiskTier(config.path, config.size_bytes or MIN_SIZE_BYTES)
        case "folder":
            tier = FolderTier(config.path, config.size_bytes, name=socket.gethostname())
        case _:
            tier = S3Tier(config.url, endpoint=config.endpoint, region=config.region)
    return Guard(tier, name=config.name, read_limit=config.read_limit, write_limit=config.write_limit)


def open_tiers(configs: Sequence[TierConfig]) -> list[Guard]:
    """Open all tiers, or none.

    Raises:
        ConfigError: one cannot be used.
    """
    opened: list[Guard] = []
    try:
        opened.extend(map(open_tier, configs))
    except BaseException:
        for guard in opened:
            guard.close()
        raise
    return opened
