"""The life of one disaggregated request: a table of states, with DistServe's seven timestamps.

The router sees a request from outside the engines. It therefore reports as *migration* the time from sending the decode
leg to its first byte: the decode engine's queue and first step are in it, and it bounds the transfer from above. What
the transfer itself took is in the proof.
"""

from __future__ import annotations

from enum import Enum, auto

from kvrelay.errors import KvRelayError


class State(Enum):
    """Where a request is."""

    __hash__ = object.__hash__  # enum's own is written in Python, and every request looks states up a dozen times

    ISSUED = auto()
    """Nothing of it is on any engine."""
    PREFILLING = auto()
    READY = auto()
    """For the decode side: the prefill side has answered, or a decode engine was asked and another is to be."""
    OVERLAPPED = auto()
    """Both legs are under way: the decode side takes what the prefill side has computed so far."""
    MIGRATING = auto()
    """The decode leg is sent and has not answered yet."""
    DECODING = auto()
    DONE = auto()
    FAILED = auto()
    CANCELLED = auto()


class Event(Enum):
    """What happens to it."""

    __hash__ = object.__hash__  # as for states

    PREFILL_SENT = auto()
    PREFILL_ANSWERED = auto()
    PREFILL_LOST = auto()
    """Unreachable, a 5xx or out of time: another prefill engine, or none."""
    DECODE_SENT = auto()
    DECODE_REPELLED = auto()
    """The decode leg ended before a byte reached the client: another decode engine may try."""
    KV_LOST = auto()
    """The decode side cannot have the KV, and the leg was broken off: it is to be prefilled, or asked for, again."""
    FIRST_BYTE = auto()
    LAST_BYTE = auto()
    FAILED = auto()
    CANCELLED = auto()
    """The client went away, or the router stops."""


TERMINAL = frozenset({State.DONE, State.FAILED, State.CANCELLED})

_STEPS: dict[State, dict[Event, State]] = {
    State.ISSUED: {Event.PREFILL_SENT: State.PREFILLING, Event.DECODE_SENT: State.MIGRATING},
    State.PREFILLING: {
        Event.PREFILL_ANSWERED: State.READY,
        Event.PREFILL_LOST: State.ISSUED,
        Event.DECODE_SENT: State.OVERLAPPED,
    },
    State.READY: {Event.DECODE_SENT: State.MIGRATING, Event.PREFILL_SENT: State.PREFILLING},
    State.OVERLAPPED: {
        Event.PREFILL_ANSWERED: State.MIGRATING,
        Event.PREFILL_LOST: State.MIGRATING,
        Event.DECODE_REPELLED: State.PREFILLING,
        Event.FIRST_BYTE: State.DECODING,
        Event.LAST_BYTE: State.DONE,
    },
    State.MIGRATING: {
        Event.PREFILL_SENT: State.OVERLAPPED,  # another one, while the decode side waits
        Event.DECODE_REPELLED: State.READY,
        Event.KV_LOST: State.ISSUED,
        Event.FIRST_BYTE: State.DECODING,
        Event.LAST_BYTE: State.DONE,  # an answer without a body
    },
    State.DECODING: {
        Event.LAST_BYTE: State.DONE,
        # The decode side had all it needed before the prefill side was done.
        Event.PREFILL_ANSWERED: State.DECODING,
        Event.PREFILL_LOST: State.DECODING,
    },
}
TABLE: dict[State, dict[Event, State]] = {
    state: {**steps, Event.FAILED: State.FAILED, Event.CANCELLED: State.CANCELLED} for state, steps in _STEPS.items()
}
"""``state -> event -> state``. Terminal states have no row: nothing happens after the end."""

_STAMPS: dict[Event, tuple[str, ...]] = {
    Event.PREFILL_SENT: ("prefill_begin",),
    Event.PREFILL_ANSWERED: ("prefill_end",),
    Event.DECODE_SENT: ("migration_begin",),
    Event.FIRST_BYTE: ("migration_end", "decode_begin"),
    Event.LAST_BYTE: ("decode_end",),
}
_FOLLOWS: dict[State, dict[Event, tuple[State, tuple[str, ...]]]] = {
    state: {event: (following, _STAMPS.get(event, ())) for event, following in steps.items()}
    for state, steps in TABLE.items()
}
"""The two tables in one."""
TIMESTAMPS = (
    "issued", "prefill_begin", "prefill_end", "migration_begin", "migration_end", "decode_begin", "decode_end",
)  # fmt: skip


class IllegalTransitionError(KvRelayError):
    """A bug in the router: an event that cannot happen in this state. The message tells the object's whole story."""

    code = "illegal_transition"


class Lifecycle:
    """One request. Times are seconds on whatever clock the caller uses throughout."""

    __slots__ = ("_history", "name", "state", "timestamps")

    def __init__(self, name: str, now: float) -> None:
        """``name``: for messages, the hand-over's id."""
        self.name = name
        self.state = State.ISSUED
        self.timestamps: dict[str, float] = {"issued": now}
        self._history: list[tuple[Event, float]] = []

    def handle(self, event: Event, now: float) -> State:
        """Apply ``event``; the state it led to.

        Raises:
            IllegalTransitionError: the table has no such step.
        """
        try:
            following, stamps = _FOLLOWS[self.state][event]
        except KeyError:
            raise IllegalTransitionError(f"{event.name} in state {self.state.name}; {self.story()}") from None
        self._history.append((event, now))
        for stamp in stamps:
            self.timestamps[stamp] = now
        self.state = following
        return following

    @property
    def ended(self) -> bool:
        """Whether nothing more can happen."""
        return self.state in TERMINAL

    @property
    def ttft_s(self) -> float | None:
        """Time to the first byte of an answer; None before."""
        first = self.timestamps.get("decode_begin")
        return None if first is None else first - self.timestamps["issued"]

    def story(self) -> str:
        """Everything that happened, with seconds since it was issued."""
        issued = self.timestamps["issued"]
        steps = ", ".join(f"{event.name} +{now - issued:.3f}s" for event, now in self._history)
        return f"{self.name}: ISSUED +0.000s{', ' if steps else ''}{steps}"
