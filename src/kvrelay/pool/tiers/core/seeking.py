"""Looking for objects below and bringing them up.

A **seek** is one request's keys, in order. What it misses is looked for in tier after tier; an object that is found is
given a row, as one being written, and loaded; where only a prefix of the keys is of use, as soon as all keys before it
are known to be there too. A **quest** is one key's way through this, shared by all seeks that want it, so that no
object is loaded twice.

::

    LOOKING in tier 0, 1, ... ──found──► LOCATED ──its turn──► WAITING for room ──► LOADING ──► settled: sealed
        └──nowhere: settled, absent                                  └── no room ──────┴── damaged, failed: next tier
"""

from __future__ import annotations

from collections import Counter, deque
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, Protocol

from kvrelay.pool.core.row import State
from kvrelay.pool.tiers.core.orders import Copy, Find, Form, Load, Name
from kvrelay.pool.tiers.core.tier import Loaded, Outcome

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvrelay.pool.core.catalog import Catalog
    from kvrelay.pool.tiers.core.clerk import Clerk

BATCH_BYTES = 4 << 20
BATCH_OBJECTS = 64
"""At most in one order: its objects are published together."""
MAX_QUESTS = 1 << 17
"""Keys looked for at once for one tenant; more are taken to be absent."""


class Seeker(Protocol):
    """Whoever wants objects."""

    def looked(self, found: int, now: float) -> None:
        """So many of the keys (the first so many, of a prefix) are there or below; their rows are there, or to come."""

    def settled(self, now: float) -> None:
        """All that can be brought up is there. Called after `looked`, and only if something was to be brought up."""


class Stage(Enum):
    """Where a quest is."""

    LOOKING = 0
    LOCATED = 1
    WAITING = 2
    LOADING = 3


class Quest:
    """One key that is looked for. ``tier``: where it is looked for, or was found."""

    __slots__ = ("form", "name", "row", "seeks", "stage", "tier")

    def __init__(self, name: Name) -> None:
        self.name = name
        self.tier = 0
        self.stage = Stage.LOOKING
        self.form: Form | None = None
        self.row = -1
        self.seeks: list[Seek] = []


class Seek:
    """One request's keys. ``quests``: a quest a key, None for what was there already.

    ``bring``: what is found is brought up, not only counted. ``prefix``: what is behind a missing key is of no use.
    """

    def __init__(self, seeker: Seeker, *, bring: bool, prefix: bool) -> None:
        self.seeker = seeker
        self.bring = bring
        self.prefix = prefix
        self.found = 0
        self.quests: list[Quest | None] = []
        self.at = 0
        """The first key of which it is not known yet whether it is anywhere."""
        self.open = True
        """Whether its prefix may still grow."""
        self.loading: set[Quest] = set()
        self.pins: list[int] = []
        """Rows brought up for it, kept for it until it is settled."""
        self.over = False


class Limits(NamedTuple):
    """``loading_bytes``: how much may be on its way up at once."""

    loading_bytes: int


