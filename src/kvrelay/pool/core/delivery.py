"""A payload on its way in: where its bytes go, and what they must add up to."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from kvrelay.pool.core.desk import Connection


class Delivery(NamedTuple):
    """What the shell does with a payload.

    ``targets``: offset (None: drop them) and size of each run of bytes, in order. ``offsets``, ``sizes``: u64 columns
    of the pieces to be checksummed; the shell hands back a u64 column of XXH3-64. ``trailer_bytes``: what follows the
    runs, and is handed back as it is.
    """

    targets: list[tuple[int | None, int]]
    offsets: bytes
    sizes: bytes
    trailer_bytes: int = 0


class Incoming(Protocol):
    """Whose payload it is."""

    def arrived(self, conn: Connection, sums: bytes, trailer: bytes, now: float) -> None:
        """All of it is there, with these checksums and this behind it. Answers the request."""

    def lost(self) -> None:
        """The connection ended before."""

    def pinned(self) -> bytes:
        """Rows pinned for it, each as often as it is."""


def runs_of(pieces: list[tuple[int | None, int]]) -> list[tuple[int | None, int]]:
    """The same bytes in as few runs as can be."""
    runs: list[tuple[int | None, int]] = []
    for offset, size in pieces:
        if runs:
            before, length = runs[-1]
            if (before is None and offset is None) or (before is not None and offset == before + length):
                runs[-1] = (before, length + size)
                continue
        runs.append((offset, size))
    return runs
