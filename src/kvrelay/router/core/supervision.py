"""Which worker processes there should be: started at once, started again when they crash, ended together.

A worker that crashes is started again after a moment, twice as long each time it does so soon after its start. One that
does not come up at the very beginning, or is told to stop, is not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Iterator

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 10.0
STEADY_S = 30.0
"""A worker that has lived so long is trusted again."""


class Slot(Struct):
    """One worker's place: it keeps its number and its socket whoever sits there."""

    number: int
    pid: int = 0
    """0 while nobody sits there."""
    ready: bool = False
    started_at: float = 0.0
    due_at: float = 0.0
    """When it is to be filled."""
    pause_s: float = FIRST_PAUSE_S


class Supervision:
    """What to do about ``count`` workers. Its owner starts processes and tells of their ends."""

    def __init__(self, count: int, now: float) -> None:
        """All are due at once."""
        self.slots = [Slot(number, due_at=now) for number in range(count)]
        self.stopping = False
        self.failed = False
        """A worker ended before all had come up for the first time: nothing will be served."""
        self.restarts = 0
        self._were_all_ready = False

    @property
    def all_ready(self) -> bool:
        """Whether every worker serves."""
        return all(slot.ready for slot in self.slots)

    @property
    def over(self) -> bool:
        """Whether nothing is left to wait for."""
        return (self.stopping or self.failed) and not any(slot.pid for slot in self.slots)

    @property
    def pids(self) -> list[int]:
        """Of the workers there are."""
        return [slot.pid for slot in self.slots if slot.pid]

    def due(self, now: float) -> Iterator[Slot]:
        """The places to fill now."""
        if not self.stopping and not self.failed:
            yield from (slot for slot in self.slots if not slot.pid and slot.due_at <= now)

    def wait_s(self, now: float) -> float | None:
        """Until a place is to be filled; None: nothing is due of itself."""
        if self.stopping or self.failed:
            return None
        times = [slot.due_at for slot in self.slots if not slot.pid]
        return max(0.0, min(times) - now) if times else None

    def started(self, slot: Slot, pid: int, now: float) -> None:
        """A process sits there now."""
        slot.pid, slot.ready, slot.started_at = pid, False, now

    def came_up(self, slot: Slot) -> None:
        """It serves."""
        slot.ready = True
        self._were_all_ready = self._were_all_ready or self.all_ready

    def ended(self, pid: int, now: float) -> Slot | None:
        """A process has ended. Its place, if it had one; it is filled again in ``due_at - now`` seconds."""
        slot = next((slot for slot in self.slots if slot.pid == pid), None)
        if slot is None:
            return None
        if now - slot.started_at >= STEADY_S:
            slot.pause_s = FIRST_PAUSE_S
        slot.pid, slot.ready, slot.due_at = 0, False, now + slot.pause_s
        slot.pause_s = min(2 * slot.pause_s, LONGEST_PAUSE_S)
        if not self._were_all_ready:
            self.failed = True
        elif not self.stopping:
            self.restarts += 1
        return slot

    def stop(self) -> None:
        """No place is filled any more."""
        self.stopping = True
