"""How a client learns to reach the arena with NIXL: one-sided, without the pool's help for each object."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from kvrelay.wire import limits
from kvrelay.wire.base import U64, Count, Name, Reply, Request


class NixlMap(Request, frozen=True):
    """Ask for what NIXL needs to write and read the arena. For those who may share its memory. Answered `NixlMapped`.

    From then on the client counts as one that writes the arena itself: bytes it was granted are not reused before it
    says that it stopped, or a while after its connection ended.
    """


class NixlMapped(Reply, frozen=True):
    """The pool's NIXL agent: its ``metadata``, and the arena's address in it (``base``) and size."""

    agent: Name
    metadata: Annotated[bytes, Meta(max_length=limits.MAX_NIXL_METADATA_BYTES)]
    base: U64
    size: Count
