"""The engines a router stands in front of."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from msgspec import Struct

from kvrelay.errors import BadRequestError, ConfigError
from kvrelay.hosts import in_address, is_host, split_url
from kvrelay.router.core.health import Health, HealthSettings
from kvrelay.router.core.load import Load

if TYPE_CHECKING:
    from collections.abc import Sequence


class Role(StrEnum):
    """What an engine is asked for."""

    __hash__ = str.__hash__  # enum's own is written in Python, and roles are keys that every request looks up

    PREFILL = "prefill"
    DECODE = "decode"


class Address(Struct, frozen=True):
    """Where an engine listens. ``base``: a path put before every request's, without a slash at its end."""

    host: str
    port: int
    base: str = ""
    tls: bool = False

    @property
    def authority(self) -> str:
        """As in a URL or a Host header."""
        return f"{in_address(self.host)}:{self.port}"

    @property
    def url(self) -> str:
        """The whole of it, in one spelling."""
        return f"http{'s' * self.tls}://{self.authority}{self.base}"


def parse_address(url: str) -> Address:
    """An engine's URL: ``http://HOST:PORT`` or ``https://HOST:PORT`` with, maybe, a base path.

    Raises:
        BadRequestError: it is something else; the message says what.
    """
    try:
        parts = split_url(url)
    except ConfigError as error:
        raise BadRequestError(f"{error}; write http://HOST:PORT") from None
    port = parts.port
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise BadRequestError(f"{url!r} is not an engine's URL: write http://HOST:PORT or https://HOST:PORT")
    if port == 0:
        raise BadRequestError(f"{url!r}: port 0 cannot be connected to: write http://HOST:PORT")
    if parts.username is not None or parts.query or parts.fragment or any(not "!" <= c <= "~" for c in url):
        raise BadRequestError(f"{url!r}: only a host, a port and a path may be given: write http://HOST:PORT")
    if not is_host(parts.hostname):
        raise BadRequestError(f"{url!r} is not a host name: write http://HOST:PORT")
    tls = parts.scheme == "https"
    return Address(host=parts.hostname, port=port or (443 if tls else 80), base=parts.path.rstrip("/"), tls=tls)


class KvEndpoint(Struct, frozen=True):
    """Where a data-parallel rank of an engine publishes what its KV cache holds."""

    endpoint: str
    replay: str | None = None
    """Where it can be asked for what was missed; None: nowhere."""

    def __str__(self) -> str:
        return self.endpoint if self.replay is None else f"{self.endpoint},{self.replay}"


class Engine:
    """One vLLM server. Its name, P0, P1, ..., D0, D1, ..., is what headers, proofs and metrics call it."""

    __slots__ = (
        "address", "base", "configured", "draining", "health", "host", "kv_events", "leaving", "load", "name", "role",
    )  # fmt: skip

    def __init__(self, name: str, role: Role, address: Address, health: Health) -> None:
        """Identity is the object's."""
        self.name = name
        self.role = role
        self.address = address
        self.base, self.host = address.base.encode(), address.authority.encode()
        """For each request's line and Host header."""
        self.health = health
        self.load = Load()
        self.draining = False
        """Whether it is to take no more requests."""
        self.leaving = False
        """Whether it goes once nobody needs it any more."""
        self.configured = True
        """Whether flags or the configuration name it; else an administrator has added it."""
        self.kv_events: tuple[KvEndpoint, ...] = ()
        """Where its ranks publish, in turn; nothing if nobody listens."""


def make_engines(role: Role, addresses: Sequence[Address], settings: HealthSettings) -> tuple[Engine, ...]:
    """Engines of one role, named in the order given."""
    letter = role.value[0].upper()
    return tuple(Engine(f"{letter}{index}", role, address, Health(settings)) for index, address in enumerate(addresses))
