"""The pool's own policy, `kvrelay.pool.core.order`."""

from __future__ import annotations

from kvrelay.pool.core.order import Order, Standing


class _Entry:
    __slots__ = ("item", "newer", "older", "standing", "visited")

    def __init__(self, item: int) -> None:
        self.item = item
        self.visited = False
        self.standing = Standing.FRESH
        self.older: _Entry | None = None
        self.newer: _Entry | None = None


class Adaptive:
    """`Order` over numbers."""

    def __init__(self) -> None:
        self._order: Order[_Entry] = Order()
        self._entries: dict[int, _Entry] = {}

    def __len__(self) -> int:
        return len(self._order)

    def add(self, item: int) -> None:
        """Queue a new object."""
        entry = self._entries[item] = _Entry(item)
        self._order.add(entry, item)

    def hit(self, item: int) -> None:
        """Note a hit."""
        self._entries[item].visited = True

    def remove(self, item: int) -> None:
        """Take an object out."""
        self._order.remove(self._entries.pop(item))

    def evict(self) -> int:
        """Take out what the order gives up next."""
        entry = self._order.victim(lambda _: True)
        assert entry is not None
        self._order.evict(entry, entry.item)
        del self._entries[entry.item]
        return entry.item
