"""Settings of what is known of engines' caches: where their events are published, and how token ids are found."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import TYPE_CHECKING

from msgspec import Struct

from kvrelay.errors import BadRequestError

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

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
    """``ENGINE=ENDPOINT[,REPLAY]``; an engine's data-parallel ranks in turn."""
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


def parse_publishers(texts: Sequence[str]) -> tuple[Publisher, ...]:
    """Read ``ENGINE=ENDPOINT[,REPLAY]``.

    Raises:
        BadRequestError: one is something else; the message says what.
    """
    found: list[Publisher] = []
    for text in texts:
        engine, equals, rest = text.partition("=")
        endpoint, _, replay = rest.partition(",")
        if not engine or not equals:
            raise BadRequestError(f"{text!r}: write ENGINE=tcp://HOST:PORT or ENGINE=tcp://HOST:PORT,tcp://HOST:PORT")
        for given in (endpoint, replay) if replay else (endpoint,):
            match = _ENDPOINT.fullmatch(given)
            if match is None or (match[1] and not 0 < int(match[1]) < 65_536):
                raise BadRequestError(
                    f"{text!r}: {given!r} is nothing to connect to: write tcp://HOST:PORT or ipc://PATH"
                )
        if any(endpoint == other.endpoint for other in found):
            raise BadRequestError(f"{text!r}: {endpoint} is given twice: leave one out")
        rank = sum(other.engine == engine for other in found)
        found.append(Publisher(engine, rank, endpoint, replay or None))
    return tuple(found)


def kv_problems(
    settings: KvSettings, policies: Collection[str], engines: Collection[str], *, pooled: bool, conditional: bool
) -> list[str]:
    """What is wrong, each with what would be right.

    ``policies``: those in use, by name; ``engines``: what they are called; ``pooled``: whether there is a pool;
    ``conditional``: whether prompts may go to a decode engine alone.
    """
    problems: list[str] = []
    try:
        publishers = parse_publishers(settings.events)
    except BadRequestError as error:
        publishers = ()
        problems.append(f"--kv-events {error}")
    unknown = sorted({publisher.engine for publisher in publishers} - set(engines))
    problems += [f"--kv-events {name}=...: no engine is called so; there are {', '.join(engines)}" for name in unknown]
    if POLICY in policies and not settings.events:
        problems.append(f"--policy {POLICY} needs --kv-events ENGINE=tcp://HOST:PORT of its engines; or: prefix-aware")
    if settings.events and POLICY not in policies:
        problems.append(f"--kv-events means nothing without --policy {POLICY}: leave it out, or choose that")
    if settings.pool_index and not (pooled and conditional and POLICY in policies):
        problems.append(f"--pool-index needs --pool, --disaggregate-above and, for token ids, --policy {POLICY}")
    if settings.token_ids not in list(TokenIds):
        problems.append(f"--token-ids {settings.token_ids!r} is unknown: choose one of {', '.join(TokenIds)}")
    if not 0 < settings.tokenize_timeout_s <= MAX_TIMEOUT_S:
        problems.append(
            f"--tokenize-timeout {settings.tokenize_timeout_s:g} is out of range: give seconds above 0, up to "
            f"{MAX_TIMEOUT_S:g}"
        )
    return problems
