"""The tiers below the arena, as the pool's core sees them, and the requests that wait for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from kvrelay.pool.core.desk import weight_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvrelay.pool.core.desk import Connection, Desk, Timer

COUNT_S = 0.5
"""How long a request that only asks what is below waits for the tiers' answer."""


class Seeker(Protocol):
    """Whoever wants objects."""

    def looked(self, found: int, now: float) -> None:
        """So many of the keys (the first so many, of a prefix) are there or below; their rows are there, or to come."""

    def settled(self, now: float) -> None:
        """All that can be brought up is there. Called after `looked`, and only if something was to be brought up."""


class Lower(Protocol):
    """Lower tiers: they answer at once, and do their work elsewhere (`kvrelay.pool.core.tiering`).

    What they bring up they write themselves: they reserve rows of the catalog, fill them, publish them, and tell
    `PoolCore.published` or `PoolCore.abandoned`, so that whoever waits learns it.
    """

    demotes: bool
    """Whether objects can be copied down: then only those marked clean are evicted at the high watermark."""

    def seek(
        self, tenant: int, keys: Sequence[bytes], seeker: Seeker | None, now: float, *, bring: bool, prefix: bool = True
    ) -> Any:
        """Look for ``keys`` below and, with ``bring``, bring them up; None: all is known, ``seeker`` has been told.

        ``prefix``: what is behind a key that is nowhere is of no use. ``seeker`` None: nobody needs to be told.
        """

    def cancel(self, seek: Any) -> None:
        """Nobody waits for this any more."""

    def offer(self, rows: bytes, now: float) -> None:
        """These objects will be evicted soon: copy them down, pinned, then `Catalog.mark_clean`. May do less."""

    def sealed(self, rows: Sequence[int]) -> None:
        """These objects have been published. Some may be gone already."""

    def forget(self, tenant: int, keys: Sequence[bytes], now: float) -> None:
        """These objects were deleted, or found damaged: nobody shall be given them from below."""

    def purge(self, tenant: int, now: float) -> None:
        """All of a tenant's objects that nobody uses were deleted: so are all below."""

    def tick(self, now: float) -> None:
        """Let time pass."""

    def next_deadline(self) -> float | None:
        """When `tick` has something to do, at the earliest."""

    def protected(self) -> Iterator[int]:
        """Rows that have a pin of theirs, once for each."""


class Waiting:
    """One request that waits for lower tiers; ``answer`` is given how many of its keys were found, and the time."""

    def __init__(
        self, seeking: Seeking, conn: Connection, answer: Callable[[int, float], None], weight: int, *, settle: bool
    ) -> None:
        self._seeking = seeking
        self.conn = conn
        self.answer = answer
        self.weight = weight
        self.settle = settle
        """Whether it waits until all is there, or only until it is known what will be."""
        self.found = 0
        self.seek: Any = None
        self.timer: Timer | None = None

    def looked(self, found: int, now: float) -> None:
        """It is known what is there."""
        self.found = found
        if not self.settle or not found:
            self._seeking.end(self, now)

    def settled(self, now: float) -> None:
        """All that can be brought up has been."""
        self._seeking.end(self, now)

    def expire(self, now: float) -> None:
        """It has waited long enough."""
        self._seeking.give_up(self)
        self._seeking.end(self, now)


class Seeking:
    """What lies below, if anything, and who waits for it."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self.lower: Lower | None = None
        self.waiting: dict[Waiting, None] = {}

    def ask(
        self,
        conn: Connection,
        keys: Sequence[bytes],
        answer: Callable[[int, float], None],
        now: float,
        *,
        wait_s: float,
        bring: bool,
    ) -> None:
        """Call ``answer`` when ``keys`` are there as far as they are below, or ``wait_s`` is over.

        Raises:
            PoolFullError: the connection holds too much.
        """
        waiting = Waiting(self, conn, answer, weight_of(len(keys)), settle=bring)
        self._begin(conn, keys, waiting, now, wait_s, bring=bring)

    def prefetch(
        self, conn: Connection, keys: Sequence[bytes], answer: Callable[[int, float], None], now: float
    ) -> None:
        """Call ``answer`` when it is known how many of ``keys``, in any order, will be brought up.

        Raises:
            PoolFullError: the connection holds too much.
        """
        waiting = Waiting(self, conn, answer, weight_of(len(keys)), settle=False)
        self._begin(conn, keys, waiting, now, COUNT_S, bring=True, prefix=False)

    def _begin(
        self,
        conn: Connection,
        keys: Sequence[bytes],
        waiting: Waiting,
        now: float,
        wait_s: float,
        *,
        bring: bool,
        prefix: bool = True,
    ) -> None:
        if self.lower is None or not keys:
            waiting.answer(0, now)
            return
        self._desk.hold(conn, waiting.weight)
        self._desk.waiting += 1
        self.waiting[waiting] = conn.seeks[waiting] = None
        seek = self.lower.seek(conn.tenant, keys, waiting, now, bring=bring, prefix=prefix)
        if waiting in self.waiting:
            waiting.seek = seek
            waiting.timer = self._desk.at(now + wait_s, waiting)

    def end(self, waiting: Waiting, now: float) -> None:
        """Answer a request, unless that has been done."""
        if self._remove(waiting):
            waiting.answer(waiting.found, now)

    def give_up(self, waiting: Waiting) -> None:
        """Do not wait for the tiers any more. What is on its way up comes up."""
        if self.lower is not None and waiting.seek is not None:
            self.lower.cancel(waiting.seek)

    def _remove(self, waiting: Waiting) -> bool:
        if waiting not in self.waiting:
            return False
        del self.waiting[waiting]
        del waiting.conn.seeks[waiting]
        waiting.conn.held -= waiting.weight
        self._desk.cancel(waiting.timer)
        self._desk.waiting -= 1
        return True

    def disconnected(self, conn: Connection) -> None:
        """A connection ended."""
        for waiting in list(conn.seeks):
            self._remove(waiting)
            self.give_up(waiting)
