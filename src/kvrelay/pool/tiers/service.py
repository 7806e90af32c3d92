"""The tiers' shell: threads that carry out what `Tiering` orders, and report to the pool's event loop.

Each tier has three lanes, each a queue with threads of its own, so that neither a slow write nor a long load keeps a
question waiting: looking, loading, storing (and removing). Threads are daemons: one that hangs in a dead mount does not
keep the pool from ending.
"""

from __future__ import annotations

import logging
import math
import queue
import struct
import sys
import threading
import time
from functools import partial
from typing import TYPE_CHECKING

from kvrelay.pool.core.tiering import Tiering, TierRules
from kvrelay.pool.tiers.config import Fill
from kvrelay.pool.tiers.core.orders import Find, Form, Load, Name, Purge, Remove, Store
from kvrelay.pool.tiers.core.tier import Item, Loaded, Outcome, Shape, split_tier_key, tier_key
from kvrelay.pool.tiers.states import tier_state
from kvrelay.transport.checksum import segment_sums

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvrelay.pool.admin.control import TierState
    from kvrelay.pool.core.pool import PoolCore
    from kvrelay.pool.tiers.config import TierConfig
    from kvrelay.pool.tiers.core.orders import Copy, Order
    from kvrelay.pool.tiers.guard import Guard

log = logging.getLogger(__name__)

LOOKERS = 2
"""Threads a tier that only look."""
SWITCH_S = 0.001
"""How long a thread may keep the interpreter while the event loop wants it; Python's own is five times that."""
STOP_S = 5.0
"""How long threads get to end, all together."""

Lane = queue.SimpleQueue["Order | None"]


