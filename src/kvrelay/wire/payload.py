"""The bytes behind a message, as something that is moved."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class Payload(Protocol):
    """Bytes on their way. For one thread at a time."""

    @property
    def left(self) -> int:
        """Bytes not moved yet."""

    @property
    def incoming(self) -> bool:
        """Whether they are received, not sent."""

    @property
    def sums(self) -> bytes:
        """XXH3-64 of every summed buffer, packed u64. RuntimeError: not all have been moved."""

    @property
    def trailer(self) -> bytes:
        """What came behind the pieces. RuntimeError: it is not there yet."""

    def window(self, max_bytes: int, /) -> list[memoryview]:
        """Where the next bytes are, up to about ``max_bytes``: valid until the next call."""

    def advance(self, count: int, /) -> None:
        """Note that ``count`` bytes of the last window have been moved."""

    def fill(self, data: ReadableBuffer, /) -> int:
        """Copy bytes that arrived already to where they belong; how many."""
