"""What is told of a request: durations, the access log's line, spans."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest

from kvrelay.router.core.lifecycle import TIMESTAMPS, Event, Lifecycle
from kvrelay.router.core.observing.log_line import MAX_TEXT, log_line
from kvrelay.router.core.observing.observation import Facts, Leg, Observation
from kvrelay.router.core.observing.settings import Observing, observing_problems
from kvrelay.router.core.observing.spans import Kind, Span, spans_of
from kvrelay.router.core.observing.timings import Timings
from kvrelay.router.core.observing.traceparent import Trace
from kvrelay.router.core.observing.usage import Usage
from kvrelay.router.core.records import Detour, Record
from kvrelay.types import OnLostKv, Proof

OFFSET = 1_000_000.0
"""From the legs' clock to Unix time."""
TRACE = Trace(trace_id=0xAB, span_id=1, parent_id=9, flags=1)
STORY = [
    (Event.PREFILL_SENT, 0.5), (Event.PREFILL_ANSWERED, 2.5), (Event.DECODE_SENT, 2.5), (Event.FIRST_BYTE, 3.0),
    (Event.LAST_BYTE, 6.0),
]  # fmt: skip


def leg(worker: str, began: float, ended: float, **more: Any) -> Leg:
    role = "prefill" if worker.startswith("P") else "decode"
    return Leg(worker, role, (), ("host", 80), int(began * 10) + 2, began, ended, **{"whole": True, **more})


def handed_over(story: list[tuple[Event, float]] = STORY, **more: Any) -> Facts:
    record = Record(Lifecycle("ho-1", OFFSET), prefill="P0", decode="D0", policy=OnLostKv.RECOMPUTE)
    for event, moment in story:
        record.life.handle(event, OFFSET + moment)
    legs = [leg("P0", 0.5, 2.5, status=200), leg("D0", 2.5, 6.0, status=200)]
    seen = Observation(arrived=0.0, answered=3.0, request_id=b"r-1", model="m", record=record, legs=legs)
    return facts(**{"seen": seen, "ended": OFFSET + 6.0, "events": 4, **more})


def facts(**more: Any) -> Facts:
    given: dict[str, Any] = {
        "seen": Observation(), "method": "POST", "path": "/v1/completions", "outcome": "ok", "status": 200,
        "began": OFFSET, "ended": OFFSET + 1.0, "request_bytes": 10, "answer_bytes": 20, "events": 0, "usage": None,
        "offset": OFFSET,
    }  # fmt: skip
    return Facts(**{**given, **more})


def told(of: Facts) -> dict[str, Any]:
    line = log_line(of)
    assert line.endswith(b"}\n")
    assert line.count(b"\n") == 1
    return msgspec.json.decode(line, type=dict)


def spans(of: Facts) -> list[Span]:
    made = itertools.count(1000)
    return list(spans_of(of, TRACE, lambda: next(made)))


def test_durations_of_a_hand_over() -> None:
    of = handed_over()
    durations = (of.seconds, of.queue_s, of.ttft_s, of.prefill_s, of.migration_s, of.decode_s)
    assert durations == (6.0, 0.5, 3.0, 2.0, 0.5, 3.0)


@pytest.mark.parametrize(
    ("usage", "events", "choices", "itl"),
    [
        (None, 4, 1, 1.0), (Usage(5, 7), 4, 1, 0.5), (Usage(5, 8), 4, 2, 1.0), (None, 1, 1, None),
        (Usage(5, 9), 0, 1, None),
    ],
)  # fmt: skip
def test_itl_is_the_mean_of_a_stream(usage: Usage | None, events: int, choices: int, itl: float | None) -> None:
    """By tokens where the answer says how many, by events otherwise; of answers that are not streamed there is none."""
    of = handed_over(usage=usage, events=events)
    of.seen.num_choices = choices
    assert of.itl_s == itl


def test_a_first_token_from_p_is_what_the_client_waited_for() -> None:
    """1. P's token goes to the client. 2. D's first byte comes. ITL is what the client sees as well."""
    of = handed_over()
    of.seen.answered = 2.0
    assert (of.ttft_s, of.itl_s, of.decode_s) == (2.0, 4.0 / 3, 3.0)


def test_a_stream_that_broke_off_has_no_itl_and_lasts_until_then() -> None:
    of = handed_over([*STORY[:-1], (Event.FAILED, 4.0)], ended=OFFSET + 4.0, outcome="error")
    assert (of.itl_s, of.decode_s) == (None, 1.0)


def test_the_seven_timestamps_and_all_durations_are_in_the_line() -> None:
    line = told(handed_over(usage=Usage(5, 7)))
    assert list(line["at_ms"]) == list(TIMESTAMPS)
    assert line["at_ms"]["decode_end"] == 6000.0
    wanted = {
        "time": "1970-01-12T13:46:40.000Z", "request_id": "r-1", "handover": "ho-1", "model": "m", "status": 200,
        "outcome": "ok", "prefill": "P0", "decode": "D0", "prefill_legs": 1, "decode_legs": 1, "prompt_tokens": 5,
        "completion_tokens": 7, "duration_ms": 6000.0, "queue_ms": 500.0, "ttft_ms": 3000.0, "prefill_ms": 2000.0,
        "migration_ms": 500.0, "decode_ms": 3000.0, "itl_ms": 500.0, "request_bytes": 10, "answer_bytes": 20,
    }  # fmt: skip
    assert {name: line[name] for name in wanted} == wanted


