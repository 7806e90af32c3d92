"""Replays a trace against a pool that holds so many chunks, under one policy, or under the best choice in hindsight."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from eviction_bench.policies import Policy
    from eviction_bench.traces import Requests


@dataclass(frozen=True)
class Hits:
    """Shares of all chunks asked for."""

    usable: float
    """Found, and all chunks of the prompt before them too: what a KV cache can use."""
    objects: float
    """Found."""


def replay(requests: Requests, policy: Policy, capacity: int, *, tails_first: bool, hand_over: bool) -> Hits:
    """What a pool of ``capacity`` chunks finds.

    A request asks for all its chunks, then those that are missing are stored.

    Args:
        requests: The trace.
        policy: A new one.
        capacity: In chunks, at least one.
        tails_first: The chunks of one request are noted and stored from last to first, so that a policy that goes by
            order gives up a chain's tail before its head; else from first to last.
        hand_over: Whoever takes over the prompt asks for each of its chunks once more at once.
    """
    held: set[int] = set()
    usable = found = asked = 0
    for request in requests:
        asked += len(request)
        usable += next((at for at, chunk in enumerate(request) if chunk not in held), len(request))
        order = request[::-1] if tails_first else request
        missing = [chunk for chunk in order if chunk not in held]
        found += len(request) - len(missing)
        for chunk in order:
            if chunk in held:
                policy.hit(chunk)
        for chunk in missing:
            if len(held) >= capacity:
                held.remove(policy.evict())
            policy.add(chunk)
            held.add(chunk)
        if hand_over:
            for chunk in order:
                if chunk in held:
                    policy.hit(chunk)
        if len(policy) != len(held):
            raise AssertionError(f"the policy counts {len(policy)} objects, the pool holds {len(held)}")
    return Hits(usable / asked, found / asked)


def hindsight(requests: Requests, capacity: int) -> Hits:
    """What is found by whoever knows the future and keeps what is asked for soonest (Belady's MIN, by requests)."""
    never = len(requests)
    following: dict[int, int] = {}
    uses: list[list[int]] = []
    for at in range(len(requests) - 1, -1, -1):
        uses.append([following.get(chunk, never) for chunk in requests[at]])
        following.update(dict.fromkeys(requests[at], at))
    uses.reverse()
    held: dict[int, int] = {}
    latest: list[tuple[int, int, int]] = []  # (-next use, -place in the chain, chunk)
    usable = found = asked = 0
    for request, upcoming in zip(requests, uses, strict=True):
        asked += len(request)
        found += sum(chunk in held for chunk in request)
        usable += next((at for at, chunk in enumerate(request) if chunk not in held), len(request))
        for place, (chunk, use) in enumerate(zip(request, upcoming, strict=True)):
            held[chunk] = use
            heapq.heappush(latest, (-use, -place, chunk))
        while len(held) > capacity:
            use, _, chunk = heapq.heappop(latest)
            if held.get(chunk) == -use:
                del held[chunk]
    return Hits(usable / asked, found / asked)
