"""Something that happens amid a transfer: before a given batch is copied, or a given answer taken. For tests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvrelay.client.core.blocks import Mover
    from kvrelay.testing.paths import Blocking, Looped


class Hooked:
    """A mover that does something before its ``at``-th batch."""

    def __init__(self, mover: Mover, at: int, hook: Callable[[], None]) -> None:
        self._mover = mover
        self._left = at
        self._hook = hook

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._mover, name)

        def counted(*args: Any) -> Any:
            self._left -= 1
            if self._left == 0:
                self._hook()
            return method(*args)

        return counted


def hook(client: Blocking | Looped, at: int, what: Callable[[], None]) -> None:
    """Have something happen amid a client's next transfer, before its ``at``-th batch is copied or answered."""
    connections: Sequence[Any] = getattr(client.client, "clients", [client.one])
    for connection in connections:
        direct = connection._ops.whole.direct
        if direct is not None:
            direct._mover = Hooked(connection._mover, at, what)
        else:
            connection._session.on_message = Counted(connection._session.on_message, at, what)


class Counted:
    """A session's ``on_message`` that does something before its ``at``-th answer."""

    def __init__(self, on_message: Callable[..., Any], at: int, hook: Callable[[], None]) -> None:
        self._on_message = on_message
        self._left = at
        self._hook = hook

    def __call__(self, *args: Any) -> Any:
        """An answer."""
        self._left -= 1
        if self._left == 0:
            self._hook()
        return self._on_message(*args)
