"""W-TinyLFU (Einziger et al., ToS'17): a window, then admission by how often an object was asked for in the past.

The past is counted exactly here, where the original counts in a sketch: this is the best it could be.
"""

from __future__ import annotations

from eviction_bench.policies.lists import Queue

_MOST = 15
_PROTECTED = 0.8


class TinyLfu:
    """``window``: share of the objects in the window; of the rest, four fifths are protected. LRU in each."""

    def __init__(self, window: float = 0.01) -> None:
        self._share = window
        self._window, self._probation, self._protected = Queue(), Queue(), Queue()
        self._asked: dict[int, int] = {}
        self._count = 0

    def __len__(self) -> int:
        return len(self._window) + len(self._probation) + len(self._protected)

    def _ask(self, item: int) -> None:
        self._asked[item] = min(_MOST, self._asked.get(item, 0) + 1)
        self._count += 1
        if self._count >= 10 * len(self) + 10:
            self._asked = {item: asked // 2 for item, asked in self._asked.items() if asked > 1}
            self._count //= 2

    def add(self, item: int) -> None:
        """Put a new object into the window."""
        self._ask(item)
        self._window.push(item)

    def hit(self, item: int) -> None:
        """Promote it."""
        self._ask(item)
        if self._window.discard(item):
            self._window.push(item)
            return
        self.remove(item)
        self._protected.push(item)
        while len(self._protected) > _PROTECTED * (1 - self._share) * len(self):
            self._probation.push(self._protected.pop())

    def remove(self, item: int) -> None:
        """Take an object out."""
        if not (self._window.discard(item) or self._probation.discard(item)):
            self._protected.discard(item)

    def evict(self) -> int:
        """Of what left the window last and what is next on probation, the one less often asked for."""
        candidate = None
        while len(self._window) > max(1, self._share * len(self)):
            candidate = self._window.pop()
            self._probation.push(candidate)
        if not self._probation:
            return (self._protected or self._window).pop()
        victim = self._probation.first()
        if candidate is not None and self._asked.get(candidate, 0) <= self._asked.get(victim, 0):
            victim = candidate
        self._probation.discard(victim)
        return victim
