"""Which object to evict next: S3-FIFO (Yang et al., SOSP'23) whose small queue is sized as ARC sizes its lists.

An object is FRESH while the latest tenth of all is: whoever asks for it then takes over what was just written, which
says nothing of its worth. Then it is on TRIAL. If it is asked for before its turn comes it is PROVEN, else it goes. In
the proven queue being asked for saves it for one more round. What goes leaves its **mark**, a hash of its name, in the
ghosts of its queue. An object stored again while its mark is there was let go too early: it is proven at once, and that
queue's share of the objects grows.

Measured against LRU, SIEVE and others in docs/eviction.md. Objects are linked through themselves; each needs one bit
for being asked for and two for its queue.
"""

from __future__ import annotations

from collections import OrderedDict
from enum import IntEnum
from typing import TYPE_CHECKING, Generic, Protocol, Self, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

FRESH_SHARE = 0.1
"""Of the objects."""
LEAST_SHARE = 0.02
"""Of the objects, for the proven on one side and all others on the other."""


class Standing(IntEnum):
    """Which queue an object is in."""

    FRESH = 0
    TRIAL = 1
    PROVEN = 2


class Queued(Protocol):
    """What can queue. Whoever asks for an object sets ``visited``; the rest is the queue's."""

    visited: bool
    standing: Standing
    older: Self | None
    newer: Self | None


Q = TypeVar("Q", bound=Queued)


class _Fifo(Generic[Q]):
    def __init__(self) -> None:
        self.oldest: Q | None = None
        self._newest: Q | None = None
        self.count = 0

    def __iter__(self) -> Iterator[Q]:
        entry = self.oldest
        while entry is not None:
            yield entry
            entry = entry.newer

    def push(self, entry: Q) -> None:
        entry.older = self._newest
        entry.newer = None
        if self._newest is None:
            self.oldest = entry
        else:
            self._newest.newer = entry
        self._newest = entry
        self.count += 1

    def remove(self, entry: Q) -> None:
        if entry.older is None:
            self.oldest = entry.newer
        else:
            entry.older.newer = entry.newer
        if entry.newer is None:
            self._newest = entry.older
        else:
            entry.newer.older = entry.older
        entry.older = entry.newer = None
        self.count -= 1


class Order(Generic[Q]):
    """The three queues and the ghosts. ``moved`` is told of what goes from one queue to another, and where it was."""

    def __init__(self, moved: Callable[[Q, Standing], None] | None = None) -> None:
        self._moved = moved
        self._queues: tuple[_Fifo[Q], _Fifo[Q], _Fifo[Q]] = (_Fifo(), _Fifo(), _Fifo())  # by standing
        self._ghosts: OrderedDict[int, None] = OrderedDict()
        self._proven_ghosts: OrderedDict[int, None] = OrderedDict()
        self.share = 0.5
        """Of the objects, that are not proven, before one of them must go."""

    def __len__(self) -> int:
        fresh, trial, proven = self._queues
        return fresh.count + trial.count + proven.count

    def __iter__(self) -> Iterator[Q]:
        """Every object once, about in the order in which they would go."""
        fresh, trial, proven = self._queues
        for queue in (trial, proven, fresh) if self._unproven_give() else (proven, trial, fresh):
            yield from queue

    def add(self, entry: Q, mark: int) -> None:
        """Queue an object that was stored. ``mark``: a hash of its name."""
        fresh, trial, _ = self._queues
        entry.visited = False
        ghosts, proven_ghosts = len(self._ghosts), len(self._proven_ghosts)
        entry.standing = Standing.PROVEN
        if mark in self._ghosts:
            del self._ghosts[mark]
            self._adjust(max(1.0, proven_ghosts / ghosts))
        elif mark in self._proven_ghosts:
            del self._proven_ghosts[mark]
            self._adjust(-max(1.0, ghosts / proven_ghosts))
        else:
            entry.standing = Standing.FRESH
        self._queues[entry.standing].push(entry)
        while fresh.count > FRESH_SHARE * len(self):
            oldest = fresh.oldest
            assert oldest is not None
            fresh.remove(oldest)
            oldest.visited = False
            trial.push(oldest)
            self._stands(oldest, Standing.TRIAL)

    def remove(self, entry: Q) -> None:
        """Take an object out: it goes for another reason than its worth."""
        self._queues[entry.standing].remove(entry)

    def evict(self, entry: Q, mark: int) -> None:
        """Take an object out and remember it."""
        self.remove(entry)
        if entry.standing is Standing.PROVEN:
            ghosts, most = self._proven_ghosts, len(self) * (1 - self.share)
        else:
            ghosts, most = self._ghosts, len(self)
        ghosts[mark] = None
        ghosts.move_to_end(mark)
        while len(ghosts) > most:
            ghosts.popitem(last=False)

    def victim(self, may: Callable[[Q], bool], idle: Sequence[int] | None = None) -> Q | None:
        """The object to evict next, of those that ``may`` be, or None. It stays queued: as the last, if not evicted.

        ``idle``: how many there are that may be, by standing, kept right by ``moved``. Queues that have none are not
        searched then: with nearly all in use, every victim would cost a walk over everything.
        """
        turns = (
            (Standing.TRIAL, Standing.PROVEN, Standing.FRESH)
            if self._unproven_give()
            else (Standing.PROVEN, Standing.TRIAL, Standing.PROVEN, Standing.FRESH)  # trial may prove some
        )
        search = (self._from_fresh, self._from_trial, self._from_proven)  # by standing
        for standing in turns:
            if idle is None or idle[standing]:
                found = search[standing](may)
                if found is not None:
                    return found
        return None

    def spares(self, entry: Q) -> bool:
        """Whether an object is worth more than those whose turn it is."""
        return entry.visited or entry.standing is Standing.FRESH

    def _unproven_give(self) -> bool:
        fresh, trial, proven = self._queues
        return fresh.count + trial.count >= self.share * len(self) or not proven.count

    def _from_trial(self, may: Callable[[Q], bool]) -> Q | None:
        _, trial, proven = self._queues
        for _ in range(trial.count):
            entry = trial.oldest
            assert entry is not None
            trial.remove(entry)
            if entry.visited:
                entry.visited = False
                proven.push(entry)
                self._stands(entry, Standing.PROVEN)
                continue
            trial.push(entry)
            if may(entry):
                return entry
        return None

    def _from_proven(self, may: Callable[[Q], bool]) -> Q | None:
        _, _, proven = self._queues
        for _ in range(2 * proven.count):  # the first round may only clear the marks
            entry = proven.oldest
            assert entry is not None
            proven.remove(entry)
            proven.push(entry)
            if may(entry):
                if not entry.visited:
                    return entry
                entry.visited = False
        return None

    def _from_fresh(self, may: Callable[[Q], bool]) -> Q | None:
        fresh, _, _ = self._queues
        for _ in range(fresh.count):
            entry = fresh.oldest
            assert entry is not None
            fresh.remove(entry)
            fresh.push(entry)
            if may(entry):
                return entry
        return None

    def _stands(self, entry: Q, standing: Standing) -> None:
        """Note that an entry is in another queue now."""
        before, entry.standing = entry.standing, standing
        if self._moved is not None:
            self._moved(entry, before)

    def _adjust(self, steps: float) -> None:
        share = self.share + steps / (len(self) + 1)
        self.share = min(1 - LEAST_SHARE, max(LEAST_SHARE, share))
