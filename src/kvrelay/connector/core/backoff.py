"""How long to leave a pool alone that does not answer."""

from __future__ import annotations

from msgspec import Struct


class Backoff(Struct):
    """Doubling delays between attempts, from ``first_s`` to ``most_s``; one success starts it over."""

    first_s: float = 0.1
    most_s: float = 3.0
    failures: int = 0

    def failed(self) -> float:
        """One more attempt failed; seconds until the next."""
        delay = min(self.most_s, self.first_s * 2.0 ** min(self.failures, 30))
        self.failures += 1
        return delay

    def worked(self) -> None:
        """An attempt succeeded."""
        self.failures = 0
