"""What a process of the soak tells its supervisor: counts of what it did, and violations, as lines of JSON."""

from __future__ import annotations

import json
import threading
from collections import Counter
from typing import IO


class Journal:
    """Counts of all clients of a process. Safe for threads."""

    def __init__(self, out: IO[str]) -> None:
        self._out = out
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def count(self, what: str, by: int = 1) -> None:
        """Something happened."""
        with self._lock:
            self._counts[what] += by

    def violation(self, what: str) -> None:
        """Something happened that must not. Told at once."""
        self._tell({"violation": what})

    def flush(self) -> None:
        """Tell what was counted since the last time."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
        self._tell({"counts": counts})

    def _tell(self, line: dict[str, object]) -> None:
        with self._lock:
            self._out.write(json.dumps(line) + "\n")
            self._out.flush()
