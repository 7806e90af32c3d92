"""How batches are split over connections and put together again."""

from __future__ import annotations

import threading
from array import array
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.client.core.blocks import Blocks
from kvrelay.client.core.puts import Puts
from kvrelay.client.core.stripes import MIN_STRIPE_BYTES, joined_count, joined_puts, stripes
from kvrelay.client.striped import StripedPoolClient

if TYPE_CHECKING:
    from kvrelay.client.blocking import PoolClient

sizes = st.lists(st.sampled_from([1, MIN_STRIPE_BYTES // 3, MIN_STRIPE_BYTES, 5 * MIN_STRIPE_BYTES]), max_size=40)


@given(sizes, st.integers(1, 8))
def test_stripes_hold_every_block_once_in_order(sizes: list[int], connections: int) -> None:
    runs = stripes(Blocks(array("Q", sizes)), connections)
    assert [n for start, stop in runs for n in range(start, stop)] == list(range(len(sizes)))
    assert len(runs) <= connections


@given(st.integers(1, 200), st.integers(1, 8))
def test_equal_blocks_are_split_evenly(count: int, connections: int) -> None:
    runs = stripes(Blocks(array("Q", [MIN_STRIPE_BYTES] * count)), connections)
    lengths = [stop - start for start, stop in runs]
    assert len(lengths) == min(count, connections)
    assert max(lengths) - min(lengths) <= 1


def test_a_small_batch_stays_on_one_connection() -> None:
    assert stripes(Blocks(array("Q", [1000] * 50)), 4) == [(0, 50)]


def test_what_lies_behind_a_hole_counts_for_nothing() -> None:
    runs = [(0, 10), (10, 20), (20, 25)]
    assert joined_count(runs, [10, 10, 5]) == 25
    assert joined_count(runs, [10, 4, 5]) == 14
    assert joined_count(runs, [0, 10, 5]) == 0
    assert joined_count([], []) == 0


def test_states_are_joined_in_order() -> None:
    assert joined_puts([Puts(b"\0\1"), Puts(b"\3")]).states == b"\0\1\3"


def test_the_first_reason_of_any_stripe_is_that_of_the_batch() -> None:
    assert joined_puts([Puts(b"\0"), Puts(b"\1", "full"), Puts(b"\1", "late")]).why == "full"
    assert joined_puts([Puts(b"\0"), Puts(b"\0")]).why == ""


def test_an_interrupted_call_ends_with_its_last_stripe() -> None:
    """1. Two connections move bytes. 2. Ctrl-C comes to the first one's thread. 3. The other still moves some."""
    clients = [SimpleNamespace(closed=False), SimpleNamespace(closed=False)]
    begun, never, ended = threading.Event(), threading.Event(), threading.Event()

    def work(client: Any, _start: int, _stop: int) -> None:
        if client is clients[0]:
            begun.wait()
            raise KeyboardInterrupt
        begun.set()
        never.wait(0.1)
        ended.set()

    striped = StripedPoolClient(cast("list[PoolClient]", clients))
    with pytest.raises(KeyboardInterrupt):
        striped._each(Blocks(array("Q", [MIN_STRIPE_BYTES] * 2)), work)
    assert ended.is_set()
    striped._threads.shutdown()
