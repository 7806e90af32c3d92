"""TLS on the router's port."""

from __future__ import annotations

import ssl
from pathlib import Path  # noqa: TC003 - msgspec looks at it

from msgspec import Struct

from kvrelay.transport.certificates import reload, server_context


class TlsFiles(Struct, frozen=True):
    """PEM files."""

    cert: Path
    key: Path | None
    """None: it is in ``cert``."""
    client_ca: Path | None
    """Clients must show a certificate of these authorities."""


def make_context(files: TlsFiles) -> ssl.SSLContext:
    """TLS 1.2 and up, for HTTP/1.1.

    Raises:
        ConfigError: a file cannot be used.
    """
    context = server_context(files.cert, files.key, files.client_ca, minimum=ssl.TLSVersion.TLSv1_2)
    context.set_alpn_protocols(["http/1.1"])
    context.options |= ssl.OP_NO_RENEGOTIATION
    return context


def renew(context: ssl.SSLContext, files: TlsFiles) -> None:
    """Read the files again, for connections from now on.

    Raises:
        ConfigError: a file cannot be used; the context is as before.
    """
    reload(context, files.cert, files.key, files.client_ca)
