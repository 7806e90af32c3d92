"""The router's metrics, in a registry of its own."""

from __future__ import annotations

from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from kvrelay.router.core.fleet import Role
from kvrelay.router.core.merging import Shown
from kvrelay.router.core.observing.timings import SECONDS, Timings
from kvrelay.router.kv.metrics import KvMetrics
from kvrelay.router.metric_types import Counter, Gauge, Histogram, Told

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvrelay.router.core.fleet import Engine
    from kvrelay.router.core.merging import Snapshot
    from kvrelay.router.core.observing.timings import Series
    from kvrelay.types import Proof

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"


class RouterMetrics:
    """Everything the router counts. Children that are used for every request are looked up once."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        """``engines``: whose series exist from the start."""
        self.registry = registry = CollectorRegistry()
        self.kv = KvMetrics(registry)
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        histogram = partial(Histogram, buckets=SECONDS, registry=registry)
        self.requests = counter(
            "kvrelay_router_requests", "Requests answered, by endpoint and outcome", ("endpoint", "outcome")
        )
        self._engine_requests = counter(
            "kvrelay_router_engine_requests", "Requests sent to an engine", ("role", "engine")
        )
        self._engine_failures = counter(
            "kvrelay_router_engine_failures",
            "Requests an engine did not do its part of, by reason",
            ("role", "engine", "reason"),
        )
        self._resting = gauge(
            "kvrelay_router_engine_resting",
            "1 while an engine is passed over after failures",
            ("role", "engine"),
            merged="max",
        )
        self._picks = counter(
            "kvrelay_router_picks", "Engines chosen, by policy and by why it chose them", ("role", "policy", "why")
        )
        self.decisions = counter(
            "kvrelay_router_decisions",
            "Prompts by whether they were worth a prefill engine, and why",
            ("decision", "why"),
        )
        self.disaggregate_above = gauge(
            "kvrelay_router_disaggregate_above_tokens",
            "Longer prompts are worth a prefill engine, as things stand",
            merged="max",
        )
        self._in_flight = gauge("kvrelay_router_in_flight", "Requests on engines now, by role", ("role",))
        self.timings = Timings(engine.name for engine in engines)
        registry.register(_Timings(self.timings))
        self.detours = counter(
            "kvrelay_router_detours", "Departures from prefill on P, decode on D, by reason", ("reason",)
        )
        self.first_token = counter(
            "kvrelay_router_first_tokens",
            "Streams that were to begin with the prefill side's first token, by what came of it",
            ("outcome",),
        )
        self.prompts_reused = counter(
            "kvrelay_router_prompts_reused",
            "Requests whose decode leg got the prompt as the prefill engine's token ids",
        )
        self.cancelled = counter(
            "kvrelay_router_cancelled", "Requests whose client went away, by the state they were in", ("state",)
        )
        self.tokens = counter(
            "kvrelay_router_prompt_tokens",
            "Prompt tokens by where the decode side's KV came from, as proven",
            ("source",),
        )
        self._recomputed = counter(
            "kvrelay_router_recomputes",
            "Engine requests that recomputed what was to be handed over, by reason",
            ("reason",),
        )
        self._recomputed_tokens = counter(
            "kvrelay_router_recomputed_tokens",
            "Prompt tokens recomputed on the decode side, by reason, as proven",
            ("reason",),
        )
        self.transfer_bytes = counter("kvrelay_router_transfer_bytes", "KV bytes the decode side loaded, as proven")
        self._wait_seconds = histogram(
            "kvrelay_router_kv_wait_seconds",
            "From the decision to load until the KV was there, as proven",
        )
        self._transfer_seconds = histogram("kvrelay_router_kv_transfer_seconds", "Moving and verifying KV, as proven")
        self.retries = counter(
            "kvrelay_router_retries",
            "Requests to be sent to another engine after one failed, and whether they were",
            ("role", "outcome"),
        )
        self.kv_lost = counter(
            "kvrelay_router_kv_lost",
            "Decode legs broken off since their engine could not have the KV, and what then",
            ("reason", "action"),
        )
        self.proofs_missing = counter(
            "kvrelay_router_proofs_missing", "Hand-overs of which the decode side told less than expected"
        )
        self.pool_up = gauge("kvrelay_router_pool_up", "Whether the pool can be reached", merged="min")
        self.circuit_open = gauge(
            "kvrelay_router_circuit_open", "1 while the pool is too slow to be asked for tickets", merged="max"
        )
        self.kv_mismatches = gauge(
            "kvrelay_router_kv_mismatches",
            "Engines that can exchange KV with none of those they are meant for",
            merged="max",
        )
        self.tickets_open = gauge("kvrelay_router_tickets_open", "Hand-overs that hold a pool ticket")
        self.log_lines_dropped = counter(
            "kvrelay_router_access_log_dropped", "Lines of the access log that could not be written in time"
        )
        self._spans = counter(
            "kvrelay_router_spans",
            "Spans made, and what became of them: sent to the collector, or refused by it",
            ("result",),
        )
        self.refused = counter("kvrelay_router_refused", "Requests refused at the entrance, by reason", ("reason",))
        self.waiting = gauge("kvrelay_router_waiting", "Requests that wait for a slot")
        self.admitted = gauge("kvrelay_router_admitted", "Requests that have a slot")
        self.wait_seconds = histogram(
            "kvrelay_router_wait_seconds", "How long requests that were let in had waited for a slot"
        )
        self.key_requests = counter(
            "kvrelay_router_key_requests",
            "Requests answered, by the name of their API key and outcome",
            ("key", "outcome"),
        )
        self.key_tokens = counter(
            "kvrelay_router_key_tokens",
            "Tokens of keys that are limited in them, as told by answers or estimated",
            ("key", "kind"),
        )
        self.sent = {engine: self._engine_requests.labels(engine.role.value, engine.name) for engine in engines}
        self.in_flight = {role: self._in_flight.labels(role.value) for role in Role}
        self.leg_seconds = {role: self.timings.leg.at(role.value) for role in Role}
        for source in ("handed_over", "earlier", "local", "recomputed"):
            self.tokens.labels(source)

    def joined(self, engine: Engine) -> None:
        """An engine has joined: its series exist from now on."""
        self.sent[engine] = self._engine_requests.labels(engine.role.value, engine.name)
        self.timings.welcome(engine.name)

    def left(self, engine: Engine, *, role_only: bool = False) -> None:
        """An engine has left, or has only another role now: its series go."""
        self.sent.pop(engine, None)
        names = {"engine": engine.name, "role": engine.role.value}
        for family in (self._engine_requests, self._engine_failures, self._resting):
            family.remove_all(names)
        if not role_only:
            self.timings.forget(engine.name)

    def picked(self, policy: str, role: Role, why: str) -> None:
        """A policy chose an engine."""
        self._picks.labels(role, policy, why).value += 1

    def engine_failed(self, engine: Engine, reason: str) -> None:
        """``engine`` did not do its part of a request. Of one that has left nothing is counted."""
        if engine not in self.sent:
            return
        self._engine_failures.labels(engine.role.value, engine.name, reason).inc()

    def count_spans(self, result: str, number: int) -> None:
        """So many spans were ``made``, ``sent`` or ``failed``."""
        self._spans.labels(result).inc(number)

    def proven(self, proof: Proof) -> None:
        """The decode side told what it found."""
        self.tokens.labels("handed_over").inc(proof.handed_over_tokens)
        self.tokens.labels("earlier").inc(proof.earlier_tokens)
        self.tokens.labels("local").inc(proof.local_tokens)
        self.tokens.labels("recomputed").inc(proof.recomputed_tokens)
        if proof.reason:
            self._recomputed.labels(proof.reason).inc()
        for reason, tokens in proof.reasons.items():
            self._recomputed_tokens.labels(reason).inc(tokens)
        self.transfer_bytes.inc(proof.bytes)
        if proof.bytes:
            self._wait_seconds.observe(proof.wait_ms / 1e3)
            self._transfer_seconds.observe(proof.transfer_ms / 1e3)

    def refresh(self, engines: Sequence[Engine], now: float) -> None:
        """Set what depends on the time, before it is shown."""
        for engine in engines:
            self._resting.labels(engine.role.value, engine.name).set(engine.health.is_resting(now))

    def render(self) -> bytes:
        """The text exposition."""
        return generate_latest(self.registry)

    def snapshot(self) -> Snapshot:
        """The same as data, to be merged with that of other workers."""
        return tuple(
            Shown(
                metric.name,
                metric.documentation,
                metric.type,
                metric.merged if isinstance(metric, Told) else "sum",
                tuple((sample.name, tuple(sample.labels.items()), float(sample.value)) for sample in metric.samples),
            )
            for metric in self.registry.collect()
        )


def render(snapshot: Snapshot) -> bytes:
    """The text exposition of a snapshot."""
    return generate_latest(_Given(snapshot))


class _Given(CollectorRegistry):
    """Shows a snapshot."""

    def __init__(self, snapshot: Snapshot) -> None:
        super().__init__()
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        """As it was given."""
        for family in self._snapshot:
            metric = Metric(family.name, family.documentation, family.kind)
            for name, labels, value in family.samples:
                metric.add_sample(name, dict(labels), value)
            yield metric


class _Timings(Collector):
    """Shows our own histograms as the registry's."""

    def __init__(self, timings: Timings) -> None:
        self._timings = timings

    def describe(self) -> Iterator[HistogramMetricFamily]:
        """Names alone, by which the registry notices repeated ones."""
        return (HistogramMetricFamily(family.name, family.help, labels=family.labels) for family in self._timings)

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """All series, buckets cumulative."""
        for family, shown in zip(self._timings, self.describe(), strict=True):
            for values, series in family.series.items():
                shown.add_metric(values, _cumulative(series), series.total)
            yield shown


def _cumulative(series: Series) -> list[tuple[str, float]]:
    names = [*map(floatToGoString, series.bounds), "+Inf"]
    return [*zip(names, accumulate(series.counts), strict=True)]
