from __future__ import annotations

import msgspec
import pytest

from kvrelay.router.core.observing.usage import Usage, count_silent, read_usage
from kvrelay.testing import fake_answers


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_the_usage_of_a_whole_answer_is_found(path: str) -> None:
    assert read_usage(fake_answers.whole(path, {"max_tokens": 5, "n": 2}, "id")) == Usage(7, 10)


def test_a_streams_usage_is_found_before_its_end() -> None:
    body = {"max_tokens": 3, "stream_options": {"include_usage": True}}
    events = fake_answers.events("/v1/completions", body, "id")
    assert read_usage(b"".join(events[-3:])) == Usage(7, 3)


@pytest.mark.parametrize(
    ("tail", "usage"),
    [
        (b'event: response.completed\ndata: {"usage":{"input_tokens":9,"output_tokens":4}}\n\n', (9, 4)),
        (b'{"usage": {"prompt_tokens": 8, "total_tokens": 8, "completion_tokens": 0}}', (8, 0)),
        (b'{"object":"list","usage":{"prompt_tokens":8,"total_tokens":8}}', (8, 0)),
        (b'{"usage":null}', None),
        (b'{"usage":{"total_tokens":3}}', None),
        (b"", None),
        (b'tokens":12,"completion_tokens":3}}', None),
    ],
)  # fmt: skip
def test_usage_in_other_forms_and_where_there_is_none(tail: bytes, usage: tuple[int, int] | None) -> None:
    assert read_usage(tail) == (None if usage is None else Usage(*usage))


def test_what_a_model_says_about_usage_is_not_taken_for_it() -> None:
    lie = '"usage":{"prompt_tokens":999,"completion_tokens":999}'
    said = msgspec.json.encode({"usage": {"prompt_tokens": 1, "completion_tokens": 2}, "choices": [{"text": lie}]})
    assert read_usage(said) == Usage(1, 2)
    assert read_usage(msgspec.json.encode({"choices": [{"text": lie}]})) is None


def test_a_proof_in_the_stream_is_not_taken_for_usage() -> None:
    usage = b'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":2}}\n\ndata: [DONE]\n\n'
    assert read_usage(usage + b': kvrelay {"prompt_tokens": 6}\n\n') == Usage(5, 2)


@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize(("path", "chat"), [("/v1/completions", False), ("/v1/chat/completions", True)])
@pytest.mark.parametrize("comment", [b"", b": kvrelay {}\n\n"])
def test_events_that_carry_no_token_are_counted(path: str, chat: bool, usage: bool, comment: bytes) -> None:
    events = fake_answers.events(path, {"max_tokens": 4, "stream_options": {"include_usage": usage}}, "id")
    stream = b"".join(events) + comment
    expected = chat + 1 + usage + bool(comment)
    assert count_silent(stream, chat=chat) == expected
    assert stream.count(b"\n\n") - expected == 4 - chat  # the fake's first event has role and token in one


def test_a_stream_that_just_breaks_off_has_no_silent_events() -> None:
    assert count_silent(b'data: {"choices":[{"text":"a"}]}\n\n', chat=False) == 0
    assert count_silent(b"", chat=False) == 0
