"""SIEVE (Zhang et al., NSDI'24), and what a larger counter makes of it.

Objects queue in order of arrival and are never moved. A hit raises the object's counter, to at most ``most``. A hand
walks from the oldest to the newest; it takes one off each counter above ``spared`` that it passes, and evicts the
first object whose counter is at or below that. SIEVE is ``most=1, spared=0``.
"""

from __future__ import annotations


class Sieve:
    """A queue that a hand walks through. 0 is no object's number here: numbers are moved by one inside."""

    def __init__(self, most: int = 1, spared: int = 0) -> None:
        self._most = most
        self._spared = spared
        self._newer: dict[int, int] = {0: 0}  # a ring: 0 is before the oldest and after the newest
        self._older: dict[int, int] = {0: 0}
        self._hits: dict[int, int] = {}
        self._hand = 0  # the one to look at next; 0: the oldest

    def __len__(self) -> int:
        return len(self._hits)

    def add(self, item: int) -> None:
        """Queue a new object."""
        item += 1
        newest = self._older[0]
        self._newer[newest] = self._older[0] = item
        self._older[item] = newest
        self._newer[item] = 0
        self._hits[item] = 0

    def hit(self, item: int) -> None:
        """Count a hit."""
        item += 1
        if self._hits[item] < self._most:
            self._hits[item] += 1

    def remove(self, item: int) -> None:
        """Take an object out."""
        item += 1
        del self._hits[item]
        newer, older = self._newer.pop(item), self._older.pop(item)
        self._newer[older] = newer
        self._older[newer] = older
        if self._hand == item:
            self._hand = newer

    def evict(self) -> int:
        """Take out the first object that the hand does not spare."""
        hits, newer = self._hits, self._newer
        hand = self._hand or newer[0]
        while hits[hand] > self._spared:
            hits[hand] -= 1
            hand = newer[hand] or newer[0]
        self._hand = hand
        self.remove(hand - 1)
        return hand - 1
