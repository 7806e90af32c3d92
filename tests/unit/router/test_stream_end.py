"""What makes an engine's 200 an answer."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.router.core.stream_end import StreamEnd, error_status, says_error


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b'{"error":{"message":"boom","type":"server_error","code":500}}', 500),
        (b'{ "error" : {"message":"x","code":"404"}}', 404),
        (b'{"error":{"message":"x","code":"overloaded"}}', 502),
        (b'{"error":{"message":"x","code":200}}', 502),
        (b'{"object":"error","message":"too long","code":400}', 400),
        (b'{"error":"CUDA error"}', 502),
        (b'{"error":{"message":"cut', 502),
    ],
)
def test_an_error_in_a_200_has_the_status_it_says(body: bytes, status: int) -> None:
    assert says_error(body)
    assert error_status(body) == status


@pytest.mark.parametrize(
    "body",
    [
        b'{"id":"cmpl-1","object":"text_completion","choices":[{"text":"{\\"error\\":{}}"}]}',
        b'{"error":null,"id":"resp_1"}',
        b'data: {"error":{}}\n\n',
        b"",
        b"[1]",
    ],
)
def test_an_answer_that_only_mentions_errors_is_an_answer(body: bytes) -> None:
    assert not says_error(body)


STREAM = b'data: {"choices":[{"text":"a"}]}\n\ndata: {"choices":[]}\n\ndata: [DONE]\n\n'


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_a_stream_is_whole_with_its_done_however_it_is_cut(cuts: list[int]) -> None:
    end = StreamEnd(())
    places = [0, *sorted(cuts), len(STREAM)]
    for start, stop in pairwise(places):
        end.feed(STREAM[start:stop])
    assert end.whole


@given(st.integers(0, len(STREAM) - 3))
def test_a_stream_without_the_whole_of_its_done_is_not(length: int) -> None:
    end = StreamEnd(())
    end.feed(STREAM[:length])
    assert not end.whole


def test_of_streams_nobody_has_described_nothing_is_claimed() -> None:
    assert StreamEnd.of("/pooling") is None
    assert StreamEnd.of("/v1/completions") is not None


def test_a_done_inside_of_generated_text_ends_nothing() -> None:
    end = StreamEnd(())
    end.feed(b'data: {"text":"data: [DONE]"}\n\n')
    assert not end.whole


@pytest.mark.parametrize(
    ("path", "last"),
    [
        ("/v1/responses", b'event: response.completed\ndata: {"type":"response.completed"}\n\n'),
        ("/v1/responses", b'event: response.failed\ndata: {"type":"response.failed"}\n\n'),
        ("/v1/messages", b'event: message_stop\ndata: {"type":"message_stop"}\n\n'),
        ("/v1/messages", b'event: error\ndata: {"type":"error","error":{}}\n\n'),
    ],
)
def test_streams_of_named_events_end_with_the_last_of_them(path: str, last: bytes) -> None:
    end = StreamEnd.of(path)
    assert end is not None
    end.feed(b'event: begun\ndata: {"type":"begun"}\n\n')
    assert not end.whole
    end.feed(last)
    end.feed(b"")
    assert end.whole


def test_the_last_events_name_inside_of_generated_text_ends_nothing() -> None:
    for path, name in (("/v1/responses", b"response.completed"), ("/v1/messages", b"message_stop")):
        end = StreamEnd.of(path)
        assert end is not None
        end.feed(b'event: delta\ndata: {"delta":"it ends with event: ' + name + b'"}\n\n')
        assert not end.whole
        end.feed(b'event: delta\ndata: {"delta":"!"}\n\nevent: ' + name + b"\ndata: {}\n\n")
        assert end.whole
