"""Every message of the pool protocol.

A client sends requests, each with an ``id`` it chooses; the pool answers each exactly once, in any order, with a
reply of the same ``id`` (`Failed` on error). Connections start with `Hello` / `Welcome`. All messages are msgpack
arrays tagged by a short string; `kvrelay.wire.frames` puts them, and the raw payload some of them carry, into frames.

An **object** is ``key -> size bytes``, cut into ``layers x segments`` equal segments, layer-major. The segment is the
unit of writing, reading and checksumming: for KV it is one KV head of one layer of one chunk, so that tensor-parallel
ranks write head ranges and pipeline ranks layer ranges of the same object. A checksum is XXH3-64 of a segment's bytes.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct, field

from kvrelay.wire import limits
from kvrelay.wire.base import (
    U64,
    Count,
    Id,
    Index,
    Key,
    Keys,
    LeaseSeconds,
    Name,
    Reply,
    Request,
    WaitSeconds,
)
from kvrelay.wire.bulk import (
    Affected,
    Counted,
    CountPrefix,
    Fill,
    Get,
    Got,
    Listing,
    ListObjects,
    Locate,
    Located,
    Pin,
    Prefetch,
    Purge,
    Purged,
    Put,
    PutDone,
    Room,
    RoomGiven,
    Touch,
    Unpin,
)
from kvrelay.wire.index import IndexMapped, MapIndex
from kvrelay.wire.nixl import NixlMap, NixlMapped


class Invalid(Request, frozen=True):
    """Never sent: stands for a request whose content breaks a bound, to be answered with `Failed`."""

    why: str


# --- the handshake ---


class Hello(Request, frozen=True):
    """First message of a connection. ``versions``: protocol versions the client speaks, best first."""

    versions: Annotated[list[int], Meta(min_length=1, max_length=16)]
    client: Name
    """Who is calling, for logs and ``stat``: such as ``"connector P0 rank 0"``."""
    token: Name | None = None


class Welcome(Reply, frozen=True):
    """The connection may be used, in protocol ``version``."""

    version: int
    server: str
    """Server software and version."""
    pool: str
    """Identity of this pool process: differs after a restart."""
    arena_bytes: Count
    shm: bool
    """Whether `MapArena` will work on this connection (a UNIX socket)."""
    nixl: bool = False
    """Whether `NixlMap` will."""
    index: bool = False
    """Whether `MapIndex` will."""


class Failed(Reply, frozen=True):
    """The request did not happen, or not wholly (`Written`). ``code`` is a code of `kvrelay.errors`."""

    code: str
    message: str


class Done(Reply, frozen=True):
    """The request happened and has nothing more to say."""


class MapArena(Request, frozen=True):
    """Ask for the arena's file descriptor; it comes as SCM_RIGHTS ancillary data with `Arena`. UNIX sockets only."""


class Arena(Reply, frozen=True):
    """Precedes or accompanies the arena's descriptor."""

    size: Count


# --- writing ---


class Spec(Struct, array_like=True, frozen=True, gc=False):
    """An object about to be written. ``size`` is divisible by ``layers * segments``."""

    key: Key
    size: Annotated[int, Meta(gt=0, le=limits.MAX_OBJECT_BYTES)]
    layers: Annotated[int, Meta(gt=0, le=limits.MAX_SEGMENTS)] = 1
    segments: Annotated[int, Meta(gt=0, le=limits.MAX_SEGMENTS)] = 1
    """Segments in each layer."""


class Announce(Request, frozen=True):
    """Ask for room for objects before computing them.

    ``group`` names the writer: connections of one group (the ranks of one engine) write one object together, each its
    own segments; anybody else is told ``busy`` while it is unsealed. The object is aborted when a connection that
    announced it ends, or ``lease_s`` passes, before it is sealed. With ``ticket``, every object announced (sealed and
    busy ones too) is protected from eviction until the ticket ends.
    """

    group: Name
    objects: Annotated[list[Spec], Meta(min_length=1, max_length=limits.MAX_KEYS)]
    lease_s: LeaseSeconds
    ticket: Name | None = None


class Grant(Struct, array_like=True, frozen=True, gc=False):
    """The pool's answer for one announced object.

    ``state``: ``granted`` (write it), ``sealed`` (it is there already), ``busy`` (another group is writing it) or
    ``full`` (no room: everything evictable is in use). ``handle`` names it in later messages; ``offset`` is its place
    in the arena. Both are 0 unless granted.
    """

    state: str
    handle: Count = 0
    offset: Count = 0


