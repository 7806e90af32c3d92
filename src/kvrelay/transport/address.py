"""Where a pool is: ``unix:/path/to/socket``, ``tcp:HOST:PORT`` or ``tls:HOST:PORT``.

The last may carry what its `TlsConfig` needs: ``tls:HOST:PORT?ca=FILE&cert=FILE&key=FILE&server_name=NAME``.
"""

from __future__ import annotations

import os
import socket
from typing import NamedTuple
from urllib.parse import parse_qsl, quote

from kvrelay.errors import ConfigError
from kvrelay.hosts import in_address, is_host
from kvrelay.transport.tls import TlsConfig

MAX_UNIX_PATH_BYTES = 107
"""Linux's limit on a UNIX socket's path (sun_path less its terminator)."""


class Address(NamedTuple):
    """A parsed address: ``path`` of a UNIX socket, or ``host`` and ``port``, with ``tls`` where TLS is spoken."""

    path: str = ""
    host: str = ""
    port: int = 0
    tls: TlsConfig | None = None

    def __str__(self) -> str:
        if self.path:
            return f"unix:{self.path}"
        host = in_address(self.host)
        if self.tls is None:
            return f"tcp:{host}:{self.port}"
        given = [(name, getattr(self.tls, name)) for name in TlsConfig.__struct_fields__]
        query = "&".join(f"{name}={quote(value)}" for name, value in given if value is not None)
        return f"tls:{host}:{self.port}{'?' * bool(query)}{query}"

    @property
    def is_unix(self) -> bool:
        """Whether this is a UNIX socket."""
        return bool(self.path)

    def new_socket(self) -> tuple[socket.socket, str | tuple[str, int]]:
        """A socket of the right family and what to connect or bind it to."""
        if self.path:
            return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), self.path
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        return socket.socket(family, socket.SOCK_STREAM), (self.host, self.port)


def parse_address(text: str) -> Address:
    """Parse ``unix:PATH``, ``tcp:HOST:PORT`` or ``tls:HOST:PORT``.

    Raises:
        ConfigError: it is none of them.
    """
    kind, _, rest = text.partition(":")
    if kind == "unix" and rest:
        if "\0" in rest:
            raise ConfigError(f"UNIX socket path {rest!r} has a zero byte in it: leave it out")
        if len(os.fsencode(rest)) > MAX_UNIX_PATH_BYTES:
            raise ConfigError(f"UNIX socket path {rest!r} is over {MAX_UNIX_PATH_BYTES} bytes: use a shorter one")
        return Address(path=rest)
    if kind == "tcp":
        return parse_host_port(rest, text)
    if kind == "tls":
        where, _, query = rest.partition("?")
        return parse_host_port(where, text)._replace(tls=_parse_tls(query, text))
    raise ConfigError(f"pool address {text!r} is not unix:/path/to/socket, tcp:HOST:PORT or tls:HOST:PORT")


def _parse_tls(query: str, shown: str) -> TlsConfig:
    given = dict(parse_qsl(query))
    unknown = sorted(given.keys() - set(TlsConfig.__struct_fields__))
    if unknown:
        legal = ", ".join(TlsConfig.__struct_fields__)
        raise ConfigError(f"address {shown!r} has {', '.join(unknown)}: after the ? come {legal}")
    return TlsConfig(**given)


def parse_host_port(text: str, shown: str | None = None) -> Address:
    """Parse ``HOST:PORT``; an IPv6 host is in brackets.

    Raises:
        ConfigError: it is not that.
    """
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not is_host(host) or not (port.isascii() and port.isdecimal()) or len(port) > 5 or int(port) > 65_535:
        raise ConfigError(f"address {shown or text!r} is not HOST:PORT with a port from 0 to 65535")
    return Address(host=host, port=int(port))
