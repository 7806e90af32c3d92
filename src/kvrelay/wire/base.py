"""What all messages of the pool protocol are made of: bounded types, and the bases of requests and replies."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from kvrelay.wire import limits

Id = Annotated[int, Meta(ge=0, lt=1 << 32)]
Key = Annotated[bytes, Meta(min_length=1, max_length=limits.MAX_KEY_BYTES)]
Keys = Annotated[list[Key], Meta(min_length=1, max_length=limits.MAX_KEYS)]
Name = Annotated[str, Meta(min_length=1, max_length=limits.MAX_NAME_CHARS)]
Count = Annotated[int, Meta(ge=0, lt=1 << 62)]
Index = Annotated[int, Meta(ge=0, lt=limits.MAX_SEGMENTS)]
U64 = Annotated[int, Meta(ge=0)]
LeaseSeconds = Annotated[float, Meta(ge=0, le=limits.MAX_LEASE_S)]
WaitSeconds = Annotated[float, Meta(ge=0, le=limits.MAX_WAIT_S)]


class Message(Struct, tag=True, tag_field="t", array_like=True, frozen=True, gc=False):
    """Base of all messages. The tag is the class name, in lower case. None can be part of a cycle: no garbage."""


def _lower(name: str) -> str:
    return name.lower()


class Request(Message, tag=_lower, frozen=True):
    """What a client sends; answered once under the same ``id``."""

    id: Id


class Reply(Message, tag=_lower, frozen=True):
    """What the pool answers."""

    id: Id
