"""One request on the scheduler's side: its phase, and every move between phases, in a table."""

from __future__ import annotations

import math
from enum import StrEnum
from typing import TYPE_CHECKING

from msgspec import Struct, field

from kvrelay.types import Reason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvrelay.connector.core.growth import Growth
    from kvrelay.connector.core.orders import Placed
    from kvrelay.identity.core.chunks import Chunk


class Phase(StrEnum):
    """Where a request stands between its lookup and its end."""

    NEW = "new"
    LOOKING = "looking"
    """A lookup is under way."""
    CLAIMABLE = "claimable"
    """The pool holds a prefix, under a lease of ours."""
    LOADING = "loading"
    """The engine gave it blocks; the workers fill them."""
    SETTLED = "settled"
    """Nothing (more) to load: the engine may compute."""
    ENDED = "ended"
    """The engine finished it; kept only while the engine waits for a report of ours."""


class Event(StrEnum):
    """What moves a request."""

    LOOK = "look"
    MATCH = "match"
    SETTLE = "settle"
    CLAIM = "claim"
    LOADED = "loaded"
    END = "end"


TRANSITIONS: dict[tuple[Phase, Event], Phase] = {
    (Phase.NEW, Event.LOOK): Phase.LOOKING,
    (Phase.NEW, Event.SETTLE): Phase.SETTLED,
    (Phase.LOOKING, Event.MATCH): Phase.CLAIMABLE,
    (Phase.LOOKING, Event.SETTLE): Phase.SETTLED,
    (Phase.CLAIMABLE, Event.CLAIM): Phase.LOADING,
    # The engine took none of it, or the pool was lost with the lease.
    (Phase.CLAIMABLE, Event.SETTLE): Phase.SETTLED,
    # The lease grew old while the engine had no blocks to spare.
    (Phase.CLAIMABLE, Event.LOOK): Phase.LOOKING,
    (Phase.LOADING, Event.LOADED): Phase.SETTLED,
    # Preempted and asked for again.
    (Phase.SETTLED, Event.LOOK): Phase.LOOKING,
    **{(phase, Event.END): Phase.ENDED for phase in Phase if phase is not Phase.ENDED},
}


class IllegalTransitionError(RuntimeError):
    """A bug: an event that cannot happen in this phase. Carries the request's story."""


class HandOver(Struct, frozen=True):
    """What the router says of a request in ``kv_transfer_params["kvrelay"]``."""

    id: str
    leg: str
    """``prefill`` or ``decode``."""
    worker: str
    """The router's name for this engine."""
    prefill: str = ""
    """Who prefilled; empty if nobody did, or this is the prefill leg."""
    policy: str = ""
    """An `OnLostKv`; empty: the engine's own."""
    attempt: int = 1
    """Which decode leg of the hand-over this is."""
    overlapped: bool = False
    """The prefill leg is under way: what the pool does not have yet is being computed."""
    generated: int = 0
    """How many tokens at the prompt's end the prefill engine generated: it computed, and saved, those before."""


