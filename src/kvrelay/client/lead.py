"""Who moves the bytes of a blocking connection when several threads use it.

One thread at a time leads: it waits on the socket and hands every answer that comes to whoever asked. The others wait
until their answer is there, or it is their turn to lead. Whoever has something to send sends it at once, and wakes the
leader only when the socket would not take all of it.
"""

from __future__ import annotations

import os
import select
import threading
import time
from typing import TYPE_CHECKING

from kvrelay.errors import KvRelayError, PoolUnavailableError

if TYPE_CHECKING:
    from kvrelay.client.core.session import Ask, Call, Session
    from kvrelay.transport.stream import Stream
    from kvrelay.wire import messages as m


class Lead:
    """Moves the bytes of ``stream``, whose messages ``session`` takes. Any thread may call any method."""

    _wake = -1

    def __init__(self, session: Session, stream: Stream[m.Reply], peer: str) -> None:
        self._session = session
        self._stream = stream
        self._peer = peer
        self._lock = threading.Lock()
        self._turn = threading.Condition(self._lock)
        """To wait and to wake under `_lock`, which is taken by itself: a condition's own ``with`` runs in Python."""
        self._leading = False
        self._following = 0
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._wake, select.POLLIN)
        self._events = 0
        """What the socket is watched for."""

    def start(self, ask: Ask, *, more: bool = False) -> Call:
        """Send a request, as much of it as the socket takes now; with the next one, if there is ``more``.

        Raises:
            PoolUnavailableError: the connection has ended.
            BadRequestError: the request is over the limits of a frame.
        """
        with self._lock:
            call, request = self._session.start(ask)
            try:
                self._stream.send(request, ask.payload, sums_behind=ask.sums_behind)
            except KvRelayError as error:
                raise self._session.forget(request.id, error) from None
            if not more:
                self._flush()
        return call

    def flush(self) -> None:
        """Send what was held back for more to come."""
        with self._lock:
            self._flush()

    def _flush(self) -> None:
        try:
            if not self._stream.flush() and self._leading:
                os.eventfd_write(self._wake, 1)
        except KvRelayError as error:
            self._end(error)

    def pump(self, call: Call, timeout_s: float) -> bool:
        """Move bytes until ``call`` is finished or ``timeout_s`` has passed; whether it is finished."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            if self._leading:
                self._flush()  # the leader sends for others only when it is told to
            while self._leading:
                left = deadline - time.monotonic()
                if call.finished or left <= 0:
                    return call.finished
                self._following += 1
                self._turn.wait(left)
                self._following -= 1
            self._leading = True
        try:
            return self._pump(call, deadline)
        finally:
            with self._lock:
                self._leading = False
                if self._following:
                    self._turn.notify_all()

    def _pump(self, call: Call, deadline: float) -> bool:
        while True:
            with self._lock:
                waiting = self._watch() and not call.finished
            if not waiting:
                return call.finished
            left = deadline - time.monotonic()
            readable = False
            for ready, events in self._poll.poll(max(0.0, left) * 1000):
                if ready == self._wake:
                    os.eventfd_read(self._wake)
                else:
                    readable = events != select.POLLOUT
            with self._lock:
                if readable:
                    self._receive()
                    if self._following:
                        self._turn.notify_all()
                if call.finished:
                    return True
            if left <= 0:
                return False

    def _watch(self) -> bool:
        """Send what there is to send, and watch the socket; False: it is closed."""
        try:
            events = select.POLLIN if self._stream.flush() else select.POLLIN | select.POLLOUT
        except KvRelayError as error:
            self._end(error)
            return False
        fd = self._stream.fileno()
        if fd < 0:
            return False
        if events != self._events:
            self._poll.register(fd, events)
            self._events = events
        return True

    def _receive(self) -> None:
        try:
            if not self._stream.receive(until_empty=False):
                raise PoolUnavailableError(f"the pool at {self._peer} closed the connection")
        except KvRelayError as error:
            self._end(error)

    def end(self, error: KvRelayError) -> None:
        """End the connection: every call without an answer fails with ``error``. May be called twice."""
        with self._lock:
            self._end(error)
            if self._leading:
                os.eventfd_write(self._wake, 1)

    def _end(self, error: KvRelayError) -> None:
        fd = self._stream.fileno()
        if fd >= 0 and self._events:
            self._poll.unregister(fd)
            self._events = 0
        self._session.close(error)
        self._stream.close()
        self._turn.notify_all()

    def __del__(self) -> None:
        if self._wake >= 0:
            os.close(self._wake)
