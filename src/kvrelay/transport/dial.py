"""Connecting to a pool: a socket of the address's kind, TLS spoken where the address says so."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from kvrelay.errors import BadRequestError, PoolUnavailableError
from kvrelay.transport.address import Address, parse_address
from kvrelay.transport.certificates import wrap_client
from kvrelay.transport.tls import TlsConfig, TlsSocket, refused, shake_hands

if TYPE_CHECKING:
    import socket


def dial(address: str, *, tls: TlsConfig | None, timeout_s: float) -> tuple[socket.socket | TlsSocket, Address]:
    """Connect. ``tls``: see `target_of`.

    Raises:
        PoolUnavailableError: nobody answers there, or not with TLS, or with a certificate that is not accepted.
        ConfigError: ``address`` is no address, or a file of its `TlsConfig` cannot be used.
    """
    deadline = time.monotonic() + timeout_s
    where = target_of(address, tls)
    sock, target = _new_socket(where, address)
    sock.settimeout(timeout_s)
    try:
        sock.connect(target)
    except OSError as error:
        sock.close()
        raise PoolUnavailableError(f"no pool answers on {address}: {error.strerror or error}") from error
    if where.tls is None:
        return sock, where
    secured = wrap_client(sock, where.host, where.tls)
    try:
        secured.settimeout(max(0.001, deadline - time.monotonic()))
        secured.do_handshake()
    except OSError as error:
        secured.close()
        raise _failed(address, error, timeout_s) from error
    return secured, where


async def dial_async(
    address: str, *, tls: TlsConfig | None, timeout_s: float
) -> tuple[socket.socket | TlsSocket, Address]:
    """Connect without blocking the loop. Arguments and errors as for `dial`."""
    where = target_of(address, tls)
    sock, target = _new_socket(where, address)
    sock.setblocking(False)
    secured: TlsSocket | None = None
    try:
        async with asyncio.timeout(timeout_s):
            await asyncio.get_running_loop().sock_connect(sock, target)
            if where.tls is None:
                return sock, where
            secured = wrap_client(sock, where.host, where.tls)
            await shake_hands(secured)
    except (OSError, TimeoutError) as error:
        (secured or sock).close()
        if secured is not None:
            raise _failed(address, error, timeout_s) from error
        why = getattr(error, "strerror", None) or f"no answer within {timeout_s:g} s"
        raise PoolUnavailableError(f"no pool answers on {address}: {why}") from error
    except BaseException:
        (secured or sock).close()
        raise
    return secured, where


def unwelcome(where: Address, error: PoolUnavailableError) -> PoolUnavailableError:
    """What to say of a pool that ended the connection without a word: in the clear, it may have expected TLS."""
    if where.is_unix or where.tls is not None:
        return error
    return PoolUnavailableError(f"{error} without an answer; if it serves with TLS, use tls:HOST:PORT")


def _new_socket(where: Address, address: str) -> tuple[socket.socket, str | tuple[str, int]]:
    try:
        return where.new_socket()
    except OSError as error:
        raise unusable(address, error) from error


def unusable(address: str, error: OSError) -> PoolUnavailableError:
    """What it is when a connection cannot be had for want of something of this process, such as descriptors."""
    return PoolUnavailableError(f"no connection to {address} can be made here: {error.strerror or error}")


def target_of(address: str, tls: TlsConfig | None) -> Address:
    """Parse an address; ``tls`` replaces what a ``tls:`` address says itself, and has no effect with others."""
    where = parse_address(address)
    if tls is None:
        return where
    if where.tls is None:
        raise BadRequestError(f"tls is given and {address!r} speaks none: use tls:HOST:PORT")
    return where._replace(tls=tls)


def _failed(address: str, error: OSError, timeout_s: float) -> PoolUnavailableError:
    if isinstance(error, TimeoutError):
        return PoolUnavailableError(
            f"{address} accepts connections and does not answer within {timeout_s:g} s; "
            "if the pool serves without TLS, use tcp:HOST:PORT"
        )
    return refused(address, error)
