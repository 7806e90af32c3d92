"""The spans of one request, made when it is over.

Nothing is recorded while a request is under way but ids, which its legs carry to the engines. The tree:

    POST /v1/chat/completions      SERVER    the request, with the hand-over's timestamps as events
      queue                        INTERNAL  until an engine was asked
      prefill P0                   CLIENT    one for each request to a prefill engine
      decode D0                    CLIENT    one for each request to a decode engine
        migration                  INTERNAL  from sending the decode leg that answered to its first byte

Names follow OpenTelemetry's conventions for HTTP and generative AI where they have one, else begin with ``kvrelay.``.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import TYPE_CHECKING

from msgspec import Struct, field

from kvrelay.router.core.lifecycle import TIMESTAMPS
from kvrelay.router.core.paths import pattern_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvrelay.router.core.observing.observation import Facts, Leg
    from kvrelay.router.core.observing.traceparent import Trace
    from kvrelay.router.core.records import Record

Value = str | int | float | list[str]
MAX_TEXT = 256


class Kind(Enum):
    """OpenTelemetry's."""

    SERVER = auto()
    CLIENT = auto()
    INTERNAL = auto()


class Span(Struct, frozen=True, kw_only=True):
    """One span, finished. Times are Unix seconds."""

    name: str
    kind: Kind
    span_id: int
    parent_id: int
    """0 for none."""
    remote_parent: bool = False
    """Whether the parent is another process's."""
    began: float
    ended: float
    attributes: dict[str, Value] = field(default_factory=dict)
    events: list[tuple[str, float]] = field(default_factory=list)
    error: str = ""
    """Why it failed; empty if it did not."""


def spans_of(facts: Facts, trace: Trace, new_id: Callable[[], int]) -> Iterator[Span]:
    """All spans of a request. ``new_id`` makes a span's id where none was needed before."""
    record = facts.seen.record
    yield Span(
        name=f"{facts.method} {pattern_of(facts.path)}",
        kind=Kind.SERVER,
        span_id=trace.span_id,
        parent_id=trace.parent_id,
        remote_parent=True,
        began=facts.began,
        ended=facts.ended,
        attributes=_about(facts),
        events=[] if record is None else _events(record),
        error=facts.outcome if facts.outcome in {"error", "cancelled"} else "",
    )
    asked = facts.asked
    if asked:
        yield Span(
            name="queue",
            kind=Kind.INTERNAL,
            span_id=new_id(),
            parent_id=trace.span_id,
            began=facts.began,
            ended=facts.began + facts.queue_s,
        )
    for leg in asked:
        yield _leg(facts, leg, trace)
    migration_s, decodes = facts.migration_s, facts.legs("decode")
    if record is not None and migration_s is not None and decodes:
        begin = record.life.timestamps["migration_begin"]
        yield Span(
            name="migration",
            kind=Kind.INTERNAL,
            span_id=new_id(),
            parent_id=decodes[-1].span,
            began=begin,
            ended=begin + migration_s,
            attributes=_proven(record),
        )


def _leg(facts: Facts, leg: Leg, trace: Trace) -> Span:
    host, port = leg.address
    attributes: dict[str, Value] = {
        "http.request.method": facts.method,
        "server.address": host,
        "server.port": port,
        "kvrelay.worker": leg.worker,
        "kvrelay.outcome": leg.outcome,
    }
    if leg.status:
        attributes["http.response.status_code"] = leg.status
    if leg.problem:
        attributes["error.type"] = leg.problem
    return Span(
        name=f"{leg.role} {leg.worker}",
        kind=Kind.CLIENT,
        span_id=leg.span,
        parent_id=trace.span_id,
        began=facts.at(leg.began),
        ended=facts.at(leg.ended) if leg.ended else facts.ended,
        attributes=attributes,
        error=(leg.problem or f"status {leg.status}") if leg.outcome == "failed" else "",
    )


def _about(facts: Facts) -> dict[str, Value]:
    seen, record = facts.seen, facts.seen.record
    said: dict[str, Value] = {
        "http.request.method": facts.method,
        "http.route": pattern_of(facts.path),
        "url.path": facts.path[:MAX_TEXT],
        "client.address": facts.seen.client,
        "http.request.body.size": facts.request_bytes,
        "http.response.body.size": facts.answer_bytes,
        "kvrelay.request_id": seen.request_id.decode("latin-1")[:MAX_TEXT],
        "kvrelay.outcome": facts.outcome,
    }
    if facts.status:
        said["http.response.status_code"] = facts.status
    if seen.model:
        said["gen_ai.request.model"] = seen.model[:MAX_TEXT]
    if seen.key:
        said["kvrelay.key"] = seen.key
    if facts.usage is not None:
        said["gen_ai.usage.input_tokens"] = facts.usage.prompt_tokens
        said["gen_ai.usage.output_tokens"] = facts.usage.completion_tokens
    if record is not None:
        said |= _handover(record)
        for name, seconds in (
            ("gen_ai.latency.time_to_first_token", facts.ttft_s),
            ("gen_ai.latency.time_in_queue", facts.queue_s),
            ("gen_ai.latency.e2e", facts.seconds),
        ):
            if seconds is not None:
                said[name] = seconds
    return said


def _handover(record: Record) -> dict[str, Value]:
    said: dict[str, Value] = {
        "kvrelay.handover": record.life.name,
        "kvrelay.state": record.life.state.name.lower(),
        "kvrelay.policy": str(record.policy or ""),
        "kvrelay.prefill": record.prefill,
        "kvrelay.decode": record.decode,
        "kvrelay.detours": [detour.reason for detour in record.detours],
    }
    return said | _proven(record)


def _proven(record: Record) -> dict[str, Value]:
    proven = record.summary
    if not proven.proofs:
        return {"kvrelay.proof.proofs": 0}
    return {
        "kvrelay.proof.proofs": proven.proofs,
        "kvrelay.proof.prompt_tokens": proven.prompt_tokens,
        "kvrelay.proof.handed_over_tokens": proven.handed_over_tokens,
        "kvrelay.proof.earlier_tokens": proven.earlier_tokens,
        "kvrelay.proof.local_tokens": proven.local_tokens,
        "kvrelay.proof.recomputed_tokens": proven.recomputed_tokens,
        "kvrelay.proof.reasons": [str(reason) for reason in proven.reasons],
        "kvrelay.proof.bytes": proven.bytes,
        "kvrelay.proof.wait_ms": proven.wait_ms,
        "kvrelay.proof.transfer_ms": proven.transfer_ms,
    }


def _events(record: Record) -> list[tuple[str, float]]:
    stamps = record.life.timestamps
    return [(name, stamps[name]) for name in TIMESTAMPS if name in stamps]
