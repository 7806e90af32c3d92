"""A pool's metrics for Prometheus: made from a snapshot when somebody scrapes, never on the data path."""

from __future__ import annotations

from itertools import accumulate
from operator import attrgetter
from typing import TYPE_CHECKING

from msgspec import Struct
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from kvrelay import __version__
from kvrelay.pool.latency import BOUNDS_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from prometheus_client.core import Metric

    from kvrelay.pool.admin.control import Control, TenantState, TierState
    from kvrelay.pool.latency import Latencies
    from kvrelay.pool.traffic import Traffic

PREFIX = "kvrelay_pool_"


class Plain(Struct, frozen=True):
    """A number of `stat` as a metric. ``labels``: fixed ones, for numbers that are one metric together."""

    name: str
    help: str
    counter: bool = False
    labels: tuple[tuple[str, str], ...] = ()


def _gauge(name: str, told: str, **labels: str) -> Plain:
    return Plain(PREFIX + name, told, labels=tuple(labels.items()))


def _counter(name: str, told: str, **labels: str) -> Plain:
    return Plain(PREFIX + name, told, counter=True, labels=tuple(labels.items()))


STATS = {
    "arena_bytes": _gauge("arena_bytes", "Size of the arena"),
    "free_bytes": _gauge("free_bytes", "Bytes of the arena that no object holds"),
    "largest_free_bytes": _gauge("largest_free_bytes", "The largest object that fits without evicting any"),
    "evictable_bytes": _gauge("evictable_bytes", "Bytes of sealed objects that nothing protects"),
    "lingering_bytes": _gauge("lingering_bytes", "Bytes of objects that are gone and may still be touched"),
    "objects": _gauge("objects", "Sealed objects"),
    "unsealed": _gauge("unsealed", "Objects being written"),
    "leases": _gauge("leases", "Read leases"),
    "leased_objects": _gauge("leased_objects", "Objects protected by a lease, a ticket or a transfer"),
    "pinned_objects": _gauge("pinned_objects", "Objects protected by a pin"),
    "tickets": _gauge("tickets", "Open tickets"),
    "waiting": _gauge("waiting", "Requests that are answered when something happens"),
    "sending": _gauge("sending", "Answers whose bytes are on their way"),
    "connections": _gauge("connections", "Connections that said hello"),
    "engines": _gauge("engines", "Registered engines"),
    "index_bytes": _gauge("index_bytes", "Shared memory of the indexes clients of this host look keys up in"),
    "lookups": _counter("lookups", "Lookups clients made there without asking the pool"),
    "requests": _counter("requests", "Requests handled"),
    "request_errors": _counter("request_errors", "Requests answered with an error"),
    "hits": _counter("hits", "Keys asked for that were there, by tier", tier="dram"),
    "misses": _counter("misses", "Keys asked for that were nowhere"),
    "sealed": _counter("sealed", "Objects that became whole"),
    "aborted": _counter("aborted", "Objects given up before they were whole"),
    "evicted_for_room": _counter("evictions", "Objects evicted, by reason", reason="room"),
    "evicted_for_quota": _counter("evictions", "Objects evicted, by reason", reason="quota"),
    "evicted_at_watermark": _counter("evictions", "Objects evicted, by reason", reason="watermark"),
    "lost": _counter("lost", "Objects evicted that no lower tier had, in a pool with lower tiers"),
    "expired_objects": _counter("removed", "Objects forgotten for other reasons", reason="expired"),
    "deleted": _counter("removed", "Objects forgotten for other reasons", reason="deleted"),
    "purged": _counter("removed", "Objects forgotten for other reasons", reason="purged"),
    "refused": _counter("refused", "Objects refused for want of room"),
    "connections_refused": _counter(
        "connections_refused", "Connections refused because their tenant has as many as it may"
    ),
    "corrupt": _counter("corrupt", "Objects found not to match their checksum"),
    "expired_leases": _counter("expired_leases", "Leases and tickets that ran past their deadline"),
}
"""By the number's name in `stat`, which is the metric's too where it has no labels."""
ELSEWHERE = {"evictions", "draining", "received_bytes", "sent_bytes"}
"""Numbers of `stat` that are sums of metrics, or metrics of their own."""
FRAGMENTATION = _gauge(
    "largest_free_ratio", "The largest object that fits, as a share of what is free: 1 without fragmentation"
)
DRAINING = _gauge("draining", "1 while new objects are refused")
INFO = _gauge("info", "Always 1; which version serves")
TENANT = {
    "objects": _gauge("tenant_objects", "Objects of a tenant, sealed or being written"),
    "used_bytes": _gauge("tenant_used_bytes", "Bytes of the arena a tenant holds"),
    "connections": _gauge("tenant_connections", "Connections of a tenant that said hello"),
    "quota.quota_bytes": _gauge("tenant_quota_bytes", "Bytes of the arena a tenant may hold; absent without a quota"),
    "quota.max_objects": _gauge("tenant_max_objects", "Objects a tenant may have; absent without a limit"),
    "quota.max_connections": _gauge("tenant_max_connections", "Connections a tenant may have; absent without a limit"),
}
TIER = {
    "up": _gauge("tier_up", "0 while a lower tier has failed and is passed over"),
    "objects": _gauge("tier_objects", "Objects in a lower tier"),
    "used_bytes": _gauge("tier_used_bytes", "Bytes in a lower tier"),
    "capacity_bytes": _gauge("tier_capacity_bytes", "Bytes a lower tier may hold; absent without a bound"),
    "hits": _counter("tier_hits", "Objects a lower tier had when it was asked"),
    "misses": _counter("tier_misses", "Objects it had not"),
    "read_bytes": _counter("tier_read_bytes", "Bytes brought up from a lower tier"),
    "written_bytes": _counter("tier_written_bytes", "Bytes written down to a lower tier"),
    "errors": _counter("tier_errors", "Operations a lower tier failed"),
    "corrupt": _counter("tier_corrupt", "Objects that came back from a lower tier damaged"),
    "evictions": _counter("tier_evictions", "Objects a lower tier dropped to make room"),
    "looks": _counter("tier_looks", "Questions to a lower tier, of any number of objects"),
    "look_seconds": _counter("tier_look_seconds", "Time these took"),
    "reads": _counter("tier_reads", "Loads from a lower tier, of any number of objects"),
    "read_seconds": _counter("tier_read_seconds", "Time these took, without waiting for the bandwidth cap"),
    "writes": _counter("tier_writes", "Stores to a lower tier, of any number of objects"),
    "write_seconds": _counter("tier_write_seconds", "Time these took, without waiting for the bandwidth cap"),
    "throttled_seconds": _counter("tier_throttled_seconds", "Time loads and stores waited for the bandwidth cap"),
}
BYTES = _counter("bytes", "Payload moved over sockets, by direction and transport (unix, tcp or tls)")
LATENCY = _gauge("request_seconds", "From a request's arrival, payload included, until it was handled")


