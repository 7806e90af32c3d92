"""The connector's counters in vLLM's own statistics and Prometheus metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

if TYPE_CHECKING:
    from vllm.config import VllmConfig

PLAIN = {
    "saved_tokens": "Tokens, of prompts and answers, whose KV was saved to the pool, on all ranks.",
    "saved_bytes": "KV bytes saved to the pool.",
    "loaded_tokens": "Prompt tokens whose KV was loaded from the pool.",
    "handed_over_tokens": "Prompt tokens whose KV was loaded, and was saved for this hand-over.",
    "local_tokens": "Prompt tokens found in the engine's own prefix cache.",
    "load_wait_seconds": "Time from the decision to load until the KV was there, summed over requests.",
    "load_transfer_seconds": "Time spent moving and verifying bytes on the slowest rank, summed over requests.",
    "staged_bytes": "KV bytes brought into host memory before tokens were claimed.",
    "staging_full": "Requests loaded without staging, since there was no memory left for it.",
    "loaded_bytes": "KV bytes loaded from the pool.",
    "sync_loads": "Loads done in the step that claimed them, before its forward pass.",
    "prompt_tokens": "Prompt tokens of all requests.",
    "lookups_timed_out": "Lookups the pool did not answer in time.",
    "lookups_skipped": "Lookups not begun, since the circuit was open: another had not been answered in time.",
    "circuit_opened": "Times lookups were given up for all requests, since the pool was slow.",
    "circuit_closed": "Times lookups were taken up again, since the pool answered in time.",
}
BY_REASON = {
    "recomputed": "Prompt tokens computed here, by why they were not loaded.",
    "kv_lost": "Requests that could not have the KV they were promised, as the router was told.",
    "load_failed": "Loads that ended with less than was claimed.",
    "not_saved": "Tokens not written, by why (sealed: the pool had them).",
}


class KvRelayStats(KVConnectorStats):  # type: ignore[misc]
    """Sums by name, over one interval."""

    data: dict[str, float]

    def reset(self) -> None:
        """Forget everything."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add another rank's, or interval's, sums to these."""
        for name, value in other.data.items():
            self.data[name] = self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """For vLLM's log line."""
        return dict(sorted(self.data.items()))

    def is_empty(self) -> bool:
        """Whether nothing happened."""
        return not self.data


class KvRelayPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """Counters named ``kvrelay:...`` on vLLM's ``/metrics``."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        make = metric_types[Counter]
        self._plain = {
            name: make(name=f"kvrelay:{name}", documentation=text, labelnames=labelnames)
            for name, text in PLAIN.items()
        }
        self._by_reason = {
            name: make(name=f"kvrelay:{name}", documentation=text, labelnames=[*labelnames, "reason"])
            for name, text in BY_REASON.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one interval's sums."""
        labels = self.per_engine_labelvalues[engine_idx]
        for name, value in transfer_stats_data.items():
            if name in self._plain:
                self._plain[name].labels(*labels).inc(value)
                continue
            for prefix, counter in self._by_reason.items():
                if name.startswith(prefix + "_"):
                    counter.labels(*labels, name.removeprefix(prefix + "_")).inc(value)