class Announced(Reply, frozen=True):
    """One grant an object, in the order asked. ``ticket_live``: whether the ticket named is open (True if none was).

    ``why``: of what is ``full``, the bound its tenant reached, if it was one.
    """

    grants: list[Grant]
    ticket_live: bool
    why: str = ""


class Part(Struct, array_like=True, frozen=True, gc=False):
    """A run of whole segments of a granted object, with the checksum of each."""

    handle: Count
    first: Index
    sums: Annotated[list[U64], Meta(min_length=1, max_length=limits.MAX_SEGMENTS)]


class Written(Request, frozen=True):
    """These segments have been written to the arena through shared memory. For tenants trusted with it only, as `Room`.

    Each part is taken or refused by itself; when one was refused, the answer is the first refusal. ``final``: this
    connection has written all it ever will of these objects; if others who write them give them up, nobody asks it.
    """

    parts: Annotated[list[Part], Meta(min_length=1, max_length=limits.MAX_KEYS)]
    final: bool = False


class Write(Request, frozen=True):
    """These segments follow as payload, concatenated in order. The pool verifies their checksums.

    Refused as a whole while the payload is still to come, or damaged; after that as `Written`.
    """

    parts: Annotated[list[Part], Meta(min_length=1, max_length=limits.MAX_KEYS)]


class Abort(Request, frozen=True):
    """The writer gives these objects up, or acknowledges their abortion: it will not touch their bytes again."""

    handles: Annotated[list[Count], Meta(min_length=1, max_length=limits.MAX_KEYS)]


class Disclaim(Request, frozen=True):
    """A connection of ``group`` will not write its share of these objects, which it need not have announced.

    Those of them that the group is writing will not be completed: they are aborted. Of others nothing happens.
    """

    group: Name
    keys: Keys


# --- reading ---


class Match(Request, frozen=True):
    """Longest prefix of ``keys`` that is present, leased to this connection for ``lease_s`` (0: count only, no lease).

    Objects still being written count when ``unsealed`` is set: the reader can then `Wait` for their layers. ``ticket``:
    the answer is to say which of them were first written for that hand-over. ``sums``: the answer is to bring the
    checksums of all that matched, if it is all sealed and they are no more than so many.
    """

    keys: Keys
    lease_s: LeaseSeconds = 0.0
    unsealed: bool = True
    ticket: Name | None = None
    sums: Annotated[int, Meta(ge=0, le=limits.MAX_SUMS)] = 0


class View(Struct, array_like=True, frozen=True, gc=False):
    """One leased object: where it is and how it is cut. ``ready``: layers whole so far."""

    offset: Count
    size: Count
    layers: Count
    segments: Count
    ready: Count


class Matched(Reply, frozen=True):
    """``views``: the objects matched, in the order of the keys. ``lease``: 0 when none was asked or nothing matched."""

    lease: Count
    sealed: Count
    """How many of them, from the first on, are sealed."""
    views: list[View]
    fresh: Annotated[list[Count], Meta(max_length=limits.MAX_KEYS)] = field(default_factory=list)
    """Which of them, by index, were written under the ticket named; none if it has ended, or none was named."""
    sums: bytes = b""
    """Packed u64: the checksums of every segment, object by object; empty if they were not asked for, or too many."""


class Exists(Request, frozen=True):
    """Which of these keys are sealed."""

    keys: Keys


class Existing(Reply, frozen=True):
    """One flag a key."""

    flags: list[bool]


class Wait(Request, frozen=True):
    """Wait until every object of ``lease`` has at least ``layers`` whole layers, or one was aborted.

    An object with fewer layers counts when all it has are whole. The reply carries the checksums of all layers from
    ``first_layer`` to the ready ones, or to as many as one message holds: ask again for the others.
    """

    lease: Count
    layers: Annotated[int, Meta(gt=0, le=limits.MAX_SEGMENTS)]
    timeout_s: WaitSeconds
    first_layer: Index = 0


class Ready(Reply, frozen=True):
    """``layers``: how many layers of every object of the lease are whole: at least what was asked.

    Fewer only where more than `limits.MAX_SUMS` checksums were due. ``sums``: little-endian u64 checksums,
    ``[object][layer - first_layer][segment]``.
    """

    layers: Count
    sums: bytes


class Range(Struct, array_like=True, frozen=True, gc=False):
    """A run of ``count`` whole segments of the lease's ``index``-th object, from segment ``first`` on."""

    index: Index
    first: Index
    count: Annotated[int, Meta(gt=0, le=limits.MAX_SEGMENTS)]


