"""S3-FIFO (Yang et al., SOSP'23): a small queue for new objects, a main one for those asked for again, and a ghost."""

from __future__ import annotations

from eviction_bench.policies.lists import Queue

_MOST = 3


class S3Fifo:
    """``small``: share of the objects that the small queue holds. An object asked for ``again`` times in it is kept."""

    def __init__(self, small: float = 0.1, again: int = 2) -> None:
        self._share = small
        self._again = again
        self._small = Queue()
        self._main = Queue()
        self._ghost = Queue()
        self._hits: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._hits)

    def add(self, item: int) -> None:
        """Queue a new object: in the main queue if it was evicted from the small one not long ago."""
        self._hits[item] = 0
        (self._main if self._ghost.discard(item) else self._small).push(item)

    def hit(self, item: int) -> None:
        """Count a hit."""
        self._hits[item] = min(_MOST, self._hits[item] + 1)

    def remove(self, item: int) -> None:
        """Take an object out."""
        del self._hits[item]
        if not self._small.discard(item):
            self._main.discard(item)

    def evict(self) -> int:
        """Take one out of the small queue while that is over its share, else out of the main one."""
        share = self._share * len(self)
        while self._small and (len(self._small) >= share or not self._main):
            item = self._small.pop()
            if self._hits[item] >= self._again:
                self._hits[item] = 0
                self._main.push(item)
                continue
            self._remember(item)
            del self._hits[item]
            return item
        while True:
            item = self._main.pop()
            if not self._hits[item]:
                del self._hits[item]
                return item
            self._hits[item] -= 1
            self._main.push(item)

    def _remember(self, item: int) -> None:
        self._ghost.push(item)
        while len(self._ghost) > len(self):
            self._ghost.pop()