class TierService:
    """Runs the tiers ``guards`` below the pool of ``core``, whose arena is ``arena``.

    ``post``: has a function called on the event loop, from any thread. ``settle``: called there after every report, to
    carry out what the core decided. Call `dispatch` on the loop after every call into the core.
    """

    def __init__(
        self,
        configs: Sequence[TierConfig],
        guards: Sequence[Guard],
        core: PoolCore,
        arena: memoryview,
        *,
        post: Callable[[Callable[[], None]], object],
        settle: Callable[[], None],
        now: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._configs = tuple(configs)
        self.guards = tuple(guards)
        self.tiering = Tiering(core.catalog, [TierRules(eager=config.fill is Fill.SEALED) for config in configs])
        self._core = core
        self._arena = arena
        self._post = post
        self._settle = settle
        self._now = now
        self._wall = wall
        self._names = [tenant.name for _, tenant in core.tenants]
        self._numbers = {name: number for number, name in enumerate(self._names)}
        self._closed = False
        self._threads: list[tuple[threading.Thread, Lane]] = []
        self._lanes: list[tuple[Lane, Lane, Lane]] = []
        for number, config in enumerate(configs):
            lanes: tuple[Lane, Lane, Lane] = (queue.SimpleQueue(), queue.SimpleQueue(), queue.SimpleQueue())
            self._lanes.append(lanes)
            for what, lane, count in (
                ("look", lanes[0], LOOKERS),
                ("load", lanes[1], config.readers),
                ("store", lanes[2], config.writers),
            ):
                for _ in range(count):
                    thread = threading.Thread(
                        target=self._work, args=(number, lane), name=f"{config.name} {what}", daemon=True
                    )
                    self._threads.append((thread, lane))
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_S))
        for thread, _ in self._threads:
            thread.start()
        core.attach(self.tiering)

    # --- on the event loop ---

    def dispatch(self) -> None:
        """Hand out what has been ordered."""
        for order in self.tiering.take_orders():
            look, load, store = self._lanes[order.tier]
            lane = look if isinstance(order, Find) else load if isinstance(order, Load) else store
            lane.put(order)

    def _report(self, tell: Callable[[float], None], evicted: Sequence[Name], tier: int) -> None:
        """A thread has carried out an order."""
        if self._closed:
            return
        now = self._now()
        tell(now)
        self._core.upkeep.copied()
        if evicted:
            self.tiering.evicted(tier, evicted)
        if rows := self.tiering.take_published():
            self._core.published(_column(rows))
        if rows := self.tiering.take_abandoned():
            self._core.abandoned(_column(rows))
        if handles := self.tiering.take_damaged():
            log.error("%d objects in the arena do not match their checksums any more: forgotten", len(handles))
            self._core.damaged(handles)
        self._core.tick(now)
        self._settle()

    def keep_all(self) -> None:
        """Have all that is in the arena, and in no tier, copied down; `Tiering.keeping` tells when that is done."""
        self.tiering.keep_all()
        self.dispatch()

    def states(self) -> list[TierState]:
        """What the tiers tell of themselves."""
        return [tier_state(config, guard) for config, guard in zip(self._configs, self.guards, strict=True)]

    def close(self) -> None:
        """End the threads and let go of the tiers. A thread that hangs is left behind."""
        self._closed = True
        for guard in self.guards:
            guard.hurry()
        for _, lane in self._threads:
            lane.put(None)
        deadline = time.monotonic() + STOP_S
        for thread, _ in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        for guard, lanes in zip(self.guards, self._lanes, strict=True):
            hanging = [thread.name for thread, lane in self._threads if thread.is_alive() and lane in lanes]
            if hanging:
                log.warning(
                    "tier %s is not closed, because one of its threads hangs: %s", guard.name, ", ".join(hanging)
                )
            else:
                guard.close()

    # --- on the tiers' threads ---

    def _work(self, number: int, lane: Lane) -> None:
        guard = self.guards[number]
        while (order := lane.get()) is not None:
            tell = self._carry_out(guard, order)
            evicted = [self._name(key) for key in guard.take_evicted()] if isinstance(order, Store) else []
            known = [name for name in evicted if name is not None]
            try:
                self._post(partial(self._report, tell, known, number))
            except RuntimeError:  # the loop has ended
                return

    def _carry_out(self, guard: Guard, order: Order) -> Callable[[float], None]:
        """Do it; what to tell the core, with the time."""
        tiering, op = self.tiering, order.op
        match order:
            case Find():
                forms = [self._form(shape) for shape in guard.find(self._keys(order.names), prefix=order.prefix)]
                return lambda now: tiering.found(op, forms, now)
            case Load():
                loaded = self._load(guard, order.copies)
                return lambda now: tiering.loaded(op, loaded, now)
            case Store():
                outcomes = self._store(guard, order.copies)
                return lambda now: tiering.stored(op, outcomes, now)
            case Remove():
                removed = guard.delete(self._keys(order.names)) is not None
                return lambda now: tiering.removed(op, now, done=removed)
            case Purge():
                purged = guard.purge(self._names[order.tenant]) is not None
                return lambda now: tiering.removed(op, now, done=purged)

    def _bytes(self, copy: Copy) -> memoryview:
        return self._arena[copy.offset : copy.offset + copy.form.size]

    def _load(self, guard: Guard, copies: Sequence[Copy]) -> list[Loaded]:
        keys = self._keys([copy.name for copy in copies])
        return guard.load([(key, self._bytes(copy)) for key, copy in zip(keys, copies, strict=True)])

    def _store(self, guard: Guard, copies: Sequence[Copy]) -> list[Outcome]:
        """Store what is undamaged."""
        outcomes = [Outcome.CORRUPT] * len(copies)
        sound: list[int] = []
        items: list[Item] = []
        for number, copy in enumerate(copies):
            data, form = self._bytes(copy), copy.form
            count = form.layers * form.segments
            if struct.pack(f"<{count}Q", *segment_sums(data, form.size // count)) != copy.sums:
                continue
            key = tier_key(self._names[copy.name.tenant], copy.name.key)
            sound.append(number)
            items.append(Item(key, self._shape(form), copy.sums, data))
        for number, outcome in zip(sound, guard.store(items) if items else (), strict=True):
            outcomes[number] = outcome
        return outcomes

    # --- names and times ---

    def _keys(self, names: Sequence[Name]) -> list[bytes]:
        return [tier_key(self._names[name.tenant], name.key) for name in names]

    def _name(self, key: bytes) -> Name | None:
        """What the core calls an object; None: it is of a tenant this pool does not know."""
        tenant, rest = split_tier_key(key)
        number = self._numbers.get(tenant)
        return None if number is None else Name(number, rest)

    def _form(self, shape: Shape | None) -> Form | None:
        if shape is None:
            return None
        left = shape.expires_at - self._wall() if shape.expires_at else math.inf
        return Form(shape.size, shape.layers, shape.segments, self._now() + left)

    def _shape(self, form: Form) -> Shape:
        # In whole seconds, so that an object that comes and goes is known to be the same one.
        expires_at = 0.0 if form.expires == math.inf else float(math.ceil(form.expires - self._now() + self._wall()))
        return Shape(form.size, form.layers, form.segments, expires_at)


def _column(rows: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(rows)}I", *rows)
