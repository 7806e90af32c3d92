"""The pool's gauges and counters, by name. Sizes in bytes; counters count since the start.

========================  =========================================================================
``arena_bytes``           the arena's size
``free_bytes``            not held by any object
``largest_free_bytes``    the largest object that fits without evicting any
``evictable_bytes``       held by sealed objects that are not leased, not pinned and not being sent
``lingering_bytes``       held by objects that are gone, until nobody can touch them
``objects``               sealed objects
``unsealed``              objects being written
``leases``                read leases
``leased_objects``        objects protected by a lease, a ticket or a transfer
``pinned_objects``        objects protected by `Pin`
``tickets``               open tickets
``waiting``               unanswered `Wait`, `Collect` and `Follow` requests
``sending``               answers whose bytes are on their way
``connections``           connections that said hello
``engines``               registered engines
``index_bytes``           shared memory of the indexes clients of this host look keys up in
``draining``              1 while nothing new is taken in, else 0
``requests``              counter: requests handled
``request_errors``        counter: requests answered with `Failed`
``lookups``               counter: lookups clients made in these without asking: no requests, nor in the latencies
``hits``                  counter: keys found by `Match`, `Locate`, `Get`, `CountPrefix`, and lookups that count
``misses``                counter: keys they did not find
``sealed``                counter: objects sealed
``aborted``               counter: objects given up unsealed
``evictions``             counter: objects evicted, for any of the next three reasons
``evicted_for_room``      counter: ... because room was needed for another
``evicted_for_quota``     counter: ... because their tenant had as many bytes, or objects, as it may
``evicted_at_watermark``  counter: ... because the arena was fuller than the high watermark
``lost``                  counter: evicted objects that no lower tier had; 0 in a pool without lower tiers
``expired_objects``       counter: objects that outlived their time to live
``deleted``               counter: objects forgotten by `Delete`
``purged``                counter: objects forgotten by a purge
``refused``               counter: objects refused for want of room
``connections_refused``   counter: connections refused because their tenant has as many as it may
``corrupt``               counter: objects found not to match their checksum
``expired_leases``        counter: leases and tickets that ran past their deadline
``received_bytes``        counter: payload received
``sent_bytes``            counter: payload sent
========================  =========================================================================
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    from kvrelay.pool.core.pool import PoolCore


class Counters(Struct):
    """The counters the pool keeps itself; the rest follows from its state."""

    requests: int = 0
    request_errors: int = 0
    hits: int = 0
    misses: int = 0
    refused: int = 0
    connections_refused: int = 0
    corrupt: int = 0
    expired_leases: int = 0
    deleted: int = 0
    purged: int = 0
    received_bytes: int = 0
    sent_bytes: int = 0


_MOST_TOLD = 1 << 48
"""Clients keep the counts of their lookups in memory of their own, and could write anything there."""


def collect(core: PoolCore) -> dict[str, int]:
    """All of them, now."""
    counts, desk, looked_up = core.catalog.counts(), core.desk, core.catalog.looked_up()
    lookups, hits, misses = (min(told, _MOST_TOLD) for told in looked_up[1:])
    counters, connections = desk.counters, desk.connections.values()
    at_watermark = core.upkeep.evicted_at_watermark
    for_room = counts.evicted_for_room + core.upkeep.evicted_clean
    for_quota = counts.evicted_for_quota + core.upkeep.evicted_clean_for_quota
    return {
        "arena_bytes": core.catalog.arena_bytes,
        "free_bytes": counts.free_bytes,
        "largest_free_bytes": counts.largest_free_bytes,
        "evictable_bytes": counts.evictable_bytes,
        "lingering_bytes": counts.gone_bytes,
        "objects": counts.sealed,
        "unsealed": counts.writing,
        "leases": len(core.reading.leases),
        "leased_objects": counts.pinned,
        "pinned_objects": counts.kept,
        "tickets": len(core.tickets.open),
        "waiting": desk.waiting,
        "sending": core.reading.transfers,
        "connections": sum(conn.client is not None for conn in connections),
        "engines": sum(conn.engine is not None for conn in connections),
        "index_bytes": looked_up.index_bytes,
        "draining": int(desk.draining),
        "requests": counters.requests,
        "request_errors": counters.request_errors,
        "lookups": lookups,
        "hits": counters.hits + hits,
        "misses": counters.misses + misses,
        "sealed": core.store.sealed_total,
        "aborted": core.store.aborted_total,
        "evictions": for_room + for_quota + at_watermark,
        "evicted_for_room": for_room,
        "evicted_for_quota": for_quota,
        "evicted_at_watermark": at_watermark,
        "lost": counts.evicted_unclean if core.seeking.lower is not None else 0,
        "expired_objects": core.upkeep.expired_objects,
        "deleted": counters.deleted,
        "purged": counters.purged,
        "refused": counters.refused,
        "connections_refused": counters.connections_refused,
        "corrupt": counters.corrupt,
        "expired_leases": counters.expired_leases,
        "received_bytes": counters.received_bytes,
        "sent_bytes": counters.sent_bytes,
    }
