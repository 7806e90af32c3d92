"""What the pool's core asks its shell to do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    from kvrelay.wire.messages import Data, Got, Reply


class Send(Struct, frozen=True, gc=False):
    """Send a reply to a connection."""

    conn: int
    reply: Reply


class SendArena(Struct, frozen=True, gc=False):
    """Send a reply with the arena's descriptor."""

    conn: int
    reply: Reply


class SendIndex(Struct, frozen=True, gc=False):
    """Send a reply with the descriptors of a tenant's index."""

    conn: int
    reply: Reply
    tenant: int


class SendData(Struct, frozen=True, gc=False):
    """Send a reply with the bytes of ``spans`` (offset, size) of the arena; then report ``transfer`` as over.

    It must be reported exactly once, whether the bytes left or the connection died.
    """

    conn: int
    reply: Data | Got
    spans: list[tuple[int, int]]
    transfer: int


class Close(Struct, frozen=True, gc=False):
    """Close a connection once what was sent to it before has left."""

    conn: int
    why: str


Action = Send | SendArena | SendIndex | SendData | Close
