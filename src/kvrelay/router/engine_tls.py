"""TLS towards engines whose URLs are ``https://``: whom to trust, what to show, whose name to expect."""

from __future__ import annotations

import asyncio
import ssl
from typing import TYPE_CHECKING

from kvrelay.errors import ConfigError
from kvrelay.transport.certificates import client_context
from kvrelay.transport.tls import TlsConfig, does_not_speak, reason_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvrelay.router.core.fleet import Address


def engine_tls_problems(files: TlsConfig, *, used: bool) -> Iterator[str]:
    """What cannot be. Reads the files. ``used``: whether there may be an engine that speaks TLS."""
    if files == TlsConfig():
        return
    if not used:
        yield (
            "--engine-tls-ca, -cert, -key and -name have no effect where every engine is http://, which is not "
            "encrypted: write https:// in their URLs, or leave them out"
        )
    try:
        make_context(files)
    except ConfigError as error:
        yield from (f"--engine-tls-{problem}" for problem in error.problems)


def make_context(files: TlsConfig) -> ssl.SSLContext:
    """TLS 1.2 and up, for HTTP/1.1; the engine's certificate and name are verified. Reads the files.

    Raises:
        ConfigError: a file cannot be used.
    """
    context = client_context(files, minimum=ssl.TLSVersion.TLSv1_2)
    context.set_alpn_protocols(["http/1.1"])
    return context


def why_not(error: OSError) -> str:
    """Why there is no connection to an engine, in words."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return (
            f"its certificate is not accepted: {error.verify_message}; give the --engine-tls-ca that signed it, and "
            "write its URL with a name that it has (or give --engine-tls-name)"
        )
    if isinstance(error, ssl.SSLError):
        return "it does not speak TLS" if does_not_speak(error) else f"no TLS: {reason_of(error)}"
    return str(error)


class EngineTls:
    """What connections to engines need, made when first needed: the system's authorities take a moment to read."""

    def __init__(self, files: TlsConfig | None = None) -> None:
        """``files``: None for the system's authorities, and nothing to show."""
        self._files = files or TlsConfig()
        self._context: ssl.SSLContext | None = None

    async def options(self, address: Address) -> dict[str, ssl.SSLContext | str]:
        """What ``create_connection`` is told besides, for an engine at ``address``.

        Raises:
            ConfigError: a file cannot be used.
        """
        if not address.tls:
            return {}
        if self._context is None:
            self._context = await asyncio.to_thread(make_context, self._files)
        return {"ssl": self._context, "server_hostname": self._files.server_name or address.host}

    async def renew(self) -> None:
        """Read the files again, for connections from now on.

        Raises:
            ConfigError: a file cannot be used; what was in use stays.
        """
        if self._context is not None:
            self._context = await asyncio.to_thread(make_context, self._files)
