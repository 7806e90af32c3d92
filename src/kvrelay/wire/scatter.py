"""A sequence of buffers moved piece by piece by system calls that may stop anywhere."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

MAX_VECTORS = 1_024
"""Linux's IOV_MAX: buffers in one ``sendmsg`` or ``recvmsg_into``."""


class Scatter:
    """Buffers to fill, or to send, in order: `window` is what the next call gets, `advance` says how far it got."""

    __slots__ = ("_buffers", "left")

    def __init__(self, buffers: Iterable[memoryview] = ()) -> None:
        self._buffers: deque[memoryview] = deque()
        self.left = 0
        """Bytes not moved yet."""
        for buffer in buffers:
            self.append(buffer)

    def append(self, buffer: memoryview) -> None:
        """Add a buffer of bytes at the end; empty ones are dropped."""
        if buffer.nbytes:
            self._buffers.append(buffer)
            self.left += buffer.nbytes

    @property
    def first(self) -> memoryview:
        """What is left of the first buffer."""
        return self._buffers[0]

    def window(self, max_bytes: int | None = None) -> list[memoryview]:
        """The next buffers, at most `MAX_VECTORS` and, when given, at most ``max_bytes`` in all."""
        if max_bytes is None or max_bytes >= self.left:
            if len(self._buffers) <= MAX_VECTORS:
                return list(self._buffers)
            return [self._buffers[i] for i in range(MAX_VECTORS)]
        window: list[memoryview] = []
        for buffer in self._buffers:
            if not max_bytes or len(window) == MAX_VECTORS:
                break
            piece = buffer[:max_bytes]
            window.append(piece)
            max_bytes -= piece.nbytes
        return window

    def advance(self, count: int) -> None:
        """Drop the first ``count`` bytes: they have been moved."""
        self.left -= count
        buffers = self._buffers
        while count:
            size = buffers[0].nbytes
            if size > count:
                buffers[0] = buffers[0][count:]
                return
            buffers.popleft()
            count -= size
