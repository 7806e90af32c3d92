"""What a policy must do."""

from __future__ import annotations

from typing import Protocol


class Policy(Protocol):
    """Chooses what to evict. An object is *in* from `add` until `evict` returns it or `remove` takes it."""

    def __len__(self) -> int:
        """How many objects are in."""
        ...

    def add(self, item: int) -> None:
        """An object that is not in was stored. It may have been in before."""
        ...

    def hit(self, item: int) -> None:
        """An object that is in was asked for."""
        ...

    def remove(self, item: int) -> None:
        """An object that is in is deleted, for a reason that is not the policy's."""
        ...

    def evict(self) -> int:
        """Take out the object that is worth least. There is one."""
        ...
