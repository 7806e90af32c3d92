"""The router's settings, checked all at once before anything starts."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from kvrelay.client.token import read_token
from kvrelay.errors import BadRequestError, ConfigError
from kvrelay.hosts import is_host
from kvrelay.profiles.needs import needs_of
from kvrelay.profiles.registry import PROFILES
from kvrelay.router.core.admin import TOKEN_VARIABLE, Admin, AdminSettings
from kvrelay.router.core.fleet import Address, KvEndpoint, parse_address
from kvrelay.router.core.kv.settings import KvSettings, kv_problems, parse_events
from kvrelay.router.core.observing.settings import Observing, observing_problems
from kvrelay.router.core.resilience import Resilience
from kvrelay.router.core.routing import RoutingSettings, routing_problems
from kvrelay.router.engine_tls import engine_tls_problems
from kvrelay.router.entrance.settings import EntranceConfig, EntranceSettings, check_entrance
from kvrelay.router.tracing import tracing_problem
from kvrelay.transport.address import parse_address as parse_pool_address
from kvrelay.transport.address import parse_host_port
from kvrelay.transport.tls import TlsConfig
from kvrelay.types import Dispatch, FirstToken, OnLostKv, Tokenising
from kvrelay.wire.limits import MAX_LEASE_S

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from enum import StrEnum

MAX_REPREFILLS = 8
MAX_WORKERS = 256


class RouterSettings(Struct, frozen=True, kw_only=True):
    """As given: see `kvrelay router serve --help`. Times in seconds."""

    prefill: Sequence[str]
    decode: Sequence[str]
    host: str = "127.0.0.1"
    port: int = 8000
    connector: str = "kvrelay"
    pool: str | None = None
    pool_token_file: str | None = None
    connect_timeout_s: float = 2.0
    prefill_timeout_s: float | None = None
    """Three quarters of ``handover_timeout_s`` if not given."""
    handover_timeout_s: float = 600.0
    decode_timeout_s: float = 600.0
    drain_timeout_s: float = 30.0
    ticket_timeout_s: float = 0.25
    on_lost_kv: str = "recompute"
    max_reprefills: int = 1
    dispatch: str = "sequential"
    routing: RoutingSettings = RoutingSettings()
    kv: KvSettings = KvSettings()
    first_token: str = "decode"  # noqa: S105  a token of text
    tokenise: str = "twice"
    max_body_mib: int = 64
    workers: int = 1
    observing: Observing = Observing()
    resilience: Resilience = Resilience()
    entrance: EntranceSettings = EntranceSettings()
    admin: AdminSettings = AdminSettings()
    engine_tls: TlsConfig = TlsConfig()


class RouterConfig(Struct, frozen=True, kw_only=True):
    """Checked and complete."""

    prefills: tuple[Address, ...]
    decodes: tuple[Address, ...]
    host: str
    port: int
    connector: str
    pool: str | None
    pool_token: str | None
    connect_timeout_s: float
    prefill_timeout_s: float
    handover_timeout_s: float
    decode_timeout_s: float
    drain_timeout_s: float
    ticket_timeout_s: float
    on_lost_kv: OnLostKv
    max_reprefills: int
    dispatch: Dispatch
    routing: RoutingSettings
    kv: KvSettings
    kv_events: Mapping[Address, tuple[KvEndpoint, ...]]
    """Where engines publish what their KV caches hold; ``kv.events`` is empty."""
    first_token: FirstToken
    tokenise: Tokenising
    max_body_bytes: int
    workers: int = 1
    observing: Observing
    resilience: Resilience
    entrance: EntranceConfig
    admin: Admin | None
    engine_tls: TlsConfig = TlsConfig()


def check_settings(settings: RouterSettings) -> RouterConfig:
    """Make a configuration of the settings; the pool's token comes from its file or the environment.

    Raises:
        ConfigError: with every problem there is.
    """
    problems: list[str] = []
    profile = PROFILES.get(settings.connector)
    prefills: tuple[Address, ...] = ()
    if profile is None or profile.hands_over:
        prefills = _addresses("--prefill", settings.prefill, problems)
    elif settings.prefill:
        problems.append(
            f"--prefill has no effect with --connector {profile.name}, which does not hand KV over: leave it out"
        )
    decodes = _addresses("--decode", settings.decode, problems)
    shared = sorted({address.url for address in prefills} & {address.url for address in decodes})
    problems += [f"{url} is given as --prefill and as --decode: an engine has one role" for url in shared]
    if settings.host and not is_host(settings.host):
        problems.append(f"--host {settings.host!r} is not a host name: give a name or an address, such as 127.0.0.1")
    if not 0 <= settings.port <= 65535:
        problems.append(f"--port {settings.port} is not a port: give one from 1 to 65535, or 0 for any free one")
    if profile is None:
        problems.append(f"--connector {settings.connector!r} is unknown: choose one of {', '.join(sorted(PROFILES))}")
    elif settings.pool is not None and not profile.uses_pool:
        problems.append(f"--pool has no effect with --connector {settings.connector}: leave it out")
    token = _pool_token(settings, problems) if settings.pool is not None else None
    problems += _time_problems(settings)
    problems += _count_problems(settings)
    problems += settings.resilience.problems()
    admin = _admin(settings.admin, problems)
    problems += _choice_problems(settings)
    problems += _need_problems(settings)
    problems += _observing_problems(settings.observing)
    problems += routing_problems(settings.routing, hands_over=profile is None or profile.hands_over)
    kv_events = _kv_events(settings.kv, prefills, decodes, problems)
    problems += kv_problems(
        settings.kv, settings.routing.policies, joining=admin is not None, pooled=settings.pool is not None,
        conditional=settings.routing.disaggregate_above != "0",
    )  # fmt: skip
    entrance = check_entrance(settings.entrance, problems, workers=settings.workers)
    tls_used = admin is not None or any(address.tls for address in prefills + decodes)
    problems += engine_tls_problems(settings.engine_tls, used=tls_used)
    if problems:
        raise ConfigError(*problems)
    return RouterConfig(
        prefills=prefills,
        decodes=decodes,
        host=settings.host,
        port=settings.port,
        connector=settings.connector,
        pool=settings.pool,
        pool_token=token,
        connect_timeout_s=settings.connect_timeout_s,
        prefill_timeout_s=settings.prefill_timeout_s or 0.75 * settings.handover_timeout_s,
        handover_timeout_s=settings.handover_timeout_s,
        decode_timeout_s=settings.decode_timeout_s,
        drain_timeout_s=settings.drain_timeout_s,
        ticket_timeout_s=settings.ticket_timeout_s,
        on_lost_kv=OnLostKv(settings.on_lost_kv),
        max_reprefills=settings.max_reprefills,
        dispatch=Dispatch(settings.dispatch),
        routing=settings.routing,
        kv=replace(settings.kv, events=()),
        kv_events=kv_events,
        first_token=FirstToken(settings.first_token),
        tokenise=Tokenising(settings.tokenise),
        max_body_bytes=settings.max_body_mib << 20,
        workers=settings.workers,
        observing=settings.observing,
        resilience=settings.resilience,
        entrance=entrance,
        admin=admin,
        engine_tls=settings.engine_tls,
    )


def _time_problems(settings: RouterSettings) -> Iterator[str]:
    for flag, value in (
        ("--connect-timeout", settings.connect_timeout_s),
        ("--prefill-timeout", settings.prefill_timeout_s),
        ("--handover-timeout", settings.handover_timeout_s),
        ("--decode-timeout", settings.decode_timeout_s),
        ("--ticket-timeout", settings.ticket_timeout_s),
    ):
        if value is not None and not 0 < value <= MAX_LEASE_S:
            yield f"{flag} {value:g} is out of range: give seconds above 0, up to {MAX_LEASE_S:g}"
    if not 0 <= settings.drain_timeout_s <= MAX_LEASE_S:
        yield f"--drain-timeout {settings.drain_timeout_s:g} is out of range: give seconds up to {MAX_LEASE_S:g}"
    if settings.prefill_timeout_s is not None and settings.prefill_timeout_s > settings.handover_timeout_s:
        yield (
            f"--prefill-timeout {settings.prefill_timeout_s:g} is longer than --handover-timeout"
            f" {settings.handover_timeout_s:g}, which it is a part of: lower the one or raise the other"
        )


def _count_problems(settings: RouterSettings) -> Iterator[str]:
    if not 1 <= settings.max_body_mib <= 4096:
        yield f"--max-body-mib {settings.max_body_mib} is out of range: give 1 to 4096"
    if not 1 <= settings.workers <= MAX_WORKERS:
        yield f"--workers {settings.workers} is out of range: give 1 to {MAX_WORKERS}"
    if not 1 <= settings.max_reprefills <= MAX_REPREFILLS:
        yield f"--max-reprefills {settings.max_reprefills} is out of range: give 1 to {MAX_REPREFILLS}"


def _choice_problems(settings: RouterSettings) -> Iterator[str]:
    choices: tuple[tuple[str, str, type[StrEnum]], ...] = (
        ("--on-lost-kv", settings.on_lost_kv, OnLostKv),
        ("--dispatch", settings.dispatch, Dispatch),
        ("--first-token", settings.first_token, FirstToken),
        ("--tokenise", settings.tokenise, Tokenising),
    )
    for flag, value, kind in choices:
        if value not in list(kind):
            yield f"{flag} {value!r} is unknown: choose one of {', '.join(kind)}"


def _need_problems(settings: RouterSettings) -> Iterator[str]:
    profile = PROFILES.get(settings.connector)
    for need, value in needs_of(settings):
        flag = f"--{need.setting.replace('_', '-')}"
        if profile is not None and not need.met_by(profile):
            able = ", ".join(sorted(name for name, profile in PROFILES.items() if need.met_by(profile)))
            yield (
                f"{flag} {value}: with --connector {settings.connector} decode engines {need.lacking}; choose "
                f"{need.instead}, or one of these connectors: {able}"
            )
        elif need.through_pool and settings.pool is None:
            yield f"{flag} {value} needs --pool, through which the decode side {need.through_pool}; or: {need.instead}"


def _addresses(flag: str, urls: Sequence[str], problems: list[str]) -> tuple[Address, ...]:
    if not urls:
        port = 8100 if flag == "--prefill" else 8200
        problems.append(f"no {flag} is given: name at least one vLLM server, such as {flag} http://127.0.0.1:{port}")
    found: list[Address] = []
    for url in urls:
        try:
            address = parse_address(url)
        except BadRequestError as error:
            problems.append(f"{flag} {error}")
            continue
        if address in found:
            problems.append(f"{flag} {url} is given twice: leave one out")
        else:
            found.append(address)
    return tuple(found)


def _kv_events(
    settings: KvSettings, prefills: Sequence[Address], decodes: Sequence[Address], problems: list[str]
) -> Mapping[Address, tuple[KvEndpoint, ...]]:
    named = {f"{letter}{number}": address for letter, role in (("P", prefills), ("D", decodes))
             for number, address in enumerate(role)}  # fmt: skip
    try:
        return parse_events(settings.events, named)
    except BadRequestError as error:
        problems.append(f"--kv-events {error}")
        return {}


def _admin(settings: AdminSettings, problems: list[str]) -> Admin | None:
    token = None
    try:
        token = read_token(settings.token_file, TOKEN_VARIABLE)
    except ConfigError as error:
        problems += [f"--admin-token-file: {problem}" for problem in error.problems]
    if settings.listen is None:
        problems += settings.problems(None, token)
        return None
    try:
        host = parse_host_port(settings.listen).host
    except ConfigError as error:
        problems += [f"--admin-listen: {problem}" for problem in error.problems]
        return None
    problems += settings.problems(host, token)
    return Admin(listen=settings.listen, token=token)


def pool_addresses(pool: str) -> list[str]:
    """The addresses in a value of ``--pool``."""
    return re.split(r",(?=unix:|tcp:|tls:)", pool)


def _pool_token(settings: RouterSettings, problems: list[str]) -> str | None:
    assert settings.pool is not None
    for address in pool_addresses(settings.pool):
        try:
            parse_pool_address(address)
        except ConfigError as error:
            problems += [f"--pool: {problem}" for problem in error.problems]
    try:
        return read_token(settings.pool_token_file)
    except ConfigError as error:
        problems += [f"--pool-token-file: {problem}" for problem in error.problems]
        return None


def _observing_problems(settings: Observing) -> Iterator[str]:
    yield from observing_problems(settings)
    if settings.otlp_endpoint is not None and (missing := tracing_problem()) is not None:
        yield missing
