"""What the connector counts, on either side, between two reports to vLLM."""

from __future__ import annotations

import threading


class Counters:
    """Named sums; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, float] = {}

    def add(self, name: str, value: float = 1) -> None:
        """Add to a sum."""
        with self._lock:
            self._values[name] = self._values.get(name, 0) + value

    def take(self) -> dict[str, float]:
        """All sums since the last call; empty if nothing happened."""
        with self._lock:
            values, self._values = self._values, {}
        return values
