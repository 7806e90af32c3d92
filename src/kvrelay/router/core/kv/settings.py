"""Settings of what is known of engines' caches: where their events are published, and how token ids are found."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import TYPE_CHECKING

from msgspec import Struct

from kvrelay.errors import BadRequestError
from kvrelay.hosts import is_loopback
from kvrelay.router.core.fleet import KvEndpoint, parse_address

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from kvrelay.router.core.fleet import Address, Engine

POLICY = "kv-aware"
MAX_TIMEOUT_S = 10.0
_ENDPOINT = re.compile(r"tcp://(?:\[[0-9A-Fa-f:]+\]|[^\s:/*\[\]]+):([0-9]{1,5})|ipc://\S+")


class TokenIds(StrEnum):
    """Who turns text into token ids before a request is routed."""

    ENGINE = "engine"
    """An engine, by `/tokenize`; a local tokenizer first, where one is given."""
    OFF = "off"
    """Nobody: only prompts that come as token ids have them, and text a local tokenizer can read."""


class KvSettings(Struct, frozen=True, kw_only=True):
    """As given: see `kvrelay router serve --help`."""

    events: tuple[str, ...] = ()
    """``ENGINE=ENDPOINT[,REPLAY]``, an engine by name or URL; its data-parallel ranks in turn."""
    token_ids: str = TokenIds.ENGINE
    tokenize_timeout_s: float = 0.1
    tokenizer: str | None = None
    pool_index: bool = False


class Publisher(Struct, frozen=True):
    """Where a data-parallel rank of an engine publishes its events."""

    engine: str
    rank: int
    endpoint: str
    replay: str | None = None
    """Where it can be asked for what was missed; None: nowhere."""


def publishers_of(engines: Iterable[Engine]) -> tuple[Publisher, ...]:
    """Of all ranks of these engines."""
    return tuple(
        Publisher(engine.name, rank, where.endpoint, where.replay)
        for engine in engines
        for rank, where in enumerate(engine.kv_events)
    )


def parse_endpoint(text: str) -> KvEndpoint:
    """Read ``ENDPOINT[,REPLAY]``.

    Raises:
        BadRequestError: it is something else; the message says what.
    """
    endpoint, _, replay = text.partition(",")
    for given in (endpoint, replay) if replay else (endpoint,):
        match = _ENDPOINT.fullmatch(given)
        if match is None or (match[1] and not 0 < int(match[1]) < 65_536):
            raise BadRequestError(f"{text!r}: {given!r} is nothing to connect to: write tcp://HOST:PORT or ipc://PATH")
    return KvEndpoint(endpoint, replay or None)


def parse_endpoints(texts: Sequence[str]) -> tuple[KvEndpoint, ...]:
    """Read an engine's ranks in turn, each ``ENDPOINT[,REPLAY]``.

    Raises:
        BadRequestError: one is something else, or given twice; the message says what.
    """
    found: list[KvEndpoint] = []
    for text in texts:
        where = parse_endpoint(text)
        if any(where.endpoint == other.endpoint for other in found):
            raise BadRequestError(f"{text!r}: {where.endpoint} is given twice: leave one out")
        found.append(where)
    return tuple(found)


def parse_events(texts: Sequence[str], engines: Mapping[str, Address]) -> dict[Address, tuple[KvEndpoint, ...]]:
    """Read ``ENGINE=ENDPOINT[,REPLAY]``, each time an engine's next rank. ``engines``: by their names.

    Raises:
        BadRequestError: one is something else; the message says what.
    """
    found: dict[Address, tuple[KvEndpoint, ...]] = {}
    for text in texts:
        engine, equals, rest = text.partition("=")
        if not engine or not equals:
            raise BadRequestError(f"{text!r}: write ENGINE=tcp://HOST:PORT or ENGINE=tcp://HOST:PORT,tcp://HOST:PORT")
        try:
            where = parse_endpoint(rest)
            address = parse_address(engine) if "://" in engine else engines.get(engine)
        except BadRequestError as error:
            raise BadRequestError(f"{engine}=...: {error}") from None
        if address is None or address not in engines.values():
            raise BadRequestError(f"{engine}=...: no engine is called so; there are {', '.join(engines)}")
        if any(where.endpoint == other.endpoint for ranks in found.values() for other in ranks):
            raise BadRequestError(f"{text!r}: {where.endpoint} is given twice: leave one out")
        found[address] = (*found.get(address, ()), where)
    return found


def unprotected(places: Iterable[KvEndpoint]) -> str:
    """What is said of those that others than this machine's processes may be behind, or between; empty if all are here.

    vLLM's publishers know neither encryption nor authentication.
    """
    far = [
        url
        for where in places
        for url in (where.endpoint, where.replay)
        if url is not None and url.startswith("tcp://") and not is_loopback(_host(url))
    ]
    if not far:
        return ""
    return (
        f"KV cache events from {', '.join(far)} come in the clear and from whoever answers there: they hold the token "
        "ids of prompts, and say where prompts go; keep these ports inside a network you trust, or in a tunnel"
    )


def _host(url: str) -> str:
    return url.removeprefix("tcp://").rpartition(":")[0].strip("[]")


def kv_problems(
    settings: KvSettings, policies: Collection[str], *, joining: bool, pooled: bool, conditional: bool
) -> Iterator[str]:
    """What is wrong, each with what would be right.

    ``policies``: those in use, by name; ``joining``: whether engines may join while the router runs; ``pooled``:
    whether there is a pool; ``conditional``: whether prompts may go to a decode engine alone.
    """
    if POLICY in policies and not settings.events and not joining:
        yield f"--policy {POLICY} needs --kv-events ENGINE=tcp://HOST:PORT of its engines; or: prefix-aware"
    if settings.events and POLICY not in policies:
        yield (f"--kv-events has no effect without --policy {POLICY}: leave it out, or choose that")
    if settings.tokenizer is not None and POLICY not in policies:
        yield (f"--tokenizer has no effect without --policy {POLICY}: leave it out, or choose that")
    if settings.pool_index and not (pooled and conditional and POLICY in policies):
        yield (f"--pool-index needs --pool, --disaggregate-above and, for token ids, --policy {POLICY}")
    if settings.token_ids not in list(TokenIds):
        yield (f"--token-ids {settings.token_ids!r} is unknown: choose one of {', '.join(TokenIds)}")
    if not 0 < settings.tokenize_timeout_s <= MAX_TIMEOUT_S:
        yield (
            f"--tokenize-timeout {settings.tokenize_timeout_s:g} is out of range: give seconds above 0, up to "
            f"{MAX_TIMEOUT_S:g}"
        )
