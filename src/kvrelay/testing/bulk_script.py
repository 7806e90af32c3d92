"""The pool's side of the bulk messages in a dictionary, and a driver of client operations against it: no sockets."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, TypeVar

from kvrelay.client.core.session import AbandonedError, Ask, Call, undoing
from kvrelay.client.core.steps import Start, Transfer
from kvrelay.errors import KvRelayError, LeaseExpiredError, NotFoundError
from kvrelay.transport.checksum import checksum
from kvrelay.wire import messages as m
from kvrelay.wire.bulk import Stored

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvrelay.client.core.steps import Operation, Step

T = TypeVar("T")


def column(packed: bytes) -> list[int]:
    """A u64 column as numbers."""
    numbers = array("Q")
    numbers.frombytes(packed)
    return numbers.tolist()


def packed(numbers: Sequence[int]) -> bytes:
    """Numbers as a u64 column."""
    return array("Q", numbers).tobytes()


class BulkScript:
    """A pool of ``size`` bytes that never evicts. ``asked`` is everything it was asked, in order."""

    def __init__(self, size: int = 1 << 20) -> None:
        self.arena = memoryview(bytearray(size))
        self.objects: dict[bytes, tuple[int, int, int]] = {}
        """Sealed: offset, size, checksum."""
        self.busy: set[bytes] = set()
        self.rooms: dict[int, list[tuple[bytes, int, int]]] = {}
        self.leases: set[int] = set()
        self.asked: list[m.Request] = []
        self._top = 0
        self._last = 0

    @property
    def kinds(self) -> list[str]:
        """Names of what it was asked."""
        return [type(request).__name__ for request in self.asked]

    def place(self, key: bytes, size: int) -> tuple[Stored, int]:
        """Room for an object."""
        if key in self.objects:
            return Stored.PRESENT, 0
        if key in self.busy:
            return Stored.BUSY, 0
        if self._top + size > self.arena.nbytes:
            return Stored.FULL, 0
        start, self._top = self._top, self._top + size
        return Stored.STORED, start

    def store(self, key: bytes, data: bytes) -> None:
        """Have an object."""
        _, start = self.place(key, len(data))
        self.arena[start : start + len(data)] = data
        self.objects[key] = (start, len(data), checksum(data))

    def prefix(self, keys: Sequence[bytes]) -> list[tuple[int, int, int]]:
        """What is there of a prefix."""
        found = []
        for key in keys:
            if key not in self.objects:
                break
            found.append(self.objects[key])
        return found

    def answer(self, ask: Ask) -> m.Reply:
        """Do what is asked."""
        request = ask.request
        self.asked.append(request)
        match request:
            case m.Put():
                sums = packed([checksum(data) for data in ask.payload]) if ask.sums_behind else request.sums
                return self._put(request, sums, b"".join(ask.payload))
            case m.Room():
                return self._room(request)
            case m.Fill() | m.Abort():
                return self._settle(request)
            case m.Locate():
                return self._locate(request)
            case m.Release() | m.Corrupt():
                return self._end(request)
            case m.Get():
                return self._get(request, ask.targets)
            case m.Match():
                return m.Matched(0, 0, 0, [])
        raise AssertionError(request)

    def _settle(self, request: m.Fill | m.Abort) -> m.Done:
        if isinstance(request, m.Abort):
            for batch in request.handles:
                self.rooms.pop(batch, None)
            return m.Done(0)
        if request.batch not in self.rooms:
            raise NotFoundError("given up")
        for (key, start, size), total in zip(self.rooms.pop(request.batch), column(request.sums), strict=True):
            self.objects[key] = (start, size, total)
        return m.Done(0)

    def _end(self, request: m.Release | m.Corrupt) -> m.Done:
        if request.lease not in self.leases:
            raise LeaseExpiredError("over")
        if isinstance(request, m.Release):
            self.leases.discard(request.lease)
        return m.Done(0)

    def _put(self, request: m.Put, sums: bytes, payload: bytes) -> m.PutDone:
        states, at = bytearray(), 0
        for key, size, total in zip(request.keys, column(request.sizes), column(sums), strict=True):
            data = payload[at : at + size]
            at += size
            state, _ = self.place(key, 0)
            if state is Stored.STORED and checksum(data) != total:
                state = Stored.DAMAGED
            if state is Stored.STORED and self._top + size > self.arena.nbytes:
                state = Stored.FULL
            if state is Stored.STORED:
                self.store(key, data)
            states.append(state)
        assert at == len(payload)
        return m.PutDone(0, bytes(states))

    def _room(self, request: m.Room) -> m.RoomGiven:
        states, offsets, given = bytearray(), [], []
        for key, size in zip(request.keys, column(request.sizes), strict=True):
            state, start = self.place(key, size)
            states.append(state)
            offsets.append(start)
            if state is Stored.STORED:
                given.append((key, start, size))
        self._last += 1
        if given:
            self.rooms[self._last] = given
        return m.RoomGiven(0, self._last if given else 0, bytes(states), packed(offsets))

    def _locate(self, request: m.Locate) -> m.Located:
        found = self.prefix(request.keys)
        self._last += 1
        if found:
            self.leases.add(self._last)
        starts, sizes, sums = zip(*found, strict=True) if found else ((), (), ())
        return m.Located(0, self._last if found else 0, len(found), packed(starts), packed(sizes), packed(sums))

    def _get(self, request: m.Get, targets: Sequence[memoryview]) -> m.Got:
        sums: list[int] = []
        for (start, size, total), wanted, target in zip(
            self.prefix(request.keys), column(request.sizes), targets, strict=False
        ):
            if size != wanted:
                return m.Got(0, len(sums), packed(sums), size)
            target[:] = self.arena[start : start + size]
            sums.append(total)
        return m.Got(0, len(sums), packed(sums), 0)


class Abandoned(Exception):  # noqa: N818 - what a test sees when it cancelled
    """The operation was cancelled by its driver."""


class _Drive:
    """One operation under way."""

    def __init__(self, answer: Callable[[Ask], m.Reply], *, late: bool) -> None:
        self._answer = answer
        self._late = late
        self._calls: list[Call] = []

    def take(self, step: Step) -> m.Reply | Call | None:
        match step:
            case Start():
                call = Call(step.ask)
                self._calls.append(call)
                if not self._late:
                    self._finish(call)
                return call
            case Transfer():
                while not step.finished():
                    pass
                return None
            case Call():
                self._finish(step)
                return step.outcome()
            case Ask():
                return self._answer(step)

    def _finish(self, call: Call) -> None:
        if not call.finished:
            try:
                call.finish(self._answer(call.ask), None)
            except KvRelayError as error:
                call.finish(None, error)

    def abandon(self, operation: Operation[T], step: Step) -> None:
        """Answer and undo what is unanswered, as the asyncio shell does; let the operation give back the rest."""
        for call in self._calls:
            if not call.finished or call is step:
                self._finish(call)
                request = undoing(call.reply)
                if request is not None:
                    self._answer(Ask(request))
        try:
            step = operation.throw(AbandonedError("cancelled"))
            while True:
                if isinstance(step, Start) or (isinstance(step, Call) and step.reply is not None):
                    step = operation.send(self.take(step))
                else:
                    step = operation.throw(AbandonedError("cancelled"))
        except (AbandonedError, StopIteration):
            for call in self._calls:
                self._finish(call)
            raise Abandoned from None


def drive(
    operation: Operation[T], answer: Callable[[Ask], m.Reply], *, late: bool = False, abandon_at: int | None = None
) -> T:
    """Run an operation. ``late``: answers to what was begun come when they are waited for, not before.

    ``abandon_at``: nobody waits for it any more after so many steps. Raises `Abandoned` then.
    """
    driver, steps = _Drive(answer, late=late), 0
    try:
        step = next(operation)
        while True:
            if steps == abandon_at:
                driver.abandon(operation, step)
            steps += 1
            try:
                result = driver.take(step)
            except KvRelayError as error:
                step = operation.throw(error)
            else:
                step = operation.send(result)
    except StopIteration as stop:
        value: T = stop.value
        return value
