"""Watches requests from arrival to end, and tells histograms, the access log and traces what became of them."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from kvrelay.router.access_log import AccessLog
from kvrelay.router.core.legs import Endpoint
from kvrelay.router.core.observing.forwarding import REQUEST_ID
from kvrelay.router.core.observing.log_line import log_line
from kvrelay.router.core.observing.observation import Facts
from kvrelay.router.core.observing.traceparent import TRACEPARENT
from kvrelay.router.core.observing.usage import count_silent, read_usage
from kvrelay.router.tracing import Tracer

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvrelay.router.core.observing.settings import Observing
    from kvrelay.router.http.messages import Request
    from kvrelay.router.http.reply import Reply
    from kvrelay.router.metrics import RouterMetrics
    from kvrelay.router.tickets import TicketManager

logger = logging.getLogger(__name__)


class Observer:
    """One for a router. Costs little where nothing but metrics is asked for."""

    def __init__(
        self, settings: Observing, metrics: RouterMetrics, tickets: TicketManager | None, now: Callable[[], float]
    ) -> None:
        """``now``: Unix time, as in the hand-overs' records."""
        self._settings = settings
        self._naming = settings.headers.naming
        self._metrics = metrics
        self._tickets = tickets
        self._offset = now() - time.perf_counter()
        self._log: AccessLog | None = None
        self._tracer: Tracer | None = None
        self._waiting: dict[asyncio.Task[None], Facts] = {}
        """Requests that are over, but for what the decode side proves of them."""

    async def start(self) -> None:
        """Open the log, and begin to send traces.

        Raises:
            ConfigError: the log cannot be written.
        """
        settings = self._settings
        if settings.access_log is not None:
            self._log = await AccessLog.open(settings.access_log, self._metrics.log_lines_dropped.inc)
        if settings.traces_url is not None:
            self._loop = asyncio.get_running_loop()
            self._tracer = await asyncio.to_thread(
                Tracer, settings.traces_url, settings.trace_ratio, self._count_in_loop
            )

    def _count_in_loop(self, result: str, number: int) -> None:
        """Metrics are of one thread; the exporter is in another, and may outlive the loop by a moment."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._metrics.count_spans, result, number)

    def reopen(self) -> None:
        """Go on in a new log file: the old one has been renamed."""
        if self._log is not None:
            self._log.reopen()

    async def close(self) -> None:
        """Tell what is not told yet, within a bounded time."""
        for facts in self._waiting.values():
            self._tell(facts)
        self._waiting.clear()
        log, self._log = self._log, None
        tracer, self._tracer = self._tracer, None
        if log is not None:
            await log.close()
        if tracer is not None:
            await tracer.close()

    def arrived(self, request: Request, reply: Reply, name: str, *, traced: bool) -> None:
        """A request has been read. ``name``: what it is called, unless the client has named it."""
        seen = request.seen
        seen.arrived = time.perf_counter()
        if self._log is not None or self._tracer is not None:
            seen.client = reply.client
        named = request.header(REQUEST_ID)
        if not named and len(self._naming) > 1:
            named = next(filter(None, map(request.header, self._naming)), None)
        seen.request_id = named or name.encode()
        reply.always = [(REQUEST_ID, seen.request_id)]
        if traced and self._tracer is not None:
            seen.trace = self._tracer.sampler.trace(request.header(TRACEPARENT))
            seen.new_span = self._tracer.new_span

    def over(self, request: Request, reply: Reply, outcome: str, *, told: bool) -> None:
        """A request has been answered, or its client has left. ``told``: whether the log is to have it."""
        try:
            self._over(request, reply, outcome, told=told)
        except Exception:
            logger.exception("%s %s: answered, but not observed", request.method, request.path)

    def _over(self, request: Request, reply: Reply, outcome: str, *, told: bool) -> None:
        seen, log = request.seen, self._log if told else None
        traced = seen.trace is not None and seen.trace.sampled
        if seen.record is None and log is None and not traced:
            return
        facts = self._facts(request, reply, outcome)
        self._metrics.timings.observe(facts)
        if log is None and not traced:
            return
        settling = None
        if self._tickets is not None and seen.record is not None:
            settling = self._tickets.settling(seen.record.life.name)
        if settling is None:
            self._tell(facts)
        else:
            self._waiting[settling] = facts
            settling.add_done_callback(self._settled)

    def _settled(self, task: asyncio.Task[None]) -> None:
        facts = self._waiting.pop(task, None)
        if facts is not None:
            self._tell(facts)

    def _tell(self, facts: Facts) -> None:
        trace = facts.seen.trace
        if self._log is not None:
            self._log.write(log_line(facts))
        if self._tracer is not None and trace is not None and trace.sampled:
            self._tracer.tell(facts, trace)

    def _facts(self, request: Request, reply: Reply, outcome: str) -> Facts:
        tail, events, chat = reply.tail, reply.num_events, request.path == Endpoint.CHAT
        usage = read_usage(tail)
        if not (chat or request.path == Endpoint.COMPLETIONS):
            events = 0 if usage is None else events  # such streams have events for much else
        elif events:
            events = max(0, events - count_silent(tail, chat=chat))
        return Facts(
            seen=request.seen,
            method=request.method,
            path=request.path,
            outcome=outcome,
            status=reply.status,
            began=request.seen.arrived + self._offset,
            ended=time.perf_counter() + self._offset,
            request_bytes=len(request.body),
            answer_bytes=reply.num_bytes,
            events=events,
            usage=usage,
            offset=self._offset,
        )
