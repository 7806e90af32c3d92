"""What is counted of engines' KV cache events, and of token ids."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from kvrelay.router.metric_types import Counter, Gauge, Histogram

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
_SOURCE = ("engine", "rank")


class KvMetrics:
    """All of it."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """In the router's registry."""
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        self.up = gauge(
            "kvrelay_router_kv_events_up",
            "Whether the publisher of an engine's events is connected",
            _SOURCE,
            merged="min",
        )
        self.events = counter("kvrelay_router_kv_events", "KV cache events taken", _SOURCE)
        self.gaps = counter("kvrelay_router_kv_event_gaps", "Times that events of an engine were missed", _SOURCE)
        self.replays = counter(
            "kvrelay_router_kv_event_replays", "Replays of an engine's events that came to their end", _SOURCE
        )
        self.forgotten = counter(
            "kvrelay_router_kv_forgotten",
            "Times that what an engine holds was not known any more, by reason",
            (*_SOURCE, "reason"),
        )
        self.blocks = gauge("kvrelay_router_kv_blocks", "Blocks the engine is known to hold", _SOURCE, merged="max")
        self.skipped = counter(
            "kvrelay_router_kv_blocks_skipped",
            "Blocks that were published and not indexed, by reason",
            (*_SOURCE, "reason"),
        )
        self.lag_seconds = gauge(
            "kvrelay_router_kv_lag_seconds",
            "From the engine's clock to ours, of the last events",
            _SOURCE,
            merged="max",
        )
        self.token_ids = counter(
            "kvrelay_router_token_ids",
            "Requests by where their token ids came from before they were routed",
            ("source",),
        )
        self.tokenize_seconds = Histogram(
            "kvrelay_router_tokenize_seconds",
            "What a request waited for its token ids",
            ("source",),
            buckets=_SECONDS,
            registry=registry,
        )

    def left(self, engine: str, rank: str) -> None:
        """An engine is gone: so are its series."""
        for family in (self.up, self.events, self.gaps, self.replays, self.forgotten, self.blocks, self.skipped,
                       self.lag_seconds):  # fmt: skip
            family.remove_all({"engine": engine, "rank": rank})