def test_detours_retries_and_proofs_are_in_the_line() -> None:
    of = handed_over()
    record = of.seen.record
    assert record is not None
    of.seen.legs.insert(0, leg("P1", 0.1, 0.2, problem="unreachable", whole=False))
    record.detours.append(Detour("prefill_unreachable", "P1"))
    record.prove(
        Proof(
            handover="ho-1", request_id="r", worker="D0", engine="e", prompt_tokens=9, handed_over_tokens=5,
            earlier_tokens=2, local_tokens=1, recomputed_tokens=1, bytes=3, wait_ms=1, transfer_ms=1,
        )
    )  # fmt: skip
    line = told(of)
    assert line["detours"] == ["prefill_unreachable"]
    assert (line["prefill_legs"], line["decode_legs"]) == (2, 1)
    proven = ("prompt_tokens", "handed_over_tokens", "cached_tokens", "recomputed_tokens")
    assert [line[name] for name in proven] == [9, 5, 3, 1]


def test_what_there_is_not_is_left_out() -> None:
    line = told(facts(status=404, outcome="client_error"))
    assert set(line) == {
        "time", "request_id", "client", "method", "path", "status", "outcome", "duration_ms", "request_bytes",
        "answer_bytes",
    }  # fmt: skip


def test_what_a_client_chooses_neither_breaks_nor_floods_the_log() -> None:
    nasty = 'x"\n' + "\u2028" * 2000
    line = told(facts(path=nasty, seen=Observation(model=nasty, request_id=b'\xff"\n' * 2000)))
    assert max(len(line[name]) for name in ("path", "model", "request_id")) == MAX_TEXT


def test_spans_make_a_tree_under_the_clients() -> None:
    request, queue, prefill, decode, migration = spans(handed_over())
    assert [span.name for span in (request, queue, prefill, decode, migration)] == [
        "POST /v1/completions", "queue", "prefill P0", "decode D0", "migration",
    ]  # fmt: skip
    assert (request.parent_id, request.remote_parent, request.kind) == (9, True, Kind.SERVER)
    assert {span.parent_id for span in (queue, prefill, decode)} == {request.span_id} == {TRACE.span_id}
    assert migration.parent_id == decode.span_id
    assert len({span.span_id for span in spans(handed_over())}) == 5
    assert request.events == [(name, request.events[i][1]) for i, name in enumerate(TIMESTAMPS)]
    times = [(span.began - OFFSET, span.ended - OFFSET) for span in (request, queue, prefill, decode, migration)]
    assert times == [(0.0, 6.0), (0.0, 0.5), (0.5, 2.5), (2.5, 6.0), (2.5, 3.0)]
    assert request.attributes["kvrelay.handover"] == "ho-1"
    assert request.attributes["kvrelay.prefill"] == "P0"
    assert prefill.attributes["server.address"] == "host"
    assert not any(span.error for span in spans(handed_over()))


def test_a_failed_leg_is_a_failed_span_and_the_request_is_not() -> None:
    of = handed_over()
    of.seen.legs.insert(0, leg("P1", 0.1, 0.2, problem="timeout", whole=False))
    request, _, failed, *_ = spans(of)
    assert (failed.name, failed.error, failed.attributes["error.type"]) == ("prefill P1", "timeout", "timeout")
    assert request.error == ""


def test_a_leg_whose_turn_never_came_is_not_told_of() -> None:
    waiting = facts(status=0, outcome="cancelled", seen=Observation(legs=[leg("D0", 0.0, 0.0, whole=False)]))
    assert (waiting.queue_s, waiting.decoder, len(spans(waiting))) == (1.0, "", 1)
    assert "decode" not in told(waiting)


def test_a_request_that_reached_no_engine_is_one_span() -> None:
    (request,) = spans(facts(status=400, outcome="client_error"))
    assert request.attributes["http.response.status_code"] == 400


@pytest.mark.parametrize(
    ("given", "outcome"),
    [
        ({"status": 200}, "ok"), ({"status": 404}, "refused"), ({"status": 503}, "failed"),
        ({"problem": "timeout"}, "failed"), ({"status": 200, "whole": False}, "cancelled"),
        ({"whole": False}, "cancelled"),
    ],
)  # fmt: skip
def test_outcomes_of_a_leg(given: dict[str, Any], outcome: str) -> None:
    assert leg("P0", 0.0, 1.0, **given).outcome == outcome


def test_histograms_take_hand_overs_by_worker_and_outcome() -> None:
    timings = Timings(["P0", "D0"])
    timings.observe(handed_over())
    timings.observe(facts())
    seen = {family.name.removeprefix("kvrelay_router_"): list(family.series) for family in timings if family.series}
    by_decoder = [("D0", "ok")]
    assert seen == {
        "request_seconds": by_decoder, "queue_seconds": [("ok",)], "prefill_seconds": [("P0", "ok")],
        "migration_seconds": by_decoder, "decode_seconds": by_decoder, "itl_seconds": by_decoder,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (Observing(access_log=""), "--access-log is empty"),
        (Observing(otlp_endpoint="collector:4318"), "is not a URL: write http://HOST:4318"),
        (Observing(otlp_endpoint="http://h:x"), "is not a URL"),
        (Observing(trace_ratio=1.5), "--trace-ratio 1.5 is out of range"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: Observing, said: str) -> None:
    (problem,) = observing_problems(settings)
    assert said in problem


@pytest.mark.parametrize("endpoint", ["http://c:4318", "http://c:4318/", "http://c:4318/v1/traces"])
def test_spans_go_where_otlp_takes_them(endpoint: str) -> None:
    assert Observing(otlp_endpoint=endpoint).traces_url == "http://c:4318/v1/traces"