def described() -> dict[str, tuple[set[str], str]]:
    """Every metric's name as it is scraped, with its labels and what it means."""
    plain = [(entry, set[str]()) for entry in (*STATS.values(), FRAGMENTATION, DRAINING)]
    plain += [(entry, {"tenant"}) for entry in TENANT.values()] + [(entry, {"tier"}) for entry in TIER.values()]
    plain += [(BYTES, {"direction", "transport"}), (LATENCY, {"operation"}), (INFO, {"version"})]
    found: dict[str, tuple[set[str], str]] = {}
    for entry, labels in plain:
        name = f"{entry.name}_total" if entry.counter else entry.name
        found[name] = (labels | {label for label, _ in entry.labels}, entry.help)
    return found


class Snapshot(Struct, frozen=True, kw_only=True):
    """What the pool's loop hands out for one scrape."""

    stats: Mapping[str, int]
    draining: bool
    tenants: Sequence[TenantState]
    tiers: Sequence[TierState]
    received: Mapping[str, int]
    """Bytes by transport."""
    sent: Mapping[str, int]
    latencies: Mapping[str, tuple[tuple[int, ...], float]]


class PoolMetrics:
    """The metrics of one pool."""

    def __init__(self, control: Control, latencies: Latencies, traffic: Traffic) -> None:
        self._control = control
        self._latencies = latencies
        self._traffic = traffic
        self._process = CollectorRegistry()
        ProcessCollector(registry=self._process)

    def snapshot(self) -> Callable[[], bytes]:
        """To be called in the pool's loop; what it returns renders the text exposition, in any thread."""
        snapshot = Snapshot(
            stats=self._control.stats(),
            draining=self._control.draining,
            tenants=self._control.tenants(),
            tiers=self._control.tiers(),
            received=dict(self._traffic.received),
            sent=dict(self._traffic.sent),
            latencies=self._latencies.snapshot(),
        )
        return lambda: self.render(snapshot)

    def render(self, snapshot: Snapshot) -> bytes:
        """The text exposition of a snapshot."""
        registry = CollectorRegistry()
        registry.register(_Collected(families(snapshot)))
        return generate_latest(registry) + generate_latest(self._process)


class _Collected:
    """Metric families as a collector."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = list(metrics)

    def collect(self) -> Iterable[Metric]:
        """Give them."""
        return self._metrics

    def describe(self) -> Iterable[Metric]:
        """No names are checked beforehand: the registry is made for one scrape."""
        return ()


def families(snapshot: Snapshot) -> Iterator[Metric]:
    """All metrics of a snapshot."""
    stats = snapshot.stats
    yield from _grouped((STATS[name], (), value) for name, value in stats.items() if name in STATS)
    free = stats["free_bytes"]
    yield from _grouped([
        (FRAGMENTATION, (), stats["largest_free_bytes"] / free if free else 1.0),
        (DRAINING, (), float(snapshot.draining)),
        (INFO, (("version", __version__),), 1.0),
    ])  # fmt: skip
    yield from _grouped(
        (BYTES, (("direction", direction), ("transport", transport)), moved)
        for direction, by_transport in (("received", snapshot.received), ("sent", snapshot.sent))
        for transport, moved in by_transport.items()
    )
    yield from _rows(TENANT, "tenant", snapshot.tenants)
    yield from _rows(TIER, "tier", snapshot.tiers)
    histogram = HistogramMetricFamily(LATENCY.name, LATENCY.help, labels=["operation"])
    for operation, (counts, total) in snapshot.latencies.items():
        edges = [*(str(bound) for bound in BOUNDS_S), "+Inf"]
        histogram.add_metric([operation], list(zip(edges, accumulate(counts), strict=True)), total)
    yield histogram


def _rows(table: Mapping[str, Plain], label: str, rows: Sequence[TenantState | TierState]) -> Iterator[Metric]:
    for name, plain in table.items():
        value_of = attrgetter(name)
        values = [(plain, ((label, row.name),), value_of(row)) for row in rows]
        yield from _grouped(value for value in values if value[2] is not None)


def _grouped(values: Iterable[tuple[Plain, tuple[tuple[str, str], ...], float]]) -> Iterator[Metric]:
    """One family a name, whatever the order."""
    found: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
    for plain, more, value in values:
        labels = dict((*plain.labels, *more))
        family = found.get(plain.name)
        if family is None:
            kind = CounterMetricFamily if plain.counter else GaugeMetricFamily
            family = found[plain.name] = kind(plain.name, plain.help, labels=list(labels))
        family.add_metric(list(labels.values()), value)
    yield from found.values()
