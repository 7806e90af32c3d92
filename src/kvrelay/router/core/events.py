"""Server-sent events pass as bytes; only their ends are looked for.

A stream that breaks off is ended by an error event. That can only be read if what went before ends where an event
ends, so the last, unfinished event is held back until the rest of it is there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvrelay.native import native

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_HELD_BYTES = 256 << 10
"""A longer event (or a stream that is none) is passed on in pieces."""


def _count_ends(data: bytes) -> int:
    return data.count(b"\n\n")


count_ends: Callable[[bytes], int] = getattr(native, "count_event_ends", _count_ends)
"""How many events end in ``data``, by the blank lines behind them."""


class EventCutter:
    """Gives out whole events as soon as they are whole."""

    __slots__ = ("_held",)

    def __init__(self) -> None:
        """Starts between two events."""
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        """The bytes to pass on now, maybe none. In the usual case, ``data`` ends an event, it is ``data`` itself."""
        if self._held:
            data = self._held + data
            self._held = b""
        if data.endswith((b"\n\n", b"\n\r\n")):
            return data
        line_feeds, carriage_returns = data.rfind(b"\n\n"), data.rfind(b"\n\r\n")
        cut = max(line_feeds + 2 if line_feeds >= 0 else 0, carriage_returns + 3 if carriage_returns >= 0 else 0)
        if len(data) - cut > MAX_HELD_BYTES:
            return data
        self._held = data[cut:]
        return data[:cut]

    def rest(self) -> bytes:
        """What is held back at the regular end of the stream."""
        held, self._held = self._held, b""
        return held
