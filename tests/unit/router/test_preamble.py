"""Where the answer begins in a streamed response."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kvrelay.router.core.preamble import Preamble

CREATED = b'event: response.created\ndata: {"x":"event: evil\\n"}\n\n'
GOING_ON = b"event: response.in_progress\ndata: {}\n\n"
ADDED = b"event: response.output_item.added\ndata: {}\n\n"


@given(st.lists(st.integers(0, len(CREATED + GOING_ON + ADDED)), max_size=8))
def test_the_answer_begins_with_the_first_event_that_does_not_repeat_the_request(cuts: list[int]) -> None:
    whole = CREATED + GOING_ON + ADDED
    bounds = [0, *sorted(cuts), len(whole)]
    preamble = Preamble()
    named = len(CREATED + GOING_ON) + ADDED.index(b"\n") + 1
    for begin, end in pairwise(bounds):
        assert preamble.feed(whole[begin:end]) is (end >= named)


def test_a_long_preamble_is_not_held() -> None:
    preamble = Preamble()
    assert not preamble.feed(b"event: response.created\ndata: ")
    for _ in range(100):
        assert not preamble.feed(b"x" * 10_000)
    assert not preamble.feed(b"\n\n" + GOING_ON)
    assert preamble.feed(b"event: error\ndata: {}\n\n")


def test_it_stays_begun() -> None:
    preamble = Preamble()
    assert preamble.feed(ADDED)
    assert preamble.feed(CREATED)
