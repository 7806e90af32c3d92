"""What is counted of engines' KV cache events, and of token ids."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvrelay.router.counting import Counter, Gauge, Histogram

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
_SOURCE = ("engine", "rank")


class KvMetrics:
    """All of it."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """In the router's registry."""
        self.up = Gauge(
            "kvrelay_router_kv_events_up", "Whether the publisher of an engine's events is connected", _SOURCE,
            registry=registry, merged="min",
        )  # fmt: skip
        self.events = Counter("kvrelay_router_kv_events", "KV cache events taken", _SOURCE, registry=registry)
        self.gaps = Counter(
            "kvrelay_router_kv_event_gaps", "Times that events of an engine were missed", _SOURCE, registry=registry
        )
        self.replays = Counter(
            "kvrelay_router_kv_event_replays", "Replays of an engine's events that came to their end", _SOURCE,
            registry=registry,
        )  # fmt: skip
        self.forgotten = Counter(
            "kvrelay_router_kv_forgotten", "Times that what an engine holds was not known any more, by reason",
            (*_SOURCE, "reason"), registry=registry,
        )  # fmt: skip
        self.blocks = Gauge(
            "kvrelay_router_kv_blocks", "Blocks the engine is known to hold", _SOURCE, registry=registry, merged="max"
        )
        self.skipped = Counter(
            "kvrelay_router_kv_blocks_skipped", "Blocks that were published and not indexed, by reason",
            (*_SOURCE, "reason"), registry=registry,
        )  # fmt: skip
        self.lag_seconds = Gauge(
            "kvrelay_router_kv_lag_seconds", "From the engine's clock to ours, of the last events", _SOURCE,
            registry=registry, merged="max",
        )  # fmt: skip
        self.token_ids = Counter(
            "kvrelay_router_token_ids", "Requests by where their token ids came from before they were routed",
            ("source",), registry=registry,
        )  # fmt: skip
        self.tokenize_seconds = Histogram(
            "kvrelay_router_tokenize_seconds", "What a request waited for its token ids", ("source",),
            buckets=_SECONDS, registry=registry,
        )  # fmt: skip

    def left(self, engine: str, rank: str) -> None:
        """An engine is gone: so are its series."""
        for family in (self.up, self.events, self.gaps, self.replays, self.forgotten, self.blocks, self.skipped,
                       self.lag_seconds):  # fmt: skip
            family.remove_all({"engine": engine, "rank": rank})
