"""Hosts as addresses name them."""

from __future__ import annotations

import ipaddress
from urllib.parse import SplitResult, urlsplit

from kvrelay.errors import ConfigError


def in_address(host: str) -> str:
    """``host`` as it stands before a port: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


def is_host(name: str) -> bool:
    """Whether ``name`` can be a host's name or address: whether it can be looked up at all."""
    if not name or any(character.isspace() or not character.isprintable() for character in name):
        return False
    try:
        name.encode("idna")  # as whoever looks it up will
    except UnicodeError:
        return False
    return True


def split_url(url: str) -> SplitResult:
    """The parts of ``url``, ``hostname`` and ``port`` among them.

    Raises:
        ConfigError: it is no URL.
    """
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:
        raise ConfigError(f"{url!r} is not a URL: {error}") from None
    return parts


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens there: names other than ``localhost`` may be anybody's."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
