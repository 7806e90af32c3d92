"""What is seen of one request while it is answered, and what can be told of it at its end.

Everything that watches (histograms, the access log, spans) reads the same `Facts`, made once when the request is over.
While it is under way only these notes are taken: who was asked and when, and what the client has been sent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct, field

from kvrelay.router.core.lifecycle import State

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvrelay.router.core.observing.traceparent import Trace
    from kvrelay.router.core.observing.usage import Usage
    from kvrelay.router.core.records import Record


class Leg(Struct, eq=False):
    """One request to an engine. Times are seconds on one clock; 0 where nothing happened."""

    worker: str
    role: str
    message: tuple[bytes, ...] = ()
    """The whole HTTP message, until it is sent."""
    address: tuple[str, int] = ("", 0)
    span: int = 0
    """Its span's id, if the request is traced."""
    began: float = 0.0
    ended: float = 0.0
    status: int = 0
    """Of the engine's answer; 0 without one."""
    problem: str = ""
    """Why the engine did not do its part: the code of an `EngineError`."""
    whole: bool = False
    """Whether its answer came to its end."""

    @property
    def outcome(self) -> str:
        """``ok``, ``refused`` (4xx), ``failed``, or ``cancelled``: broken off by the router, or the client left."""
        if self.problem or self.status >= 500:
            return "failed"
        if self.status >= 400:
            return "refused"
        return "ok" if self.whole else "cancelled"


def _no_span() -> int:
    return 0


class Observation(Struct, eq=False):
    """Notes on one request, taken while it is answered."""

    arrived: float = 0.0
    """When it had been read, on the legs' clock."""
    answered: float = 0.0
    """When the client got the first of an answer, on the same clock."""
    request_id: bytes = b""
    """What clients, engines, logs and traces call it."""
    client: str = ""
    """The address its connection came from, if anybody is to be told."""
    key: str = ""
    """Name of the API key it came with, if keys have names here."""
    model: str = ""
    """As the client named it."""
    num_choices: int = 1
    """Continuations the answer has: they share a stream."""
    record: Record | None = None
    """Of its hand-over, if it is one."""
    trace: Trace | None = None
    """If traces are made."""
    new_span: Callable[[], int] = _no_span
    """Makes a span's id."""
    legs: list[Leg] = field(default_factory=list)
    """In the order sent."""


class Facts(Struct, frozen=True):
    """One request that is over. Times are Unix seconds."""

    seen: Observation
    method: str
    path: str
    outcome: str
    status: int
    """Of the answer; 0 if the client left before there was one."""
    began: float
    ended: float
    request_bytes: int
    answer_bytes: int
    events: int
    """Events of a streamed answer that carry tokens."""
    usage: Usage | None
    """What the engine says it cost, where the answer says it."""
    offset: float
    """From the legs' clock to Unix time."""

    def at(self, moment: float) -> float:
        """Unix time of a moment on the legs' clock."""
        return moment + self.offset

    def stamp(self, name: str) -> float | None:
        """One of the hand-over's timestamps."""
        record = self.seen.record
        return None if record is None else record.life.timestamps.get(name)

    @property
    def seconds(self) -> float:
        """The whole of it."""
        return self.ended - self.began

    @property
    def queue_s(self) -> float:
        """Until an engine was asked: admission, choosing, and the ticket."""
        legs = self.asked
        return (self.at(legs[0].began) if legs else self.ended) - self.began

    @property
    def ttft_s(self) -> float | None:
        """Until a hand-over's answer began."""
        answered = self.seen.answered
        return answered - self.seen.arrived if answered else None

    @property
    def prefill_s(self) -> float | None:
        """The last prefill leg that was answered."""
        return self._between("prefill_begin", "prefill_end")

    @property
    def migration_s(self) -> float | None:
        """From sending the decode leg to its first byte."""
        return self._between("migration_begin", "migration_end")

    @property
    def decode_s(self) -> float | None:
        """From the answer's first byte to its end, or to where it broke off."""
        first = self.stamp("decode_begin")
        return None if first is None else (self.stamp("decode_end") or self.ended) - first

    @property
    def itl_s(self) -> float | None:
        """Mean time between tokens of one continuation, of streams of two and more that came to their end.

        Tokens where the answer says how many; else the events that carry some, of which an engine may fill one with
        several.
        """
        record, first, end = self.seen.record, self.seen.answered, self.stamp("decode_end")
        if record is None or record.life.state is not State.DONE or not first or end is None or not self.events:
            return None
        tokens = self.events if self.usage is None else self.usage.completion_tokens
        gaps = tokens / self.seen.num_choices - 1
        return (end - self.at(first)) / gaps if gaps >= 1 else None

    @property
    def asked(self) -> list[Leg]:
        """The legs that were sent: a client may leave while one waits for its turn."""
        return [leg for leg in self.seen.legs if leg.began]

    def legs(self, role: str) -> list[Leg]:
        """Those of one role that were sent."""
        return [leg for leg in self.seen.legs if leg.began and leg.role == role]

    @property
    def decoder(self) -> str:
        """The engine that answered, or was asked last; empty if none was."""
        record = self.seen.record
        if record is not None:
            return record.decode
        legs = self.asked
        return legs[-1].worker if legs else ""

    def _between(self, begin: str, end: str) -> float | None:
        first, last = self.stamp(begin), self.stamp(end)
        return None if first is None or last is None or last < first else last - first
