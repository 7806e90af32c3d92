"""ARC (Megiddo and Modha, FAST'03): recency and frequency lists that trade space by what their ghosts are asked for."""

from __future__ import annotations

from eviction_bench.policies.lists import Queue


class Arc:
    """Objects seen once lately (``recent``) and more than once (``frequent``), and ghosts of both."""

    def __init__(self) -> None:
        self._recent, self._frequent = Queue(), Queue()
        self._recent_ghost, self._frequent_ghost = Queue(), Queue()
        self._target = 0.0  # how many objects ``recent`` should have

    def __len__(self) -> int:
        return len(self._recent) + len(self._frequent)

    def add(self, item: int) -> None:
        """Queue a new object, and learn from its ghost."""
        room = len(self) + 1
        recent, frequent = len(self._recent_ghost), len(self._frequent_ghost)
        if self._recent_ghost.discard(item):
            self._target = min(float(room), self._target + max(1.0, frequent / recent))
            self._frequent.push(item)
        elif self._frequent_ghost.discard(item):
            self._target = max(0.0, self._target - max(1.0, recent / frequent))
            self._frequent.push(item)
        else:
            self._recent.push(item)
        while len(self._recent) + len(self._recent_ghost) > room and self._recent_ghost:
            self._recent_ghost.pop()
        while len(self._recent_ghost) + len(self._frequent_ghost) > room and self._frequent_ghost:
            self._frequent_ghost.pop()

    def hit(self, item: int) -> None:
        """Make it the latest of the frequent."""
        self.remove(item)
        self._frequent.push(item)

    def remove(self, item: int) -> None:
        """Take an object out."""
        if not self._recent.discard(item):
            self._frequent.discard(item)

    def evict(self) -> int:
        """Take the oldest of the list that is over its target, and remember it."""
        if self._recent and (len(self._recent) > self._target or not self._frequent):
            item = self._recent.pop()
            self._recent_ghost.push(item)
        else:
            item = self._frequent.pop()
            self._frequent_ghost.push(item)
        return item
