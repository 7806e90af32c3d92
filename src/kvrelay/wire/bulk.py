"""Messages that move many whole objects at once.

An object written or read whole, as one segment, needs no grant, part or view of its own: here a message carries one
column a fact (a list of keys, a packed array of sizes, of offsets, of checksums), so that neither side spends more
than a few instructions on each object. ``U64s`` are little-endian unsigned 64-bit integers, one a key, in the keys'
order.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated

from msgspec import Meta, Struct

from kvrelay.wire import limits
from kvrelay.wire.base import Count, Key, Keys, LeaseSeconds, Name, Reply, Request, WaitSeconds

Sums = Annotated[bytes, Meta(max_length=8 * limits.MAX_KEYS)]
U64s = Annotated[bytes, Meta(min_length=8, max_length=8 * limits.MAX_KEYS)]
TtlSeconds = Annotated[float, Meta(ge=0)]
"""0: for ever, or as long as the pool's own default says."""


class Stored(IntEnum):
    """What became of one key of a `Put` or a `Room`, as one byte of ``states``."""

    STORED = 0
    """Stored (`Put`, `Fill`), or to be written at its offset (`Room`)."""
    PRESENT = 1
    """The pool holds it already."""
    BUSY = 2
    """Another is writing it."""
    FULL = 3
    """No room: what could be evicted is in use, or a bound on what the tenant may have is reached."""
    DAMAGED = 4
    """Its bytes did not match their checksum."""
    CONFLICT = 5
    """The pool holds it, or another is writing it, with another size."""


# --- writing ---


class Put(Request, frozen=True):
    """Store whole objects whose bytes follow as payload, in the order of the keys. Answered with `PutDone`.

    One round trip: bytes of objects that cannot be taken are dropped. The pool verifies the checksums. Without ``sums``
    they are the end of the payload, u64 a key: then a client can make them while it sends.
    """

    keys: Keys
    sizes: U64s
    sums: Sums = b""
    ttl_s: TtlSeconds = 0.0
    ticket: Name | None = None


class PutDone(Reply, frozen=True):
    """``states``: a `Stored` a key. ``why``: of what is `Stored.FULL`, the bound its tenant reached, if it was one."""

    states: bytes
    why: str = ""


class Room(Request, frozen=True):
    """Ask for room for whole objects that this client will write to the arena itself, then publish with `Fill`.

    For tenants trusted with shared memory only: others could publish what lay there before. The objects are given up
    when the connection ends, or ``lease_s`` passes, before that.
    """

    keys: Keys
    sizes: U64s
    lease_s: LeaseSeconds
    ttl_s: TtlSeconds = 0.0
    ticket: Name | None = None


class RoomGiven(Reply, frozen=True):
    """``batch`` names what was granted, 0 if nothing was; `Abort` gives it up.

    ``states``: a `Stored` a key; ``offsets``: u64 a key, its place in the arena where it is `Stored.STORED`; ``why``:
    as in `PutDone`.
    """

    batch: Count
    states: bytes
    offsets: bytes
    why: str = ""


class Fill(Request, frozen=True):
    """All objects granted as ``batch`` have been written. ``sums``: u64 a granted key, in order. Answered `Done`.

    ``not_found`` if the batch was given up meanwhile: nothing of it was published then.
    """

    batch: Count
    sums: U64s


# --- reading ---


class Locate(Request, frozen=True):
    """Find and lease the longest sealed prefix of ``keys``, checksums included: one round trip before a direct read.

    What a lower tier holds is fetched first, for up to ``wait_s``; what is not there by then counts as absent.
    """

    keys: Keys
    lease_s: LeaseSeconds
    wait_s: WaitSeconds = 0.0


class Located(Reply, frozen=True):
    """``count`` objects, leased as ``lease`` (0 if none). A column each: places, sizes, checksums of the whole bytes.

    An object of several segments has no checksum of its whole: it ends the prefix. ``segmented``: how many of these
    come next, which `Match` finds.
    """

    lease: Count
    count: Count
    offsets: bytes
    sizes: bytes
    sums: bytes
    segmented: Count = 0


class Get(Request, frozen=True):
    """Send the longest sealed prefix of ``keys`` as payload (`Got`), as long as the sizes are those of ``sizes``.

    ``wait_s``: as for `Locate`.
    """

    keys: Keys
    sizes: U64s
    wait_s: WaitSeconds = 0.0


class Got(Reply, frozen=True):
    """``count`` objects follow as payload, concatenated; ``sums``: their checksums.

    ``size``: where it ended because an object has another size than was asked, that size; else 0. ``segmented``: as of
    `Located`.
    """

    count: Count
    sums: bytes
    size: Count
    segmented: Count = 0


class CountPrefix(Request, frozen=True):
    """How long the prefix of ``keys`` is that the pool holds. Leases nothing; marks what it found as used."""

    keys: Keys


class Counted(Reply, frozen=True):
    """``present``: keys of the prefix that are there or being written; ``sealed``: of these, from the first on, whole.

    ``below``: how many of the prefix, from the first on, are there or in a lower tier.
    """

    present: Count
    sealed: Count
    below: Count


# --- keeping ---


class Pin(Request, frozen=True):
    """Keep these objects until `Unpin`: never evicted, never expired, whoever connects or leaves. `Affected`."""

    keys: Keys


class Unpin(Request, frozen=True):
    """Undo `Pin`. Answered with `Affected`."""

    keys: Keys


class Touch(Request, frozen=True):
    """Give these objects a new time to live from now on. Answered with `Affected`."""

    keys: Keys
    ttl_s: TtlSeconds


class Affected(Reply, frozen=True):
    """How many of the keys there were."""

    count: Count


class Prefetch(Request, frozen=True):
    """Bring these objects up from lower tiers, in the background. Answered at once: `Affected`, how many it will be."""

    keys: Keys


# --- looking around ---


class ListObjects(Request, frozen=True):
    """A page of the objects this tenant has, in no order: from ``cursor`` (0: the first page) on."""

    cursor: Count = 0
    limit: Annotated[int, Meta(gt=0, le=4_096)] = 1_024
    prefix: Annotated[bytes, Meta(max_length=limits.MAX_KEY_BYTES)] = b""


class ObjectInfo(Struct, array_like=True, frozen=True, gc=False):
    """One object. ``state``: ``sealed`` or ``writing``; ``tier``: ``dram`` or a lower one's name."""

    key: Key
    size: Count
    state: str
    tier: str
    pins: Count
    ttl_s: float
    """Left to live; 0: for ever."""


class Listing(Reply, frozen=True):
    """``cursor``: of the next page; 0: this was the last. Objects that come and go meanwhile may be missed."""

    cursor: Count
    objects: list[ObjectInfo]


class Purge(Request, frozen=True):
    """Forget every object of this tenant that nobody has leased or pinned. Answered with `Purged`."""


class Purged(Reply, frozen=True):
    """``count``: how many there were; ``kept``: how many are left, leased, pinned or being written."""

    count: Count
    kept: Count
