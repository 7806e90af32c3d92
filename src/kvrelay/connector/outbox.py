"""What the scheduler's side says to the pool without waiting for an answer, over a connection that may come and go."""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING

from msgspec import Struct

from kvrelay.errors import DeadlineError, KvRelayError, PoolUnavailableError
from kvrelay.wire import messages as m

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvrelay.client.blocking import PendingCall
    from kvrelay.connector.link import PoolLink

log = logging.getLogger(__name__)

SILENCE_S = 5.0
"""A pool that owes answers and has given none for so long is taken to be down."""
MAX_POSTS = 64
"""Notes kept while there is no connection, newest first to stay."""


class _Sent(Struct):
    call: PendingCall
    at: float


class Outbox:
    """Requests under way on a `PoolLink`. Owned by the link's owner."""

    def __init__(self, link: PoolLink, clock: Callable[[], float]) -> None:
        self._link = link
        self._clock = clock
        self._sent: deque[_Sent] = deque()
        self._heard_at = 0.0
        self._posts: deque[m.Post] = deque(maxlen=MAX_POSTS)

    def start(self, request: m.Request, reply: type[m.Reply]) -> PendingCall | None:
        """Send a request whose answer the caller takes; None without a connection."""
        client = self._link.client()
        if client is None:
            return None
        call = client.start(request, reply)
        self._sent.append(_Sent(call, self._clock()))
        return call

    def tell(self, request: m.Request) -> bool:
        """Send a request whose answer nobody needs; whether there was a connection to send it on."""
        self.start(request, m.Done)
        return self._link.connected

    def post(self, ticket: str, note: bytes) -> None:
        """Leave a note for a ticket's owner; without a connection, when there is one again."""
        post = m.Post(0, ticket, note)
        if not self.tell(post):
            self._posts.append(post)

    def pump(self) -> None:
        """Take answers, and send what waited for a connection. Drops a connection that was lost, or is silent."""
        while self._posts and self.tell(self._posts[0]):
            self._posts.popleft()
        try:
            while self._sent and self._sent[0].call.poll():
                self._heard_at = self._clock()
                _take(self._sent.popleft().call)
        except PoolUnavailableError as error:
            self._link.drop(error)
        if self._sent and self._clock() - max(self._heard_at, self._sent[0].at) >= SILENCE_S:
            self._link.drop(DeadlineError(f"it has answered nothing for {SILENCE_S:g} s"))

    def lost(self) -> None:
        """The connection is gone, and with it every answer."""
        self._sent.clear()


def _take(call: PendingCall) -> None:
    """An answer nobody depends on: a lease may have run out, a hand-over may have ended."""
    try:
        call.result(0.0)
    except PoolUnavailableError:
        raise
    except KvRelayError as error:
        log.debug("kvrelay: %s", error)
