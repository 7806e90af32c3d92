"""Least recently used, and first in first out."""

from __future__ import annotations

from eviction_bench.policies.lists import Queue


class Fifo:
    """Evicts what was stored first."""

    def __init__(self) -> None:
        self._queue = Queue()

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, item: int) -> None:
        """Queue a new object."""
        self._queue.push(item)

    def hit(self, item: int) -> None:
        """Change nothing."""

    def remove(self, item: int) -> None:
        """Take an object out."""
        self._queue.discard(item)

    def evict(self) -> int:
        """Take the oldest out."""
        return self._queue.pop()


class Lru(Fifo):
    """Evicts what was not asked for or stored for the longest time."""

    def hit(self, item: int) -> None:
        """Move to the end."""
        self._queue.discard(item)
        self._queue.push(item)
