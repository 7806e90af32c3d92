"""The differential suite's own parts: what is asked, how answers are put together, what counts as a difference."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvrelay.testing.differential.api_page import SPECS
from kvrelay.testing.differential.cases import OMIT, Fresh, Spec, cases, slice_of
from kvrelay.testing.differential.comparing import EXCLUDED, assembled, differences, read

JSON = {"content-type": "application/json"}
EVENTS = {"content-type": "text/event-stream; charset=utf-8"}


def events(*pieces: Any) -> bytes:
    return b"".join(b"data: %b\n\n" % json.dumps(piece).encode() for piece in pieces) + b"data: [DONE]\n\n"


def said(body: Any, status: int = 200) -> Any:
    return read(status, JSON, json.dumps(body).encode())


def test_there_are_several_hundred_requests_the_same_in_every_run() -> None:
    every = cases(SPECS, "m")
    assert len(every) > 500
    assert len({case.name for case in every}) == len(every)
    assert [case.body for case in every] == [case.body for case in cases(SPECS, "m")]
    chosen = slice_of(every)
    assert {case.spec.name for case in chosen} == {spec.name for spec in SPECS}
    assert {case.spec.path for case in chosen} == {spec.path for spec in SPECS}
    assert 0.2 < sum(case.stream for case in chosen) / len(chosen) < 0.7


def test_a_case_is_a_plain_request_with_its_parameter_over_it() -> None:
    spec = Spec(path="/v1/completions", name="x", values=({"max_tokens": OMIT, "prompt": [Fresh("ids", 3)]},))
    whole, stream = cases([spec], "m")
    assert whole.body.keys() == {"model", "prompt", "temperature"}
    assert whole.body["model"] == "m"
    assert len(whole.body["prompt"][0]) == 3
    assert stream.body["stream"] is True
    assert stream.body["prompt"] != whole.body["prompt"]


def test_streams_are_equal_however_their_events_are_divided() -> None:
    def piece(text: str, ids: list[int], finish: str | None = None) -> dict[str, Any]:
        return {"id": "x", "choices": [{"index": 0, "text": text, "token_ids": ids, "finish_reason": finish}]}

    one = read(200, EVENTS, events(piece("a", [1]), piece("b", [2]), piece("", [], "stop")))
    other = read(200, EVENTS, events(piece("ab", [1, 2], "stop")))
    assert differences(one, other) == []
    assert one.body["said"]["choices"]["0"] == {"index": 0, "text": "ab", "token_ids": [1, 2], "finish_reason": "stop"}
    cut = read(200, EVENTS, events(piece("a", [1]), piece("", [], "stop")))
    assert len(differences(one, cut)) == 2


def test_named_events_are_compared_by_their_order_and_proof_comments_are_none() -> None:
    text = 'event: a\ndata: {"delta":"x"}\n\nevent: a\ndata: {"delta":"y"}\n\nevent: b\ndata: {}\n\n: kvrelay {}\n\n'
    assert assembled(text) == {"events": ["a", "b"], "done": False, "a": {"delta": "xy"}, "b": {}}


@pytest.mark.parametrize("name", sorted(EXCLUDED))
def test_what_is_excluded_may_differ_or_be_missing(name: str) -> None:
    assert differences(said({"a": [{name: 1}]}), said({"a": [{name: 2}]})) == []
    assert differences(said({name: 1}), said({})) == []


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"text": "a"}, {"text": "b"}),
        ({"text": "a"}, {}),
        ({}, {"text": None}),
        ({"n": 1}, {"n": 1.0}),
        ({"n": 1}, {"n": True}),
        ({"usage": {"prompt_tokens": 7}}, {"usage": {"prompt_tokens": 8}}),
        ({"a": [1, 2]}, {"a": [1]}),
        ({"logprobs": {"token_logprobs": [-1.0]}}, {"logprobs": {"token_logprobs": [-1.01]}}),
        ({"logprobs": {"tokens": ["a"]}}, {"logprobs": {"tokens": ["b"]}}),
        ({"top_logprobs": [{"x": -1.0}]}, {"top_logprobs": [{"y": -1.0}]}),
    ],
)
def test_everything_else_is_a_difference(ours: Any, theirs: Any) -> None:
    assert len(differences(said(ours), said(theirs))) >= 1


def test_log_probabilities_may_differ_a_little() -> None:
    assert differences(said({"logprobs": [{"a": -1.0}]}), said({"logprobs": [{"a": -1.0004}]})) == []
    assert differences(said({"logprob": -1.0}), said({"logprob": None})) != []


def test_status_and_kind_of_an_answer_are_compared() -> None:
    assert differences(said({}, 200), said({}, 400)) == ["status: 200, 400"]
    assert differences(read(200, JSON, b"x"), read(200, {"content-type": "text/plain"}, b"x")) != []
