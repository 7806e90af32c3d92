"""A list of numbers, each at most once, whose members can be taken out from anywhere."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


class Queue:
    """First in, first out."""

    def __init__(self) -> None:
        self._items: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, item: int) -> bool:
        return item in self._items

    def __iter__(self) -> Iterator[int]:
        return iter(self._items)

    def push(self, item: int) -> None:
        """Add at the end."""
        self._items[item] = None

    def discard(self, item: int) -> bool:
        """Take ``item`` out; whether it was in."""
        if item in self._items:
            del self._items[item]
            return True
        return False

    def pop(self) -> int:
        """Take the first out."""
        return self._items.popitem(last=False)[0]

    def first(self) -> int:
        """The first; it stays in."""
        return next(iter(self._items))
