"""Buckets, estimates and what answers say they used."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.router.core.admission.rates import Bucket, in_words
from kvrelay.router.core.admission.request_cost import ASSUMED_COMPLETION_TOKENS as ASSUMED
from kvrelay.router.core.admission.request_cost import (
    MAX_N,
    MAX_TOKENS,
    RequestCost,
    read_asked,
    read_priority,
)

steps = st.lists(st.tuples(st.floats(0, 100), st.floats(0, 50)), max_size=60)


@given(per_minute=st.floats(1, 1000), steps=steps)
def test_a_bucket_never_gives_more_than_its_rate_and_one_minutes_burst(
    per_minute: float, steps: list[tuple[float, float]]
) -> None:
    bucket, now, taken = Bucket(per_minute, 0.0), 0.0, 0.0
    for pause, amount in steps:
        now += pause
        wait_s = bucket.wait_s(amount, now)
        if wait_s == 0:
            bucket.take(amount, now)
            taken += amount
        elif amount <= per_minute:
            now += wait_s + 1e-6
            assert bucket.wait_s(amount, now) == 0
    largest = max((amount for _, amount in steps), default=0.0)
    assert taken <= per_minute * (1 + now / 60) + largest + 1e-6


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "0ms"),
        (0.02, "20ms"),
        (1.5, "1.5s"),
        (20, "20s"),
        (60, "1m0s"),
        (360, "6m0s"),
        (61.25, "1m1.25s"),
        (0.0001, "1ms"),
    ],
)
def test_durations_are_written_as_openai_does(seconds: float, words: str) -> None:
    assert in_words(seconds) == words


@pytest.mark.parametrize(
    ("body", "asked"),
    [
        (b'{"prompt":"0123456789","max_tokens":7}', RequestCost(None, None, 3, 7)),
        (b'{"prompt":[1,2,3],"max_tokens":7,"n":3}', RequestCost(None, None, 3, 21)),
        (b'{"prompt":[[1,2],[3]],"max_tokens":1}', RequestCost(None, None, 3, 1)),
        (b'{"model":"m","priority":-2,"messages":[{"role":"user","content":"hi"}]}', RequestCost("m", -2, 8, ASSUMED)),
        (b'{"max_tokens":5,"max_completion_tokens":9,"prompt":"abcd"}', RequestCost(None, None, 1, 9)),
        (b'{"max_output_tokens":9,"input":"abcdefgh"}', RequestCost(None, None, 2, 9)),
        (b'{"max_tokens":null,"max_completion_tokens":null,"prompt":"abcd"}', RequestCost(None, None, 1, ASSUMED)),
        (b'{"max_tokens":-5,"n":0,"prompt":"abcd"}', RequestCost(None, None, 1, 0)),
        (b'{"max_tokens":999999999999999999,"n":9999,"prompt":"abcd"}', RequestCost(None, None, 1, MAX_TOKENS * MAX_N)),
        (b'{"max_tokens":999999999999,"prompt":"abcd"}', RequestCost(None, None, 1, MAX_TOKENS)),
        (b'{"max_tokens":"7","model":3,"priority":"x","prompt":"abcd"}', RequestCost(None, None, 1, ASSUMED)),
        (b'{"model":"a","model":"b","prompt":"abcd","max_tokens":0}', RequestCost("b", None, 1, 0)),
        (b'{"mod\\u0065l":"b","prompt":"abcd","max_tokens":0}', RequestCost("b", None, 1, 0)),
        (b"[1,2]", RequestCost(None, None, 1, 0)),
        (b"", RequestCost(None, None, 1, 0)),
        (b"[" * 100_000, RequestCost(None, None, 25_000, 0)),
    ],
)  # fmt: skip
def test_what_a_request_asks_for_is_read_from_its_body(body: bytes, asked: RequestCost) -> None:
    assert read_asked(body, is_json=True, generates=True) == asked


def test_what_does_not_generate_has_no_completion_and_other_bodies_count_by_size() -> None:
    assert read_asked(b'{"input":"abcdefgh"}', is_json=True, generates=False).tokens == 2
    assert read_asked(b'{"model":"m"}' + b" " * 387, is_json=False, generates=True) == RequestCost(None, None, 100, 0)


@given(st.binary(max_size=200))
def test_no_body_is_too_odd(body: bytes) -> None:
    assert read_asked(body, is_json=True, generates=True).tokens >= 0


@pytest.mark.parametrize(
    ("said", "value"),
    [(b"3", 3), (b" -7 ", -7), (b"", None), (b"x", None), (b"1.5", None), (b"9" * 30, None), (b"9" * 5000, None)],
)
def test_a_priority_is_a_whole_number_of_32_bits(said: bytes, value: int | None) -> None:
    assert read_priority(said) == value
