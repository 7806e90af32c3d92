"""Who speaks TLS with which certificates: the contexts of pools, their clients, and routers.

Between a pool and its clients TLS 1.3 only: both ends are ours. A router's clients, and engines, may speak 1.2.
"""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING

from kvrelay.errors import ConfigError
from kvrelay.transport.tls import TlsConfig, TlsSocket, reason_of

if TYPE_CHECKING:
    import socket
    from pathlib import Path


def client_context(config: TlsConfig, *, minimum: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3) -> ssl.SSLContext:
    """What a client needs to speak TLS: the server's certificate and host name are verified.

    Raises:
        ConfigError: a file cannot be used, or the name to expect is none.
    """
    if (name := config.server_name) is not None and not _is_name(name):
        raise ConfigError(f"name {name!r} is not a host name: give one that is in the server's certificate")
    try:
        context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cafile=config.ca)
    except (OSError, ValueError) as error:
        raise ConfigError(f"ca {config.ca!r} is not a PEM file of authorities: {reason_of(error)}") from None
    context.minimum_version = minimum
    if config.cert is not None:
        _load_chain(context, config.cert, config.key)
    elif config.key is not None:
        raise ConfigError(f"key {config.key!r} has no effect without cert: give the client's certificate too")
    return context


def _is_name(name: str) -> bool:
    try:
        return bool(name.encode("idna"))
    except UnicodeError:
        return False


def server_context(
    cert: Path,
    key: Path | None = None,
    client_ca: Path | None = None,
    *,
    minimum: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3,
) -> ssl.SSLContext:
    """What a server needs to speak TLS; with ``client_ca``, clients must show a certificate of these authorities.

    Raises:
        ConfigError: a file cannot be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = minimum
    context.num_tickets = 0  # connections are long-lived: none is resumed
    if client_ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
    _load(context, cert, key, client_ca)
    return context


def reload(context: ssl.SSLContext, cert: Path, key: Path | None, client_ca: Path | None) -> None:
    """Read the files of a `server_context` again: for handshakes from now on. Authorities are added, not taken away.

    Raises:
        ConfigError: a file cannot be used; the context is as before.
    """
    server_context(cert, key, client_ca)
    _load(context, cert, key, client_ca)


def _load(context: ssl.SSLContext, cert: Path, key: Path | None, client_ca: Path | None) -> None:
    _load_chain(context, str(cert), str(key) if key else None)
    if client_ca is not None:
        try:
            context.load_verify_locations(client_ca)
        except (OSError, ValueError) as error:
            raise ConfigError(f"client_ca '{client_ca}' is not a PEM file of authorities: {reason_of(error)}") from None


def _load_chain(context: ssl.SSLContext, cert: str, key: str | None) -> None:
    def no_passphrase() -> str:
        raise ConfigError(f"the private key of certificate {cert!r} is encrypted: store it without a passphrase")

    try:
        context.load_cert_chain(cert, key, password=no_passphrase)
    except (OSError, ValueError) as error:
        where = f"certificate {cert!r} with key {key!r}" if key else f"certificate {cert!r} with its key in one file"
        raise ConfigError(f"{where} cannot be used: {reason_of(error)}") from None


def wrap_client(sock: socket.socket, host: str, config: TlsConfig) -> TlsSocket:
    """Make the client's side of a TLS connection of a connected socket; the handshake is still to be done.

    Raises:
        ConfigError: a file cannot be used; ``sock`` is closed.
    """
    try:
        context = client_context(config)
    except ConfigError:
        sock.close()
        raise
    return TlsSocket(context, sock, server_hostname=config.server_name or host)
