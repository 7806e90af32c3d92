"""Copying sealed objects down: which, to which tiers, and how many at once.

An object is pinned from the moment it is chosen until every tier it was sent to has answered. Then, if one of them took
it, its row is marked clean: it can be evicted at no loss. An object deleted meanwhile is removed from the tiers again.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from kvrelay.pool.core.row import State
from kvrelay.pool.tiers.core.orders import Copy, Form, Name, Store
from kvrelay.pool.tiers.core.tier import Outcome

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from kvrelay.pool.core.catalog import Catalog, Info
    from kvrelay.pool.tiers.core.clerk import Clerk

BATCH_BYTES = 8 << 20
BATCH_OBJECTS = 64
"""At most in one order."""
PAGE = 1_024
"""Rows looked at for a page of all objects."""
MAX_BACKLOG = 1 << 20
"""Sealed objects remembered for eager tiers that are slower than the writers; the oldest are passed over then."""


class Demotion:
    """One object on its way down. ``waiting``: the tiers that have not answered."""

    __slots__ = ("damaged", "doomed", "handle", "name", "refused", "row", "size", "stored", "waiting")

    def __init__(self, row: int, handle: int, name: Name, size: int) -> None:
        self.row = row
        self.handle = handle
        self.name = name
        self.size = size
        self.waiting: set[int] = set()
        self.stored: set[int] = set()
        self.refused = 0
        self.damaged = False
        self.doomed: set[int] = set()
        """Tiers it must be removed from when they have answered."""


class Sent(NamedTuple):
    """An order under way."""

    tier: int
    demotions: list[Demotion]


class Demoting:
    """All objects on their way down."""

    def __init__(self, catalog: Catalog, clerk: Clerk) -> None:
        self._catalog = catalog
        self._clerk = clerk
        self._by_name: dict[Name, Demotion] = {}
        self._sent: dict[int, Sent] = {}
        self._batches: list[list[tuple[Demotion, Copy]]] = [[] for _ in clerk.tiers]
        self._bytes = [0] * len(clerk.tiers)
        """On their way to each tier."""
        self._eager = [number for number, rules in enumerate(clerk.tiers) if rules.eager]
        self._late = [number for number, rules in enumerate(clerk.tiers) if not rules.eager]
        self._backlog: deque[int] = deque(maxlen=MAX_BACKLOG)
        self._rest: Iterator[int] | None = None
        """Rows that are still to be copied down because the arena will be gone."""
        self.damaged: list[int] = []
        """Handles of objects whose bytes turned out not to match their checksums."""

    # --- choosing ---

    def offer(self, rows: Sequence[int]) -> None:
        """Copy down objects that are about to be evicted, as many as may be under way."""
        tiers = self._late or self._eager
        for row in rows:
            if not self._room(tiers[0]):
                break
            self._begin(row, tiers)
        self._flush()

    def sealed(self, rows: Sequence[int]) -> None:
        """These objects are whole: copy them to the eager tiers, in this order, when there is room."""
        if self._eager:
            self._backlog.extend(self._catalog.handle(row) for row in rows)
            self.pump()

    def keep_all(self) -> None:
        """Copy all there is down, as there is room: the arena will be gone. `keeping` tells when that is done."""
        self._rest = self._all()
        self.pump()

    @property
    def keeping(self) -> bool:
        """Whether anything is still to be copied down, or on its way there, for `keep_all`."""
        return self._rest is not None or bool(self._by_name)

    def _all(self) -> Iterator[int]:
        cursor = 0
        while True:
            rows, cursor = self._catalog.page(None, cursor, PAGE, b"")
            for handle in [self._catalog.handle(row) for row in memoryview(rows).cast("I")]:
                row = self._catalog.row_of(handle)
                if row is not None:  # it may have gone while this waited for room
                    yield row
            if not cursor:
                return

    def pump(self) -> None:
        """Go on with what waits for room: the eager tiers' backlog, and all the rest if the arena will be gone."""
        while self._backlog and all(map(self._room, self._eager)):
            row = self._catalog.row_of(self._backlog.popleft())
            if row is not None:
                self._begin(row, self._eager)
        tiers = self._late or self._eager
        while self._rest is not None and all(map(self._room, tiers)):
            row = next(self._rest, None)
            if row is None:
                self._rest = None
            else:
                self._begin(row, tiers)
        self._flush()

    def _room(self, tier: int) -> bool:
        return self._bytes[tier] < self._clerk.tiers[tier].storing_bytes

    def _begin(self, row: int, tiers: Sequence[int]) -> None:
        info = self._catalog.info(row)
        name = Name(info.tenant, info.key)
        if info.state is not State.SEALED or info.clean or name in self._by_name:
            return
        # What is still being removed from a tier must not be stored there now: the order of the two is not certain.
        chosen = [tier for tier in tiers if self._room(tier) and not self._clerk.gone(tier, name)]
        if not chosen:
            return
        self._catalog.pin(row)
        demotion = self._by_name[name] = Demotion(row, self._catalog.handle(row), name, info.size)
        copy = _copy(name, info, self._catalog.sums(row, 0, info.layers * info.segments))
        for tier in chosen:
            demotion.waiting.add(tier)
            self._bytes[tier] += info.size
            self._batches[tier].append((demotion, copy))

    def _flush(self) -> None:
        for tier, batch in enumerate(self._batches):
            while batch:
                end = size = 0
                while end < len(batch) and end < BATCH_OBJECTS and (not end or size < BATCH_BYTES):
                    size += batch[end][0].size
                    end += 1
                op = self._clerk.number()
                self._sent[op] = Sent(tier, [demotion for demotion, _ in batch[:end]])
                self._clerk.order(Store(op, tier, [copy for _, copy in batch[:end]]))
                del batch[:end]

    # --- answers ---

    def stored(self, op: int, outcomes: Sequence[Outcome]) -> None:
        """An order was answered; an outcome an object. `Outcome.CORRUPT`: its bytes in the arena are damaged."""
        tier, demotions = self._sent.pop(op)
        for demotion, outcome in zip(demotions, outcomes, strict=True):
            self._bytes[tier] -= demotion.size
            demotion.waiting.remove(tier)
            if outcome is Outcome.DONE:
                demotion.stored.add(tier)
            demotion.refused += outcome is Outcome.REFUSED
            demotion.damaged |= outcome is Outcome.CORRUPT
            if tier in demotion.doomed:
                self._clerk.remove(tier, [demotion.name])
                demotion.doomed.discard(tier)
                demotion.stored.discard(tier)
            if not demotion.waiting:
                self._end(demotion)
        self.pump()

    def _end(self, demotion: Demotion) -> None:
        del self._by_name[demotion.name]
        row = demotion.row
        if self._catalog.state(row) is State.SEALED:
            # With tiers of both kinds, having been copied eagerly to one does not spare it the way to the others.
            settled = demotion.stored and (not self._late or not demotion.stored.isdisjoint(self._late))
            # What no tier will ever take is lost when it is evicted, but must not stand in the way of the others.
            if settled or (demotion.refused and not demotion.stored):
                self._catalog.mark_clean(row, True)
            if demotion.damaged:
                self.damaged.append(demotion.handle)
        self._catalog.unpin(row)

    # --- what changes meanwhile ---

    def doom(self, tier: int, name: Name) -> bool:
        """An object is deleted: remove it from a tier once the tier has it. False: it is not on its way there."""
        demotion = self._by_name.get(name)
        if demotion is None:
            return False
        demotion.stored.discard(tier)
        if tier not in demotion.waiting:
            return False
        if tier not in demotion.doomed:
            demotion.doomed.add(tier)
            self._clerk.promise(tier, name)
        return True

    def doom_tenant(self, tier: int, tenant: int) -> None:
        """All of a tenant's objects are deleted."""
        for name in [name for name in self._by_name if name.tenant == tenant]:
            self.doom(tier, name)

    def evicted(self, tier: int, names: Iterable[Name]) -> None:
        """A tier has dropped these: they would be lost if they were evicted from the arena too."""
        for name in names:
            demotion = self._by_name.get(name)
            if demotion is not None:
                demotion.stored.discard(tier)
            row = self._catalog.find(*name)
            if row is not None and self._catalog.info(row).clean:
                self._catalog.mark_clean(row, False)

    @property
    def under_way(self) -> int:
        """Bytes on their way down, counted once for each tier."""
        return sum(self._bytes)

    def protected(self) -> Iterator[int]:
        """Rows that are pinned."""
        return (demotion.row for demotion in self._by_name.values())

    def check_integrity(self) -> None:
        """Raise AssertionError unless bytes under way and pins are accounted for."""
        for tier, size in enumerate(self._bytes):
            sent = [demotion for order in self._sent.values() if order.tier == tier for demotion in order.demotions]
            assert size == sum(demotion.size for demotion in sent)
            assert {d.name for d in sent} == {d.name for d in self._by_name.values() if tier in d.waiting}
            assert size < self._clerk.tiers[tier].storing_bytes + max((d.size for d in sent), default=1)
        for demotion in self._by_name.values():
            assert demotion.waiting
            assert demotion.doomed <= demotion.waiting
            assert self._catalog.row_of(demotion.handle) == demotion.row, "bytes under demotion were given away"
        assert not any(self._batches)


def _copy(name: Name, info: Info, sums: bytes) -> Copy:
    return Copy(name, info.offset, Form(info.size, info.layers, info.segments, info.expires), sums)
