"""Spans to an OpenTelemetry collector, by OpenTelemetry's own exporter, in a thread of its own.

The only module that imports `opentelemetry`, and only where an endpoint is set (the extra ``kvrelay[otel]``). Spans
come finished: they are made of a request's facts when it is over, so nothing of the SDK runs while one is answered.
"""

from __future__ import annotations

import asyncio
import importlib.util
import random
from typing import TYPE_CHECKING

import kvrelay
from kvrelay.router.core.observing.spans import Kind, spans_of
from kvrelay.router.core.observing.traceparent import Sampler

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
    from opentelemetry.trace import SpanContext

    from kvrelay.router.core.observing.observation import Facts
    from kvrelay.router.core.observing.spans import Span
    from kvrelay.router.core.observing.traceparent import Trace

CLOSE_TIMEOUT_S = 3.0
"""For spans that wait, when the router stops; a collector that is away would be tried for ten seconds."""
SERVICE = "kvrelay-router"
_MODULES = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http.trace_exporter")


def tracing_problem() -> str | None:
    """Why no traces can be made here; None if they can."""
    try:
        if all(importlib.util.find_spec(name) is not None for name in _MODULES):
            return None
    except ModuleNotFoundError:
        pass
    return "--otlp-endpoint needs OpenTelemetry's SDK, which is not installed: pip install 'kvrelay[otel]'"


class Tracer:
    """Begins traces, and sends their spans."""

    def __init__(self, traces_url: str, ratio: float, counted: Callable[[str, int], None]) -> None:
        """``traces_url``: for OTLP over HTTP, whole. ``ratio``: see `Sampler`.

        ``counted(result, n)`` is called from any thread: so many spans were ``made``, ``sent`` or ``failed``.
        """
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        # Not for secrets: ids that should differ.
        self._random = random.Random()  # noqa: S311
        self.sampler = Sampler(ratio, self._random.getrandbits)
        self._counted = counted
        self._resource = _resource()
        self._exporter = _counting(OTLPSpanExporter(endpoint=traces_url), counted)
        self._processor = BatchSpanProcessor(self._exporter)

    def new_span(self) -> int:
        """A new span's id."""
        return self.sampler.new_id(64)

    def tell(self, facts: Facts, trace: Trace) -> None:
        """Send a sampled request's spans, some time. Where too many wait the oldest are dropped."""
        made = [_readable(span, trace, self._resource) for span in spans_of(facts, trace, self.new_span)]
        for span in made:
            self._processor.on_end(span)
        self._counted("made", len(made))

    async def close(self) -> None:
        """Send what waits, within a bounded time."""
        closing = asyncio.create_task(asyncio.to_thread(self._processor.shutdown))
        await asyncio.wait({closing}, timeout=CLOSE_TIMEOUT_S)
        self._exporter.shutdown()  # breaks off what is still tried
        await asyncio.wait({closing}, timeout=CLOSE_TIMEOUT_S)


def _resource() -> Resource:
    from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource

    found = Resource.create()  # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES count
    ours = {SERVICE_VERSION: kvrelay.__version__}
    if str(found.attributes[SERVICE_NAME]).startswith("unknown_service"):
        ours[SERVICE_NAME] = SERVICE
    return found.merge(Resource(ours))


def _counting(inner: SpanExporter, counted: Callable[[str, int], None]) -> SpanExporter:
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

    class Counting(SpanExporter):
        def __init__(self) -> None:
            self.closed = False

        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            result = inner.export(spans)
            counted("sent" if result is SpanExportResult.SUCCESS else "failed", len(spans))
            return result

        def shutdown(self) -> None:
            if not self.closed:
                self.closed = True
                inner.shutdown()

    return Counting()


def _readable(span: Span, trace: Trace, resource: Resource) -> ReadableSpan:
    from opentelemetry.sdk.trace import Event, ReadableSpan
    from opentelemetry.trace import SpanKind
    from opentelemetry.trace.status import Status, StatusCode

    return ReadableSpan(
        name=span.name,
        context=_context(trace, span.span_id, remote=False),
        parent=_context(trace, span.parent_id, remote=span.remote_parent) if span.parent_id else None,
        resource=resource,
        attributes=span.attributes,
        events=[Event(name, timestamp=_ns(moment)) for name, moment in span.events],
        kind=SpanKind.SERVER if span.kind is Kind.SERVER else SpanKind[span.kind.name],
        status=Status(StatusCode.ERROR, span.error) if span.error else Status(),
        start_time=_ns(span.began),
        end_time=_ns(span.ended),
    )


def _context(trace: Trace, span_id: int, *, remote: bool) -> SpanContext:
    from opentelemetry.trace import SpanContext, TraceFlags

    return SpanContext(trace.trace_id, span_id, is_remote=remote, trace_flags=TraceFlags(trace.flags))


def _ns(moment: float) -> int:
    return int(moment * 1e9)
