"""Cutting a stream where its events end."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvrelay.router.core.events import MAX_HELD_BYTES, EventCutter, count_ends

pieces = st.lists(
    st.lists(st.sampled_from([b"a", b"data: x", b"\n", b"\r\n", b"\n\n"]), max_size=6).map(b"".join), max_size=8
)


@given(pieces)
def test_nothing_is_lost_or_reordered(sent: list[bytes]) -> None:
    cutter = EventCutter()
    given_out = [cutter.feed(piece) for piece in sent]
    assert b"".join(given_out) + cutter.rest() == b"".join(sent)


@given(pieces)
def test_what_is_given_out_ends_where_an_event_ends(sent: list[bytes]) -> None:
    cutter = EventCutter()
    for piece in sent:
        out = cutter.feed(piece)
        assert not out or out.endswith((b"\n\n", b"\n\r\n"))


def test_a_whole_event_is_passed_at_once_and_as_it_is() -> None:
    event = b"data: 1\n\n"
    assert EventCutter().feed(event) is event


def test_an_unfinished_event_waits_for_its_end() -> None:
    cutter = EventCutter()
    assert cutter.feed(b"data: 1\n\ndata: 2") == b"data: 1\n\n"
    assert cutter.feed(b"3\n") == b""
    assert cutter.feed(b"\n") == b"data: 23\n\n"


def test_a_stream_without_events_is_not_held_for_ever() -> None:
    data = b"x" * (MAX_HELD_BYTES + 1)
    assert EventCutter().feed(data) == data


@given(st.lists(st.sampled_from([b"a", b"\n", b"\r\n", b"\n\n", b"\n\n\n"]), max_size=24).map(b"".join))
def test_ends_of_events_are_counted_as_python_counts_them(data: bytes) -> None:
    assert count_ends(data) == data.count(b"\n\n")
