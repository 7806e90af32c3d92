"""A pool that has no room, nor can make any: requests are answered rightly, and it is told what was not saved."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from asking import (
    ask,
    assert_everybody_at_the_pool,
    assert_handed_over_whole,
    assert_nothing_held,
    assert_same,
    completion,
    eventually,
    proof,
    tokens,
)

from kvrelay.client.blocking import PoolClient
from kvrelay.errors import PoolFullError
from kvrelay.testing.stack import Counters

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvrelay.testing.stack import RunningStack

LENGTH = 700
BLOCK_BYTES = 1 << 20
SMALL_BYTES = 4 << 10
LEASE_S = 120.0


@pytest.fixture(autouse=True)
def _whole(stack: RunningStack) -> None:
    """Start with everything connected, whatever an earlier test did."""
    assert_everybody_at_the_pool(stack)


@contextmanager
def nothing_to_give(stack: RunningStack) -> Iterator[None]:
    """All of the arena is leased to somebody, but for crumbs."""
    with PoolClient.connect(stack.pool_address, name="hog", map_arena=False) as hog:
        for size in (BLOCK_BYTES, SMALL_BYTES):
            taken = 0
            try:
                while True:
                    key = b"hog %d of %d" % (taken, size)
                    hog.put(key, bytes(size))
                    hog.match_prefix([key], lease_s=LEASE_S)
                    taken += 1
            except PoolFullError:
                pass
        yield


def test_a_pool_whose_every_byte_is_leased_costs_recomputes_and_nothing_else(
    stack: RunningStack, reference: RunningStack
) -> None:
    questions = [completion(stack.model_name, tokens(LENGTH, "full", n), stream=bool(n)) for n in range(2)]
    right = [ask(reference, question) for question in questions]
    (prefill,) = stack.prefill_urls
    before = Counters(prefill).total("kvrelay:not_saved_total", reason="full")
    with nothing_to_give(stack):
        for question, theirs in zip(questions, right, strict=True):
            ours = ask(stack, question)
            assert_same(ours, theirs, "no room")
            told = proof(stack, ours)
            assert told["recomputed_tokens"] == LENGTH, told
            assert told["wait_ms"] == 0.0, "D waited for what nobody had saved"
        lacking = eventually(
            lambda: Counters(prefill).total("kvrelay:not_saved_total", reason="full") - before,
            lambda told: told >= LENGTH,
            "tokens that found no room",
        )
        assert lacking <= 2 * LENGTH
    assert_nothing_held(stack)
    question = completion(stack.model_name, tokens(LENGTH, "room again"))
    assert_handed_over_whole(stack, question, ask(reference, question), LENGTH, "room again")
