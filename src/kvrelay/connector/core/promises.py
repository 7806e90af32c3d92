"""Promised KV: whether a request has all of it before it claims any, and what then. Pure.

A hand-over whose policy is not to recompute is staged: the workers bring its KV into host memory and verify it, while
the engine is told to ask again. Then it is claimed, and loading it cannot fail. What cannot be had is *lost*: the
router is told, and the request computes nothing until it is aborted, or the patience ends.

What of a group with a window will be loaded depends on where loading ends, which is known, and on the beginning that
the engine's own cache has, which may be less by then: then it is staged again.
"""

from __future__ import annotations

from enum import StrEnum
from itertools import count
from typing import TYPE_CHECKING

from msgspec import Struct

from kvrelay.connector.core.matching import load_end
from kvrelay.connector.core.orders import LoadOrder
from kvrelay.connector.core.requests import Phase
from kvrelay.types import Lost, Reason

if TYPE_CHECKING:
    from kvrelay.connector.core.orders import LoadOutcome
    from kvrelay.connector.core.requests import Entry
    from kvrelay.connector.core.tables import Tables


class State(StrEnum):
    """What is known of one promise."""

    OPEN = "open"
    """Not looked at yet."""
    STAGING = "staging"
    STAGED = "staged"
    """All of it is in the workers' memory."""
    LOST = "lost"
    OVER = "over"
    """Nothing more depends on it: kept, or given up."""


class Event(StrEnum):
    """What happens to it."""

    STAGE = "stage"
    WHOLE = "whole"
    """Every rank has all of it."""
    SHRINK = "shrink"
    """The engine's own cache has less than when staging began."""
    LOSE = "lose"
    GIVE_UP = "give_up"
    """Go on as if nothing was promised."""


TRANSITIONS: dict[tuple[State, Event], State] = {
    (State.OPEN, Event.STAGE): State.STAGING,
    (State.OPEN, Event.LOSE): State.LOST,
    (State.OPEN, Event.GIVE_UP): State.OVER,
    (State.STAGING, Event.WHOLE): State.STAGED,
    (State.STAGING, Event.LOSE): State.LOST,
    (State.STAGING, Event.GIVE_UP): State.OVER,
    (State.STAGED, Event.SHRINK): State.OPEN,
    (State.STAGED, Event.GIVE_UP): State.OVER,
    (State.LOST, Event.GIVE_UP): State.OVER,
}


class Promise(Struct):
    """One request's."""

    state: State = State.OPEN
    number: int = 0
    """Of its staging order, while it has one."""
    start: int = 0
    """Of what is staged, the first token, while it is."""
    ranks: int = 0
    """How many have reported."""
    began: float = 0.0
    """When staging began."""
    until: float = 0.0
    """When staging, or waiting to be aborted, ends."""
    reason: Reason = Reason.NONE
    """Why it is lost."""

    def move(self, event: Event) -> None:
        """Take one transition."""
        self.state = TRANSITIONS[self.state, event]