class Seeking:
    """All seeks and quests."""

    def __init__(self, catalog: Catalog, clerk: Clerk, limits: Limits) -> None:
        self._catalog = catalog
        self._clerk = clerk
        self._limits = limits
        self._quests: dict[Name, Quest] = {}
        self._sought: Counter[int] = Counter()
        """Quests of each tenant."""
        self._finds: dict[int, list[Quest]] = {}
        self._loads: dict[int, list[Quest]] = {}
        self._waiting: deque[Quest] = deque()
        self._ready: list[list[Quest]] = [[] for _ in clerk.tiers]
        self._seeks: set[Seek] = set()
        self._stirred: deque[Seek] = deque()
        """Seeks of which more may be known than was acted on."""
        self._news: deque[tuple[Seek, bool]] = deque()
        """Whom to tell that it was looked (False), or that all is settled (True)."""
        self.loading_bytes = 0
        self.no_room = 0
        """Objects found below for which there was no room."""
        self.published: list[int] = []
        """Rows that have been filled and sealed, for whoever waits for them."""
        self.abandoned: list[int] = []
        """Rows that will not be filled; they are still held."""

    # --- beginning and end of a seek ---

    def seek(
        self, tenant: int, keys: Sequence[bytes], seeker: Seeker, now: float, *, bring: bool, prefix: bool
    ) -> Seek | None:
        """Look for ``keys``; None: all is known already, and ``seeker`` has been told."""
        seek = Seek(seeker, bring=bring, prefix=prefix)
        self._seeks.add(seek)
        begun: list[Quest] = []
        for key in keys:
            name = Name(tenant, key)
            quest = self._quests.get(name)
            if quest is None and self._catalog.find(tenant, key) is None:
                if self._sought[tenant] >= MAX_QUESTS:
                    break
                quest = self._quests[name] = Quest(name)
                self._sought[tenant] += 1
                begun.append(quest)
            if quest is not None:
                quest.seeks.append(seek)
            seek.quests.append(quest)
        self._look(0, begun, prefix=prefix)
        self._stirred.append(seek)
        self._work(now)
        return None if seek.over else seek

    def cancel(self, seek: Seek) -> None:
        """Nobody waits for this any more. What is on its way up comes up."""
        if not seek.over:
            seek.over = True
            self._news = deque(news for news in self._news if news[0] is not seek)
            self._close(seek)

    def _close(self, seek: Seek) -> None:
        self._seeks.discard(seek)
        for quest in seek.quests:
            self._leave(quest, seek)
        seek.quests, seek.loading = [], set()
        self._unpin(seek)

    def _leave(self, quest: Quest | None, seek: Seek) -> None:
        """A seek does not need a quest; one that nobody needs and that is not under way is dropped."""
        if quest is None or seek not in quest.seeks:
            return
        quest.seeks.remove(seek)
        if not quest.seeks and quest.stage in {Stage.LOCATED, Stage.WAITING}:
            self._give_up(quest)

    def _give_up(self, quest: Quest) -> None:
        if self._quests.get(quest.name) is quest:
            del self._quests[quest.name]
            self._sought[quest.name.tenant] -= 1

    def _unpin(self, seek: Seek) -> None:
        for row in seek.pins:
            self._catalog.unpin(row)
        seek.pins = []

    # --- looking ---

    def _look(self, tier: int, quests: Sequence[Quest], *, prefix: bool = False) -> None:
        if not quests:
            return
        op = self._clerk.number()
        for quest in quests:
            quest.tier, quest.stage = tier, Stage.LOOKING
        self._finds[op] = list(quests)
        last = tier == len(self._clerk.tiers) - 1
        self._clerk.order(Find(op, tier, [quest.name for quest in quests], prefix and last))

    def found(self, op: int, forms: Sequence[Form | None], now: float) -> None:
        """A `Find` was answered."""
        absent: list[Quest] = []
        for quest, form in zip(self._finds.pop(op), forms, strict=True):
            if self._quests.get(quest.name) is not quest:  # its object was deleted meanwhile
                if quest.row >= 0:
                    self._let_go(quest)
                continue
            gone = form is None or form.expires <= now or self._clerk.gone(quest.tier, quest.name)
            other = quest.row >= 0 and form is not None and form[:3] != _form(quest)[:3]
            if form is None or gone or other:
                absent.append(quest)
                continue
            quest.form = form
            quest.stage = Stage.LOCATED
            if quest.row >= 0:  # it has a row from an attempt at a faster tier
                quest.stage = Stage.LOADING
                self._ready[quest.tier].append(quest)
            elif not quest.seeks:
                self._give_up(quest)
            self._stirred.extend(quest.seeks)
        self._further(absent)
        self._work(now)

    def _further(self, quests: Sequence[Quest]) -> None:
        """These are not where they were looked for: look in the next tier, or give up."""
        onward: dict[int, list[Quest]] = {}
        for quest in quests:
            if quest.tier + 1 < len(self._clerk.tiers) and (quest.seeks or quest.row >= 0):
                onward.setdefault(quest.tier + 1, []).append(quest)
            else:
                if quest.row >= 0:
                    self._let_go(quest)
                self._drop(quest)
        for tier, some in onward.items():
            self._look(tier, some, prefix=all(seek.prefix for quest in some for seek in quest.seeks))

    def _work(self, now: float) -> None:
        """Act on all that is known, and tell whom it concerns."""
        while self._stirred or self._admit():
            if self._stirred:
                self._advance(self._stirred.popleft())
        self._flush()
        while self._news:
            seek, settled = self._news.popleft()
            if not settled:
                seek.seeker.looked(seek.found, now)
                continue
            if seek.bring:
                seek.seeker.settled(now)
            self._close(seek)

    def _advance(self, seek: Seek) -> None:
        """See how far a seek's keys are known, and bring up what is newly known to be of use."""
        while seek.open and not seek.over:
            if seek.at == len(seek.quests):
                self._end(seek)
                return
            quest = seek.quests[seek.at]
            if quest is None:
                seek.found += 1
            elif self._quests.get(quest.name) is not quest:
                if self._catalog.find(*quest.name) is not None:
                    seek.found += 1
                elif seek.prefix:
                    self._end(seek)
                    return
            elif quest.stage is Stage.LOOKING and quest.row < 0:
                return
            else:
                seek.found += 1
                if seek.bring:
                    seek.loading.add(quest)
                    if quest.stage is Stage.LOCATED and quest.row < 0:
                        quest.stage = Stage.WAITING
                        self._waiting.append(quest)
            seek.at += 1

    def _end(self, seek: Seek) -> None:
        """All is known of a seek's keys; those behind a missing one are of no use."""
        seek.open = False
        behind = seek.quests[seek.at :]
        del seek.quests[seek.at :]
        for quest in behind:
            if quest not in seek.loading:
                self._leave(quest, seek)
        self._news.append((seek, False))
        self._settle(seek)

    def _settle(self, seek: Seek) -> None:
        if not (seek.over or seek.open or seek.loading):
            seek.over = True
            self._news.append((seek, True))

    # --- loading ---

    def _admit(self) -> bool:
        """Give rows to those whose turn it is, as far as bytes may be under way; whether anything changed."""
        while self._waiting and self.loading_bytes < self._limits.loading_bytes:
            quest = self._waiting.popleft()
            if self._quests.get(quest.name) is not quest:
                continue
            form, row = _form(quest), None
            if self._catalog.find(*quest.name) is None:
                if (missing := form.size - self._catalog.free_bytes) > 0:  # what is not lost with it goes first
                    self._catalog.trim(missing, clean=True)
                row = self._catalog.add(*quest.name, form.size, form.layers, form.segments)
                self.no_room += row is None
            if row is None:  # no room; or somebody writes it, which is as good
                self._drop(quest)
                return True
            self._catalog.hold(row)
            quest.row = row
            quest.stage = Stage.LOADING
            self.loading_bytes += form.size
            self._ready[quest.tier].append(quest)
        return False

    def _flush(self) -> None:
        for tier, ready in enumerate(self._ready):
            while ready:
                end = size = 0
                while end < len(ready) and end < BATCH_OBJECTS and (not end or size < BATCH_BYTES):
                    size += _form(ready[end]).size
                    end += 1
                op = self._clerk.number()
                self._loads[op] = ready[:end]
                copies = [Copy(q.name, self._catalog.geometry(q.row)[0], _form(q)) for q in ready[:end]]
                self._clerk.order(Load(op, tier, copies))
                del ready[:end]

    def loaded(self, op: int, results: Sequence[Loaded], now: float) -> None:
        """A `Load` was answered: what is whole is sealed, the rest is looked for further down."""
        failed: list[Quest] = []
        for quest, result in zip(self._loads.pop(op), results, strict=True):
            wanted = self._quests.get(quest.name) is quest and self._catalog.state(quest.row) is State.WRITING
            if wanted and result.outcome is not Outcome.DONE:
                failed.append(quest)
                continue
            if wanted:
                self._publish(quest, result.sums)
            else:  # it was deleted meanwhile
                self._let_go(quest)
            self._drop(quest)
        self._further(failed)
        self._work(now)

    def _publish(self, quest: Quest, sums: bytes) -> None:
        form, row = _form(quest), quest.row
        self._catalog.seal(row, sums, form.expires)
        self._catalog.touch(row)
        # What came from further below shall lie in the fastest tier too when it leaves the arena again.
        self._catalog.mark_clean(row, quest.tier == 0)
        for seek in quest.seeks:
            if quest in seek.loading:
                self._catalog.pin(row)
                seek.pins.append(row)
        self.published.append(row)
        self.loading_bytes -= form.size
        quest.row = -1

    def _let_go(self, quest: Quest) -> None:
        """Give up a quest's row."""
        row, quest.row = quest.row, -1
        self.loading_bytes -= _form(quest).size
        if self._catalog.state(row) is State.WRITING:
            self.abandoned.append(row)
        else:
            self._catalog.unhold(row)

    def _drop(self, quest: Quest) -> None:
        """A quest is over; its seeks go on without it."""
        self._give_up(quest)
        seeks, quest.seeks = quest.seeks, []
        for seek in seeks:
            if quest in seek.loading:
                seek.loading.discard(quest)
                self._settle(seek)
        self._stirred.extend(seeks)

    # --- what changes meanwhile ---

    def forget(self, name: Name, now: float) -> None:
        """An object was deleted: it is not brought up any more. Its row, if it has one, has lost its name already."""
        quest = self._quests.get(name)
        if quest is not None:
            self._drop(quest)
            self._work(now)

    def forget_tenant(self, tenant: int, now: float) -> None:
        """All of a tenant's objects were deleted."""
        for name in [name for name in self._quests if name.tenant == tenant]:
            self.forget(name, now)

    def protected(self) -> Iterator[int]:
        """Rows that are pinned, once for each pin."""
        for seek in self._seeks:
            yield from seek.pins

    @property
    def quests(self) -> int:
        """Keys that are looked for or on their way up."""
        return len(self._quests)

    def check_integrity(self) -> None:
        """Raise AssertionError unless rows, bytes and seeks are accounted for."""
        under_way = [quest for order in self._loads.values() for quest in order]
        looking = [quest for order in self._finds.values() for quest in order]
        rows = [quest.row for quest in {*under_way, *looking} if quest.row >= 0]
        assert len(rows) == len(set(rows)), "two quests share a row"
        assert self.loading_bytes == sum(_form(q).size for q in {*under_way, *looking} if q.row >= 0)
        names = [q.name for q in under_way if self._quests.get(q.name) is q]
        assert len(names) == len(set(names)), "an object is brought up twice"
        for quest in under_way:
            info = self._catalog.info(quest.row)
            assert info.held, "bytes that are being filled can be given away"
            assert info.state is not State.SEALED
        for name, quest in self._quests.items():
            assert quest.name == name
            if quest.stage is Stage.LOOKING:
                assert quest in looking
            elif quest.stage is Stage.LOADING:
                assert quest in under_way
            elif quest.stage is Stage.WAITING:
                assert quest in self._waiting
            else:
                assert quest.seeks, "nobody needs it, and it is not under way"
        for seek in self._seeks:
            assert not seek.over
            assert seek.open or seek.loading
            assert all(quest is None or seek in quest.seeks or quest not in seek.loading for quest in seek.quests)
            assert all(self._quests.get(quest.name) is quest for quest in seek.loading)
        assert not any(self._ready)
        assert +self._sought == Counter(name.tenant for name in self._quests)


def _form(quest: Quest) -> Form:
    assert quest.form is not None
    return quest.form
