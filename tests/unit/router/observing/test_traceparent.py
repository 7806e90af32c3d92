from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.router.core.observing.traceparent import Sampler, read_traceparent

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
GOOD = f"00-{TRACE}-{SPAN}-01".encode()


def sampler(ratio: float, seed: int = 1) -> Sampler:
    return Sampler(ratio, random.Random(seed).getrandbits)


def test_a_clients_trace_is_continued_under_a_span_of_our_own() -> None:
    trace = sampler(0.0).trace(GOOD)
    assert (trace.name, trace.parent_id, trace.sampled) == (TRACE, int(SPAN, 16), True)
    assert trace.span_id not in {0, trace.parent_id}
    assert trace.traceparent(0xABC) == f"00-{TRACE}-0000000000000abc-01".encode()


def test_a_client_that_does_not_sample_is_not_overruled() -> None:
    trace = sampler(1.0).trace(GOOD[:-1] + b"0")
    assert not trace.sampled
    assert trace.traceparent(1).endswith(b"-00")


@pytest.mark.parametrize(
    "bad",
    [
        b"", b"x", GOOD.upper(), GOOD + b"-more", GOOD.replace(b"00-", b"ff-", 1),
        f"00-{'0' * 32}-{SPAN}-01".encode(), f"00-{TRACE}-{'0' * 16}-01".encode(), GOOD[:-1],
    ],
)  # fmt: skip
def test_what_is_no_traceparent_is_ignored_and_a_trace_begun(bad: bytes) -> None:
    assert read_traceparent(bad) is None
    trace = sampler(1.0).trace(bad)
    assert trace.sampled
    assert trace.parent_id == 0
    assert trace.name != TRACE


def test_a_later_version_may_say_more() -> None:
    assert read_traceparent(GOOD.replace(b"00-", b"01-", 1) + b"-more") == (int(TRACE, 16), int(SPAN, 16), 1)


@pytest.mark.parametrize(("ratio", "low", "high"), [(0.0, 0, 0), (0.25, 200, 300), (1.0, 1000, 1000)])
def test_of_traces_that_begin_here_a_share_is_sampled(ratio: float, low: int, high: int) -> None:
    begins = sampler(ratio)
    assert low <= sum(begins.trace(None).sampled for _ in range(1000)) <= high


def test_an_id_is_never_zero() -> None:
    given_bits = iter([0, 0, 7])
    assert Sampler(1.0, lambda _: next(given_bits)).new_id(64) == 7


@settings(deadline=None, max_examples=40)
@given(st.integers(1, (1 << 128) - 1), st.integers(1, (1 << 64) - 1), st.integers(0, 3))
def test_what_is_written_is_read_again(trace_id: int, span_id: int, flags: int) -> None:
    written = b"00-%032x-%016x-%02x" % (trace_id, span_id, flags)
    trace = sampler(0.0).trace(written)
    assert read_traceparent(trace.traceparent(span_id)) == (trace_id, span_id, flags)


@settings(deadline=None, max_examples=40)
@given(st.binary(max_size=80))
def test_no_value_a_client_sends_is_an_error(value: bytes) -> None:
    assert sampler(1.0).trace(value).trace_id
