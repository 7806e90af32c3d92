"""One line of the access log: JSON, with what an operator looks for, and nothing of what was said."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct, field

from kvrelay.router.core.lifecycle import TIMESTAMPS

if TYPE_CHECKING:
    from kvrelay.router.core.observing.observation import Facts

MAX_TEXT = 256
"""Of what clients choose: names and paths."""


class LogLine(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Fields without a value are left out. Durations are milliseconds."""

    time: str
    """When the request had been read: RFC 3339, UTC."""
    request_id: str
    client: str
    method: str
    path: str
    status: int
    """Of the answer; 0 if the client left before there was one."""
    outcome: str
    duration_ms: float
    request_bytes: int
    answer_bytes: int
    """Of the body, before chunked framing."""
    handover: str = ""
    key: str = ""
    model: str = ""
    trace_id: str = ""
    prefill: str = ""
    decode: str = ""
    """The engine that answered."""
    prefill_legs: int = 0
    """Requests to prefill engines; above 1 there were retries."""
    decode_legs: int = 0
    detours: list[str] = field(default_factory=list)
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    handed_over_tokens: int | None = None
    """As proven; so are the next two."""
    cached_tokens: int | None = None
    recomputed_tokens: int | None = None
    queue_ms: float | None = None
    ttft_ms: float | None = None
    prefill_ms: float | None = None
    migration_ms: float | None = None
    decode_ms: float | None = None
    itl_ms: float | None = None
    at_ms: dict[str, float] = field(default_factory=dict)
    """The hand-over's timestamps, after ``time``."""


_encode = msgspec.json.Encoder().encode


def log_line(facts: Facts) -> bytes:
    """The line, with its end."""
    seen = facts.seen
    said: dict[str, Any] = {}
    if facts.usage is not None:
        said["prompt_tokens"] = facts.usage.prompt_tokens
        said["completion_tokens"] = facts.usage.completion_tokens
    if seen.trace is not None and seen.trace.sampled:
        said["trace_id"] = seen.trace.name
    if (record := seen.record) is not None:
        stamps = record.life.timestamps
        said |= {
            "handover": record.life.name,
            "prefill": record.prefill,
            "detours": [detour.reason for detour in record.detours],
            "ttft_ms": _ms(facts.ttft_s),
            "prefill_ms": _ms(facts.prefill_s),
            "migration_ms": _ms(facts.migration_s),
            "decode_ms": _ms(facts.decode_s),
            "itl_ms": _ms(facts.itl_s),
            "at_ms": {name: _ms(stamps[name] - facts.began) for name in TIMESTAMPS if name in stamps},
        }
        if (proven := record.summary).proofs:
            said.setdefault("prompt_tokens", proven.prompt_tokens)
            said["handed_over_tokens"] = proven.handed_over_tokens
            said["cached_tokens"] = proven.earlier_tokens + proven.local_tokens
            said["recomputed_tokens"] = proven.recomputed_tokens
    line = LogLine(
        time=_rfc3339(facts.began),
        request_id=seen.request_id.decode("latin-1")[:MAX_TEXT],
        client=facts.seen.client,
        method=facts.method,
        path=facts.path[:MAX_TEXT],
        status=facts.status,
        outcome=facts.outcome,
        duration_ms=_ms(facts.seconds) or 0.0,
        request_bytes=facts.request_bytes,
        answer_bytes=facts.answer_bytes,
        key=seen.key,
        model=seen.model[:MAX_TEXT],
        decode=facts.decoder,
        prefill_legs=len(facts.legs("prefill")),
        decode_legs=len(facts.legs("decode")),
        queue_ms=_ms(facts.queue_s) if facts.asked else None,
        **said,
    )
    return _encode(line) + b"\n"


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 3)


def _rfc3339(moment: float) -> str:
    return datetime.fromtimestamp(moment, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
