"""The frame decoder against streams that are valid, damaged or noise, cut anywhere."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.testing.frame_stream import check, cut, decode
from kvrelay.wire import messages as m
from kvrelay.wire.frames import encode

ids = st.integers(0, 2**32 - 1)
keys = st.lists(st.binary(min_size=1, max_size=64), min_size=1, max_size=8)
cuts = st.lists(st.integers(1, 200), max_size=6)
requests: st.SearchStrategy[m.Request] = st.one_of(
    st.builds(m.Match, ids, keys, st.floats(0, 3600), st.booleans()),
    st.builds(m.Exists, ids, keys),
    st.builds(m.Post, ids, st.text(min_size=1, max_size=20), st.binary(max_size=100)),
    st.builds(
        lambda id_, names, word: m.Get(id_, names, word * len(names)), ids, keys, st.binary(min_size=8, max_size=8)
    ),
    st.builds(m.Release, ids, st.integers(0, 2**62 - 1)),
)
frames = st.lists(st.tuples(requests, st.binary(max_size=300)), max_size=6)


def stream_of(sent: list[tuple[m.Request, bytes]]) -> bytes:
    return b"".join(encode(message, len(payload)) + payload for message, payload in sent)


@settings(max_examples=100)
@given(frames, cuts)
def test_what_was_sent_arrives_however_it_is_cut(sent: list[tuple[m.Request, bytes]], sizes: list[int]) -> None:
    decoded = decode(m.AnyRequest, cut(stream_of(sent), sizes), stand_in=True)
    assert decoded == (sent, 0, None)


@settings(max_examples=150)
@given(frames, cuts, st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=4))
def test_a_damaged_stream_is_judged_the_same_however_it_is_cut(
    sent: list[tuple[m.Request, bytes]], sizes: list[int], damage: list[tuple[int, int]]
) -> None:
    stream = bytearray(stream_of(sent) or b"KV")
    for place, value in damage:
        stream[place % len(stream)] = value
    check(bytes(stream), sizes)


@settings(max_examples=100)
@given(st.binary(max_size=400), cuts, st.booleans())
def test_noise_is_judged_the_same_however_it_is_cut(noise: bytes, sizes: list[int], headed: bool) -> None:
    check(b"KV\x01\x00" + noise if headed else noise, sizes)