class Entry(Struct, kw_only=True):
    """Everything the ledger knows of one request."""

    request_id: str
    prompt_tokens: int
    chunks: tuple[Chunk, ...]
    """Of its prompt; empty when it can be neither saved nor loaded."""
    hand_over: HandOver | None
    phase: Phase = Phase.NEW
    story: list[str] = field(default_factory=list)

    # loading
    matched_end: int = 0
    """Tokens the pool holds, from the first on, while claimable."""
    matched_bytes: int = 0
    """Of the objects that hold them."""
    sealed: bool = False
    """All of them are sealed."""
    far: bool = False
    """They are in a pool that lends no memory here."""
    placed: Placed | None = None
    """Where they are, if that is known."""
    near: bool = False
    """What may be loaded of them, when the engine last asked, may be loaded synchronously."""
    early: bool = False
    """More is claimed than the pool holds, or would be: it is being computed."""
    lease: int = 0
    """Our read lease on them; 0: none."""
    look_again_at: float = 0.0
    local: int = 0
    """Tokens in the engine's own prefix cache, when it last asked."""
    claim: tuple[int, int] | None = None
    """Tokens being loaded, while loading."""
    claimed_at: float = 0.0
    failed: bool = False
    """A load failed: never again for this request."""
    reason: Reason = Reason.NONE
    """Why less than the whole prompt was loaded, when known."""
    found_end: int = 0
    """Tokens the pool said it holds, from the first on, at the last lookup."""
    short: Reason = Reason.NONE
    """Why it does not hold more."""
    fresh: tuple[Chunk, ...] = ()
    """What was written for this hand-over, of what it holds."""
    awaited: bool = False
    """The workers bring it into memory of their own, or hold it: what becomes of the pool does not matter now."""
    staged: int = 0
    """Number of the staging order under which they hold it; 0: they do not."""
    bytes: int = 0
    transfer_s: float = 0.0
    wait_s: float = 0.0
    scheduled: bool = False
    """It has been computed on at least once."""
    ran: bool = False
    """It was computed on since its last lookup: if it is asked about again, it has lost its blocks."""
    unread: bool = False
    """The engine takes no external KV for it."""

    # saving
    growth: Growth | None = None
    """Chunks that what it generates completes; None if those are not saved."""
    next_chunk: int = 0
    """Chunks before it have been ordered saved, or need not be: those of the prompt, then those of its growth."""
    orders: int = 0
    """Save orders given; every rank ends each once."""
    orders_ended: int = 0
    """By all ranks together."""
    held: bool = False
    """Finished, and the engine keeps its blocks for our saves."""
    known: Sequence[int] = ()
    """Tokens of it that are certain: the engine's own list, to which it appends."""
    put_off: int | None = None
    """What its last step completed was not ordered saved: what it came from may have failed to be loaded. So many
    tokens were certain then; once there are more, that step is over."""
    doubted: bool = False
    """It is being looked at whether its name still holds: nothing of it is saved until that is known."""
    rest: tuple[int, Sequence[Sequence[int]]] | None = None
    """Finished while it was not known whether it may be saved, after a synchronous load in this step or in doubt:
    tokens computed, into which blocks."""

    @property
    def ticket(self) -> str | None:
        """The hand-over that protects what it saves, if any."""
        return self.hand_over.id if self.hand_over is not None and self.hand_over.leg == "prefill" else None

    @property
    def next_end(self) -> float:
        """Where the next chunk to be saved ends; infinite if there will be none."""
        beyond = self.next_chunk - len(self.chunks)
        if beyond < 0:
            return self.chunks[self.next_chunk].end
        return self.growth.end(beyond) if self.growth is not None else math.inf

    def next(self) -> Chunk:
        """The next chunk to be saved, which there is."""
        beyond = self.next_chunk - len(self.chunks)
        if beyond < 0 or self.growth is None:
            return self.chunks[self.next_chunk]
        return self.growth.chunk(beyond)

    @property
    def in_question(self) -> bool:
        """Whether its last step may yet turn out to have computed from what failed to be loaded."""
        return self.put_off is not None and len(self.known) <= self.put_off

    def certain(self, computed: int) -> int:
        """How many of its first ``computed`` tokens the engine has accepted."""
        known = self.growth.known_tokens if self.growth is not None else self.prompt_tokens
        return min(computed, known)

    def share_bytes(self, tokens: int) -> int:
        """About how many bytes so many of its matched tokens are."""
        return -(-self.matched_bytes * tokens // self.matched_end)

    def move(self, event: Event) -> None:
        """Take one transition; raises `IllegalTransitionError` when the table has none."""
        after = TRANSITIONS.get((self.phase, event))
        if after is None:
            told = " > ".join(self.story) or "nothing yet"
            raise IllegalTransitionError(f"request {self.request_id}: {event} while {self.phase}; its story: {told}")
        self.story.append(f"{event}:{after}")
        self.phase = after
