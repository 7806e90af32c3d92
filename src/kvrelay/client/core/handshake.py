"""The first words on a connection."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvrelay.client.core.session import Ask
from kvrelay.errors import ConfigError
from kvrelay.wire import limits
from kvrelay.wire import messages as m

if TYPE_CHECKING:
    from kvrelay.client.core.steps import Operation

TRANSPORTS = ("auto", "shm", "nixl", "tcp")
"""How the bytes of whole objects may travel."""


def hello(name: str, token: str | None) -> Operation[m.Welcome]:
    """Say who we are and which protocol versions we speak."""
    reply = yield Ask(m.Hello(0, list(limits.VERSIONS), name, token), m.Welcome)
    assert isinstance(reply, m.Welcome)
    return reply


def find_index(welcome: m.Welcome, *, wanted: bool) -> Operation[m.IndexMapped | None]:
    """Ask for the index of what is there, if it is ``wanted`` and kept."""
    if not wanted or not welcome.index:
        return None
    reply = yield Ask(m.MapIndex(0), m.IndexMapped)
    assert isinstance(reply, m.IndexMapped)
    return reply


def reach(welcome: m.Welcome, transport: str, *, nixl: bool) -> Operation[m.Arena | m.NixlMapped | None]:
    """Ask for the way to the arena. ``nixl``: whether this client could use NIXL. None: bytes travel in frames.

    ``auto``: shared memory where the pool offers it, else NIXL where both have it, else frames.

    Raises:
        ConfigError: ``transport`` is unknown, or the pool does not offer it here.
    """
    if transport not in TRANSPORTS:
        raise ConfigError(f"transport {transport!r} is unknown: choose one of {', '.join(TRANSPORTS)}")
    if transport == "shm" and not welcome.shm:
        raise ConfigError("transport 'shm' needs the pool's UNIX socket, and a tenant that may share its memory")
    if transport == "nixl" and not welcome.nixl:
        raise ConfigError("transport 'nixl': the pool does not offer it; start it with --nixl")
    if welcome.shm and transport in {"auto", "shm"}:
        reply = yield Ask(m.MapArena(0), m.Arena)
        assert isinstance(reply, m.Arena)
        return reply
    if welcome.nixl and (transport == "nixl" or (transport == "auto" and nixl)):
        reply = yield Ask(m.NixlMap(0), m.NixlMapped)
        assert isinstance(reply, m.NixlMapped)
        return reply
    return None
