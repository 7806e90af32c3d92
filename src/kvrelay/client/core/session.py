"""A client's end of a pool connection without I/O: requests get ids, replies find their requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from kvrelay import errors
from kvrelay.client.core.refusals import explained
from kvrelay.errors import KvRelayError, PoolUnavailableError, ProtocolError
from kvrelay.wire import messages as m

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvrelay.wire.payload import Payload

_MAX_ID = (1 << 32) - 1


class Ask(Struct, frozen=True, eq=False):
    """One request to send, and what is expected back."""

    request: m.Request
    reply: type[m.Reply] = m.Done
    payload: Sequence[memoryview] = ()
    """Bytes to send behind it."""
    sums_behind: bool = False
    """Send the checksums of these behind them."""
    targets: Sequence[memoryview] = ()
    """Where the reply's payload goes."""


class AbandonedError(KvRelayError):
    """Thrown into an operation that nobody waits for any more: what it asks for then is sent, and not waited for."""


def undoing(reply: m.Reply | None) -> m.Request | None:
    """What gives back what a reply brought, when nobody is there to take it."""
    if isinstance(reply, m.Matched | m.Located) and reply.lease:
        return m.Release(0, reply.lease)
    if isinstance(reply, m.RoomGiven) and reply.batch:
        return m.Abort(0, [reply.batch])
    if isinstance(reply, m.Announced):
        handles = [grant.handle for grant in reply.grants if grant.handle]
        return m.Abort(0, handles) if handles else None
    return None


class Call:
    """A request under way. ``done`` is called once, when the answer or an error is there."""

    __slots__ = ("ask", "done", "error", "landing", "number", "reply")

    def __init__(self, ask: Ask, done: Callable[[Call], None] | None = None) -> None:
        self.ask = ask
        self.done = done
        self.reply: m.Reply | None = None
        self.error: KvRelayError | None = None
        self.landing: Payload | None = None
        """Objects that come with the reply, checksummed as they arrive; None where that is not done."""
        self.number = 0
        """The id it was sent under; 0: it was not sent."""

    @property
    def finished(self) -> bool:
        """Whether there is an answer or an error."""
        return self.reply is not None or self.error is not None

    def outcome(self) -> m.Reply:
        """The reply; raises the error if that is what came."""
        if self.error is not None:
            raise self.error
        if self.reply is None:
            raise RuntimeError("outcome() of a call that is not finished")
        return self.reply

    def finish(self, reply: m.Reply | None, error: KvRelayError | None) -> None:
        """Take the answer."""
        self.reply = reply
        self.error = error
        if self.done is not None:
            self.done(self)


class Session:
    """The calls of one connection; the `Handler` of its stream.

    ``summed``: makes, of buffers, a payload that is checksummed as it arrives.
    """

    def __init__(self, summed: Callable[[Sequence[memoryview]], Payload] | None = None) -> None:
        self._summed = summed
        self._calls: dict[int, Call] = {}
        self._last_id = 0
        self.closed: KvRelayError | None = None
        """Why no call can be made any more."""

    @property
    def outstanding(self) -> int:
        """Calls without an answer."""
        return len(self._calls)

    def start(self, ask: Ask, done: Callable[[Call], None] | None = None) -> tuple[Call, m.Request]:
        """Register a call; the request to send, with its id."""
        if self.closed is not None:
            raise PoolUnavailableError(f"the connection to the pool has ended: {self.closed}")
        self._last_id = self._last_id % _MAX_ID + 1
        call = self._calls[self._last_id] = Call(ask, done)
        call.number = self._last_id
        return call, msgspec.structs.replace(ask.request, id=self._last_id)

    def forget(self, request: int, error: KvRelayError) -> KvRelayError:
        """Drop a call whose request could not be sent for ``error``; what to raise."""
        return explained(self._calls.pop(request).ask.request, error)

    def close(self, error: KvRelayError) -> None:
        """End the session: every call without an answer fails with ``error``."""
        if self.closed is None:
            self.closed = error
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.finish(None, error)

    def on_message(self, message: m.Reply, payload_bytes: int) -> Payload | Sequence[memoryview] | None:
        """Give a reply to its call; for `Data` and `Got` say where its payload goes."""
        if payload_bytes:
            call = self._calls.get(message.id)
            if call is None or not isinstance(message, m.Data | m.Got):
                raise ProtocolError(f"the pool sent {payload_bytes} bytes that were not asked for")
            if isinstance(message, m.Got):
                targets = call.ask.targets[: message.count]  # objects that are not there have no bytes
                call.landing = None if self._summed is None else self._summed(targets)
                return targets if call.landing is None else call.landing
            return call.ask.targets
        self._finish(message)
        return None

    def on_payload(self, message: m.Reply) -> None:
        """Give a reply to its call, now that its payload has arrived."""
        self._finish(message)

    def _finish(self, message: m.Reply) -> None:
        call = self._calls.get(message.id)
        if call is None:
            raise ProtocolError(f"the pool answered request {message.id}, which is not outstanding")
        if not isinstance(message, (m.Failed, call.ask.reply)):  # the call fails with all others when this is closed
            raise ProtocolError(f"the pool answered {type(call.ask.request).__name__} with {type(message).__name__}")
        del self._calls[message.id]
        if isinstance(message, m.Failed):
            call.finish(None, explained(call.ask.request, errors.from_code(message.code, message.message)))
        else:
            call.finish(message, None)