class Read(Request, frozen=True):
    """Ask for segments of leased objects as payload."""

    lease: Count
    ranges: Annotated[list[Range], Meta(min_length=1, max_length=limits.MAX_KEYS)]


class Data(Reply, frozen=True):
    """The ranges asked for follow as payload, concatenated. ``sums``: little-endian u64 checksum of each segment."""

    sums: bytes


class Release(Request, frozen=True):
    """The reader is done with a lease. Fails with ``lease_expired`` if it had run out: drop what was read then."""

    lease: Count


class Forget(Request, frozen=True):
    """Nobody waits for the `Match` with the id ``request`` any more: end the lease it was given, if there still is one.

    A connection's requests are handled in order, so what was asked before has been given by now. Never refused.
    """

    request: Id


class Corrupt(Request, frozen=True):
    """A reader found this object of its lease not to match its checksum: nobody shall be given it again."""

    lease: Count
    index: Index


# --- tickets: hand-overs ---


class OpenTicket(Request, frozen=True):
    """Open a ticket: a named lease with a mailbox, owned by this connection. It ends with it, or at its deadline.

    The router opens one for each hand-over; the prefill side's `Announce` puts objects under it; the decode side posts
    its proof to it.
    """

    ticket: Name
    deadline_s: LeaseSeconds


class SealTicket(Request, frozen=True):
    """Nothing more will be announced under this ticket: whoever follows it is told. ``not_found`` if it has ended."""

    ticket: Name


class Follow(Request, frozen=True):
    """Wait until the object ``key`` is there, be it still being written, or will not come under ``ticket`` any more.

    It will not when the ticket is sealed or has ended.
    """

    ticket: Name
    key: Key
    timeout_s: WaitSeconds


class Followed(Reply, frozen=True):
    """``present``: the object is there. ``open``: more may be announced under the ticket."""

    present: bool
    open: bool


class EndTicket(Request, frozen=True):
    """End a ticket: everything it protected is free again and its notes are gone. ``not_found`` if it has ended."""

    ticket: Name


class Post(Request, frozen=True):
    """Leave a note for the ticket's owner. ``not_found`` if the ticket has ended."""

    ticket: Name
    note: Annotated[bytes, Meta(max_length=limits.MAX_NOTE_BYTES)]


class Collect(Request, frozen=True):
    """Take the notes of a ticket; waits up to ``timeout_s`` for the first if there is none yet."""

    ticket: Name
    timeout_s: WaitSeconds


class Notes(Reply, frozen=True):
    """The notes taken, oldest first; empty when none came in time."""

    notes: list[bytes]


# --- the rest ---


class Delete(Request, frozen=True):
    """Forget these objects. Leased ones lose their name at once and their bytes when the last lease ends."""

    keys: Keys


class Deleted(Reply, frozen=True):
    """How many there were."""

    count: Count


class Register(Request, frozen=True):
    """Tell the pool which engine this connection belongs to, until it ends. ``facts``: what made the namespace."""

    engine: Name
    role: Name
    namespace: Name
    facts: Annotated[dict[str, str], Meta(max_length=limits.MAX_FACTS)]


class Engine(Struct, array_like=True, frozen=True, gc=False):
    """A registered engine."""

    engine: str
    role: str
    namespace: str
    facts: dict[str, str]


class ListEngines(Request, frozen=True):
    """Which engines are registered now."""


class Engines(Reply, frozen=True):
    """The registered engines, in order of registration."""

    engines: list[Engine]


class Stat(Request, frozen=True):
    """Ask for the pool's gauges and counters."""


class Stats(Reply, frozen=True):
    """``values``: names as documented in `kvrelay.pool.core.stats`; sizes in bytes."""

    values: dict[str, int]


AnyRequest = (
    Hello | MapArena | Announce | Written | Write | Abort | Disclaim | Match | Exists | Wait | Read | Release | Forget
    | Corrupt | OpenTicket | SealTicket | Follow | EndTicket | Post | Collect | Delete | Register | ListEngines | Stat
    | Put | Room | Fill | Locate | Get | CountPrefix | Pin | Unpin | Touch | Prefetch | ListObjects | Purge | NixlMap
    | MapIndex
)  # fmt: skip
AnyReply = (
    Welcome | Failed | Done | Arena | Announced | Matched | Existing | Ready | Data | Notes | Deleted | Engines | Stats
    | Followed | PutDone | RoomGiven | Located | Got | Counted | Affected | Listing | Purged | NixlMapped | IndexMapped
)  # fmt: skip
