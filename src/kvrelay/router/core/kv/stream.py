"""One source's stream of events: numbers, gaps, replays, restarts. Pure: it is told what arrived, and says what to do.

vLLM numbers its batches from 0 and publishes them to whoever listens: what is published while nobody does, or faster
than it is read, is lost. The last thousands of batches are kept and can be asked for again, from a number on. So:

* at first everything from 0 on is asked for, and what is kept is taken;
* a number that is not the next one is a gap: what is missing is asked for. Where that cannot be had, what the source
  holds is not known any more: it is forgotten, and known again as far as later batches tell;
* an engine that restarts begins at 0 again, perhaps unseen. So a replay begins with the last batch that was taken, and
  goes on only if that is, byte for byte, the same batch. After a lost connection, and in a long silence, that is asked
  even if there is no gap.

Where an engine offers no replay, a gap or a lost connection means to forget.
"""

from __future__ import annotations

from collections import deque
from typing import TypeAlias

from msgspec import Struct
from xxhash import xxh3_64_intdigest

REPLAY_TIMEOUT_S = 10.0
"""For one replay, from asking to its end."""
SILENCE_S = 30.0
"""After so long without a batch the source is asked whether there is one: the last may have been lost."""
MAX_WAITING = 10_000
"""Batches that arrive during a replay and are kept until it ends; more are a gap."""


class Ask(Struct, frozen=True):
    """Ask for all batches from this number on. Answers to what was asked before are of no use any more."""

    first: int


class Apply(Struct, frozen=True):
    """Take a batch."""

    payload: bytes


class Forget(Struct, frozen=True):
    """What the source holds is not known any more."""

    why: str
    """``gap``: batches are lost; ``restart``: it is another life of the engine; ``unanswered``: it may be, and does not
    replay; ``connection``: what was missed while there was none cannot be asked for."""


Action: TypeAlias = Ask | Apply | Forget


class Stream:
    """State of one stream. Every method answers what is to be done, in order."""

    def __init__(self, *, replays: bool) -> None:
        """``replays``: whether batches can be asked for again."""
        self._replays = replays
        self._last: int | None = None
        """The number of the batch taken last."""
        self._print = 0
        """Its fingerprint."""
        self._live = -1
        """The highest number that was published to us, in this life of the engine."""
        self._asked = False
        self._verified = False
        """Whether the replay has shown the last batch as we know it."""
        self._due = 0.0
        """When to ask again, whether or not an answer is waited for."""
        self._waiting: deque[tuple[int, bytes]] = deque()
        self.gaps = 0
        self.replays = 0
        """Replays that came to their end."""
        self.restarts = 0

    @property
    def due(self) -> float | None:
        """When to call `tick`, if nothing arrives before; None: never."""
        return self._due if self._replays else None

    def start(self, now: float) -> list[Action]:
        """We begin to listen."""
        return [self._ask(now)] if self._replays else []

    def live(self, number: int, payload: bytes, now: float) -> list[Action]:
        """A batch was published."""
        if self._asked:
            if len(self._waiting) >= MAX_WAITING:
                self._waiting.clear()
            self._waiting.append((number, payload))
            return []
        self._due = now + SILENCE_S
        return self._take(number, payload, now, can_ask=True)

    def replayed(self, number: int, payload: bytes, now: float) -> list[Action]:
        """A batch that was asked for."""
        if not self._asked:
            return []
        self._due = now + REPLAY_TIMEOUT_S
        last = self._last
        if last is None:
            return [self._apply(number, payload)]
        if number < last or (number == last and self._verified):
            return []
        if number == last:
            if xxh3_64_intdigest(payload) == self._print:
                self._verified = True
                return []
            self.restarts += 1
            return [self._forget("restart"), self._ask(now)]
        if not self._verified or number > last + 1:
            return [self._forget("gap"), self._apply(number, payload)]
        return [self._apply(number, payload)]

    def replay_ended(self, now: float) -> list[Action]:
        """All that was asked for, and is kept, is here."""
        if not self._asked:
            return []
        self.replays += 1
        if self._last is not None and not self._verified:
            self.restarts += 1  # it has not come so far: it is another
            return [self._forget("restart"), self._ask(now)]
        return self._go_on(now)

    def disconnected(self, now: float) -> list[Action]:
        """The connection is lost. It is looked for again by itself."""
        self._waiting.clear()
        self._live = -1
        if self._replays:
            return [self._ask(now)]
        return [self._forget("connection")] if self._last is not None else []

    def tick(self, now: float) -> list[Action]:
        """Time has passed; call it when `due` is over."""
        if not self._replays or now < self._due:
            return []
        if not self._asked or not self._waiting:
            return [self._ask(now)]
        # Batches come, answers do not: whether it is the engine we knew is not known.
        unsure = self._last is not None and not self._verified
        return [*([self._forget("unanswered")] if unsure else []), *self._go_on(now)]

    def _ask(self, now: float) -> Ask:
        self._asked, self._verified = True, False
        self._due = now + REPLAY_TIMEOUT_S
        return Ask(self._last or 0)

    def _go_on(self, now: float) -> list[Action]:
        """No more is replayed: take what was published meanwhile. A gap that is still there stays one."""
        self._asked = False
        self._due = now + SILENCE_S
        actions: list[Action] = []
        waiting, self._waiting = self._waiting, deque()
        for number, payload in waiting:
            if self._last is None or number > self._last:  # else the replay was faster
                actions += self._take(number, payload, now, can_ask=False)
        return actions

    def _take(self, number: int, payload: bytes, now: float, *, can_ask: bool) -> list[Action]:
        """A published batch. ``can_ask``: whether what is missing may be there."""
        last, seen = self._last, self._live
        self._live = number
        if last is not None and number <= last:
            if number > seen and not (number == last and xxh3_64_intdigest(payload) != self._print):
                return []  # a replay was faster
            self.restarts += 1
            forget = self._forget("restart")
            if self._replays:
                self._waiting.append((number, payload))
                return [forget, self._ask(now)]
            return [forget, self._apply(number, payload)]
        if number == (0 if last is None else last + 1):
            return [self._apply(number, payload)]
        if last is None and not self._replays:
            return [self._apply(number, payload)]
        self.gaps += 1
        if can_ask and self._replays:
            self._waiting.append((number, payload))
            return [self._ask(now)]
        lost = [self._forget("gap")] if last is not None else []
        return [*lost, self._apply(number, payload)]

    def _apply(self, number: int, payload: bytes) -> Apply:
        self._last, self._print, self._verified = number, xxh3_64_intdigest(payload), True
        return Apply(payload)

    def _forget(self, why: str) -> Forget:
        self._last, self._verified = None, False
        return Forget(why)
