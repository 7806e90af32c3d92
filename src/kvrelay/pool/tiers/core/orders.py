"""What the decisions about tiers ask the shell to do, and what it reports back.

Every order has a number, ``op``, and is answered exactly once, in any order. Tiers are counted from 0, the fastest.
Times of expiry are of the core's clock, infinite for never; the shell translates them.
"""

from __future__ import annotations

from typing import NamedTuple

from msgspec import Struct


class Name(NamedTuple):
    """An object's name: its tenant's number and its key."""

    tenant: int
    key: bytes


class Form(NamedTuple):
    """What a tier knows of an object without its bytes."""

    size: int
    layers: int
    segments: int
    expires: float


class Copy(NamedTuple):
    """An object and its place in the arena. ``sums``: u64 a segment, to be stored; empty when it is to be loaded."""

    name: Name
    offset: int
    form: Form
    sums: bytes = b""


class Find(Struct, frozen=True, gc=False):
    """Look which objects a tier has. ``prefix``: nothing behind the first absent one matters. Answer: `found`."""

    op: int
    tier: int
    names: list[Name]
    prefix: bool


class Load(Struct, frozen=True, gc=False):
    """Copy objects from a tier into the arena, verified. Their rows are held until the answer: `loaded`."""

    op: int
    tier: int
    copies: list[Copy]


class Store(Struct, frozen=True, gc=False):
    """Copy objects from the arena to a tier. Their rows are pinned until the answer: `stored`."""

    op: int
    tier: int
    copies: list[Copy]


class Remove(Struct, frozen=True, gc=False):
    """Forget objects in a tier. Answer: `removed`."""

    op: int
    tier: int
    names: list[Name]


class Purge(Struct, frozen=True, gc=False):
    """Forget all of a tenant's objects in a tier. Answer: `removed`."""

    op: int
    tier: int
    tenant: int


Order = Find | Load | Store | Remove | Purge