class Promises:
    """The promises of one engine."""

    def __init__(self, *, ranks: int, tables: Tables, stages: bool, staging_s: float, patience_s: float) -> None:
        """``ranks``: how many workers report; ``stages``: whether they stage.

        ``staging_s``: how long staging may take; ``patience_s``: how long one that is lost waits to be aborted.
        """
        self._ranks = ranks
        self._tables = tables
        self._stages = stages
        self._staging_s = staging_s
        self._patience_s = patience_s
        self._promises: dict[str, Promise] = {}
        self._orders: dict[int, str] = {}
        """Whose each staging order is that is not over."""
        self._numbers = count(1)
        self._new_stages: list[LoadOrder] = []
        self._unstaged: list[int] = []
        self._losses: list[Lost] = []

    def __len__(self) -> int:
        return len(self._promises)

    def add(self, request_id: str) -> None:
        """A request that must not recompute what it was promised."""
        self._promises[request_id] = Promise()

    def under_way(self, request_id: str) -> bool:
        """Whether what the pool holds does not matter now: it is being staged, is staged, or is lost."""
        promise = self._promises.get(request_id)
        return promise is not None and promise.state in (State.STAGING, State.STAGED, State.LOST)

    def staged(self, request_id: str) -> int:
        """Under which number the workers hold it; 0: they do not."""
        promise = self._promises.get(request_id)
        return promise.number if promise is not None and promise.state is State.STAGED else 0

    def may_claim(self, entry: Entry, local: int, now: float) -> bool:
        """Whether the engine may go on with a request of which it has ``local`` tokens; if not, it is to ask again."""
        promise = self._promises.get(entry.request_id)
        if promise is None:
            return True
        if promise.state is State.STAGED and local < promise.start:
            self._unstage(promise)
            promise.move(Event.SHRINK)
        if promise.state is State.OPEN:
            self._look_at(promise, entry, local, now)
        elif promise.state is State.STAGING and local >= entry.prompt_tokens - 1:
            self._unstage(promise)
            promise.move(Event.GIVE_UP)
        elif promise.state is State.STAGING and now >= promise.until:
            self._unstage(promise)
            self._lose(promise, entry, Reason.TIMEOUT, entry.prompt_tokens - local, now)
        elif promise.state is State.LOST and now >= promise.until:
            promise.move(Event.GIVE_UP)
        return promise.state in (State.STAGED, State.OVER)

    def _look_at(self, promise: Promise, entry: Entry, local: int, now: float) -> None:
        found = entry.matched_end if entry.phase is Phase.CLAIMABLE else 0
        missing = entry.prompt_tokens - max(found, local)
        if missing > 1:
            self._lose(promise, entry, entry.reason or Reason.MISS, missing, now)
        elif local >= entry.prompt_tokens - 1 or not self._stages:
            promise.move(Event.GIVE_UP)
        else:
            promise.move(Event.STAGE)
            promise.number = next(self._numbers)
            promise.start, promise.ranks, promise.began, promise.until = local, 0, now, now + self._staging_s
            self._orders[promise.number] = entry.request_id
            end = load_end(found, entry.prompt_tokens, self._tables)
            self._new_stages.append(
                LoadOrder(
                    request_id=entry.request_id,
                    chunks=tuple(chunk for chunk in entry.chunks if local < chunk.end and chunk.start < end),
                    tables=(),
                    starts=tuple(max(local, first) for first in self._tables.all_needed_from(end)),
                    start=local,
                    end=end,
                    staged=promise.number,
                )
            )

    def _lose(self, promise: Promise, entry: Entry, reason: Reason, missing: int, now: float) -> None:
        over = entry.hand_over
        assert over is not None
        promise.move(Event.LOSE)
        promise.reason, promise.until = reason, now + self._patience_s
        self._losses.append(
            Lost(
                lost=str(reason),
                handover=over.id,
                attempt=over.attempt,
                request_id=entry.request_id,
                worker=over.worker,
                prompt_tokens=entry.prompt_tokens,
                missing_tokens=missing,
            )
        )

    def _unstage(self, promise: Promise) -> None:
        self._unstaged.append(promise.number)
        self._orders.pop(promise.number, None)

    def owner(self, number: int) -> str | None:
        """Whose a staging order is; None if nobody waits for it any more."""
        return self._orders.get(number)

    def report(self, entry: Entry, outcome: LoadOutcome, now: float) -> None:
        """Some ranks have ended the staging order of a request."""
        promise = self._promises[entry.request_id]
        promise.ranks += outcome.ranks
        if promise.ranks >= self._ranks or outcome.reason:
            entry.wait_s += now - promise.began
        if outcome.reason is Reason.STAGING_FULL:
            self._unstage(promise)
            promise.move(Event.GIVE_UP)
        elif outcome.reason:
            self._unstage(promise)
            self._lose(promise, entry, outcome.reason, entry.prompt_tokens - outcome.valid_end, now)
        elif promise.ranks >= self._ranks:
            del self._orders[promise.number]
            promise.move(Event.WHOLE)

    def untold(self, request_id: str) -> None:
        """The router could not be told of a loss: nobody will abort it."""
        promise = self._promises.get(request_id)
        if promise is not None and promise.state is State.LOST:
            promise.move(Event.GIVE_UP)

    def claimed(self, request_id: str) -> None:
        """What is staged is ordered loaded: the workers drop it by themselves."""
        self._promises.pop(request_id, None)

    def end(self, request_id: str) -> None:
        """The request is scheduled, or gone; what is staged for it is not wanted any more."""
        promise = self._promises.pop(request_id, None)
        if promise is not None and promise.state in (State.STAGING, State.STAGED):
            self._unstage(promise)

    def take_stages(self) -> tuple[LoadOrder, ...]:
        """What the workers are to stage; each order is given once."""
        orders, self._new_stages = tuple(self._new_stages), []
        return orders

    def take_unstaged(self) -> tuple[int, ...]:
        """Staging orders of which nothing need be brought, or kept, any more."""
        numbers, self._unstaged = tuple(self._unstaged), []
        return numbers

    def take_losses(self) -> list[Lost]:
        """What the router is to be told."""
        losses, self._losses = self._losses, []
        return losses
