"""What is done with objects by their names alone, and looking around."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kvrelay.client.core.given import keys_of, whole_number
from kvrelay.client.core.session import Ask
from kvrelay.wire import limits
from kvrelay.wire import messages as m

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvrelay.client.core.steps import Operation
    from kvrelay.wire.bulk import ObjectInfo

PAGE = 4_096


class PrefixCount(NamedTuple):
    """How long a prefix of some keys is: ``sealed`` <= ``present`` <= ``below``."""

    present: int
    """Keys of the prefix that are in memory or being written."""
    sealed: int
    """Of these, from the first on, whole."""
    below: int
    """Keys of the prefix that are in memory or in a lower tier."""


def _batches(keys: Sequence[bytes]) -> Iterator[list[bytes]]:
    keys = keys_of(keys)
    for start in range(0, len(keys), limits.MAX_KEYS):
        yield list(keys[start : start + limits.MAX_KEYS])


def exists(keys: Sequence[bytes]) -> Operation[list[bool]]:
    """Which keys are sealed."""
    flags: list[bool] = []
    for batch in _batches(keys):
        reply = yield Ask(m.Exists(0, batch), m.Existing)
        assert isinstance(reply, m.Existing)
        flags += reply.flags
    return flags


def count_prefix(keys: Sequence[bytes]) -> Operation[PrefixCount]:
    """How long the prefix of ``keys`` is that the pool holds."""
    present = sealed = below = 0
    for batch in _batches(keys):
        reply = yield Ask(m.CountPrefix(0, batch), m.Counted)
        assert isinstance(reply, m.Counted)
        done = below
        if present == done:
            if sealed == done:
                sealed += reply.sealed
            present += reply.present
        below += max(reply.below, reply.present)
        if below < done + len(batch):
            break
    return PrefixCount(present, sealed, below)


def delete(keys: Sequence[bytes]) -> Operation[int]:
    """Forget objects; how many there were."""
    count = 0
    for batch in _batches(keys):
        reply = yield Ask(m.Delete(0, batch), m.Deleted)
        assert isinstance(reply, m.Deleted)
        count += reply.count
    return count


def _affect(request: type[m.Pin | m.Unpin | m.Prefetch], keys: Sequence[bytes]) -> Operation[int]:
    count = 0
    for batch in _batches(keys):
        reply = yield Ask(request(0, batch), m.Affected)
        assert isinstance(reply, m.Affected)
        count += reply.count
    return count


def pin(keys: Sequence[bytes]) -> Operation[int]:
    """Keep objects until `unpin`; how many of them there are."""
    return (yield from _affect(m.Pin, keys))


def unpin(keys: Sequence[bytes]) -> Operation[int]:
    """Undo `pin`; how many of them there are."""
    return (yield from _affect(m.Unpin, keys))


def prefetch(keys: Sequence[bytes]) -> Operation[int]:
    """Bring objects up from lower tiers, in the background; how many it will be."""
    return (yield from _affect(m.Prefetch, keys))


def touch(keys: Sequence[bytes], ttl_s: float) -> Operation[int]:
    """Give objects a new time to live; how many of them there are."""
    count = 0
    for batch in _batches(keys):
        reply = yield Ask(m.Touch(0, batch, ttl_s), m.Affected)
        assert isinstance(reply, m.Affected)
        count += reply.count
    return count


def list_objects(prefix: bytes, limit: int | None) -> Operation[list[ObjectInfo]]:
    """Objects whose keys begin with ``prefix``, in no order, at most ``limit``."""
    found: list[ObjectInfo] = []
    cursor = 0
    limit = None if limit is None else whole_number(limit, "limit")
    while limit is None or len(found) < limit:
        page = PAGE if limit is None else min(PAGE, limit - len(found))
        reply = yield Ask(m.ListObjects(0, cursor, page, prefix), m.Listing)
        assert isinstance(reply, m.Listing)
        found += reply.objects
        cursor = reply.cursor
        if not cursor:
            break
    return found


def purge() -> Operation[int]:
    """Forget every object that nobody has leased or pinned; how many."""
    reply = yield Ask(m.Purge(0), m.Purged)
    assert isinstance(reply, m.Purged)
    return reply.count
