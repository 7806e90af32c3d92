"""Lookups: what the pool holds of a prompt, asked in the background and waited for a moment in each step.

A lookup that is not answered in time is given up, for its request alone, and opens a circuit: a pool that is slow for
one is slow for all, and would cost each of them its whole time. No other is begun until the pool has answered that one
all the same; then the next is the probe that closes the circuit, or opens it for twice as long. Requests meanwhile go
on without a lookup, at once.

An engine without room for a request does not ask for its answer. A probe's is noted all the same; one that lay unread
until its lease grew old is asked for once more.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from msgspec import Struct

from kvrelay.circuit import Circuit, State
from kvrelay.connector.core.matching import Found
from kvrelay.errors import DeadlineError, KvRelayError, PoolUnavailableError
from kvrelay.types import Reason
from kvrelay.wire import messages as m

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from kvrelay.client.blocking import PendingCall
    from kvrelay.connector.core.matching import Search
    from kvrelay.connector.counters import Counters
    from kvrelay.connector.link import PoolLink
    from kvrelay.connector.outbox import Outbox

log = logging.getLogger(__name__)

LONGEST_PAUSE_S = 60.0
"""Between probes of a pool that is slow."""
WAIT_S = 0.0009
"""How long the scheduler may wait for lookups in one step, all requests together."""


class Lookup(Struct):
    """A lookup under way. ``call`` is ``None`` until there is a connection to ask on."""

    search: Search
    ticket: str | None
    """The hand-over it is for."""
    began: float
    until: float
    call: PendingCall | None = None
    repeated: bool = False
    """What was found at first lay unread for too long."""


class Lookups:
    """The lookups of one scheduler, by request. Owned by its thread."""

    def __init__(
        self,
        link: PoolLink,
        outbox: Outbox,
        *,
        timeout_s: float,
        lease_s: float,
        clock: Callable[[], float],
        counters: Counters,
    ) -> None:
        """``timeout_s``: of each; ``lease_s``: how long what was found is leased."""
        self._link = link
        self._outbox = outbox
        self._timeout_s = timeout_s
        self._lease_s = lease_s
        self._clock = clock
        self._counters = counters
        self._lookups: dict[str, Lookup] = {}
        self._overdue: list[PendingCall] = []
        self._circuit = Circuit(failures=1, first_pause_s=timeout_s, longest_pause_s=max(timeout_s, LONGEST_PAUSE_S))
        self._probe: str | None = None
        self._patience = WAIT_S

    @property
    def unasked(self) -> Collection[str]:
        """Requests whose lookup waits for a connection."""
        return [request_id for request_id, lookup in self._lookups.items() if lookup.call is None]

    def new_step(self) -> None:
        """From now on there is a step's patience again."""
        self._patience = WAIT_S
        self._heed_probe()

    def begin(self, request_id: str, search: Search, ticket: str | None = None) -> Reason:
        """Ask; if there is no point in asking, why. ``ticket``: of the hand-over, to learn what was written for it."""
        now = self._clock()
        self._outbox.pump()
        self._heed_probe()
        self._overdue = [call for call in self._overdue if not call.poll()]
        if self._overdue:
            self._counters.add("lookups_skipped")
            return Reason.TIMEOUT
        if self._link.client() is None and not self._link.hopeful:
            return Reason.POOL_DOWN
        if not self._circuit.allow(now):
            self._counters.add("lookups_skipped")
            return Reason.TIMEOUT
        if self._circuit.state is State.PROBING:
            self._probe = request_id
        self._lookups[request_id] = lookup = Lookup(search, ticket, now, now + self._timeout_s)
        self._ask(lookup)
        return Reason.NONE

    def _ask(self, lookup: Lookup) -> None:
        question = lookup.search.ask(self._lease_s, lookup.ticket)
        lookup.call = self._outbox.start(question, m.Matched if isinstance(question, m.Match) else m.Existing)

    def answer(self, request_id: str) -> Found | Reason | None:
        """What was found, or why nothing will be; None: not yet. Waits as long as this step's patience lasts."""
        self._heed_probe()
        lookup = self._lookups[request_id]
        found: Found | Reason | None = None
        while found is None:
            if lookup.call is None:
                self._ask(lookup)
            answer = self._result(lookup, lookup.call) if lookup.call is not None else self._hope(lookup)
            if answer is None:
                return None
            found = answer if isinstance(answer, Reason) else self._take(lookup, answer)
            if isinstance(found, Found) and self._lay_unread(lookup):
                if found.lease:
                    self._outbox.tell(m.Release(0, found.lease))
                if self._overdue or self._circuit.state is not State.CLOSED:
                    del self._lookups[request_id]
                    self._counters.add("lookups_skipped")
                    return Reason.TIMEOUT
                self._repeat(lookup)
                found = None
        if self._lookups.pop(request_id, None) is not None:
            self._learn(lookup, found)
        return found

    def _take(self, lookup: Lookup, answer: m.Matched | m.Existing) -> Found | None:
        lookup.call = None
        found, lease = lookup.search.take(answer)
        if lease:
            self._outbox.tell(m.Release(0, lease))
        return found

    def _lay_unread(self, lookup: Lookup) -> bool:
        return not lookup.repeated and self._clock() - lookup.began > max(self._lease_s / 4, self._timeout_s)

    def _repeat(self, lookup: Lookup) -> None:
        """Ask once more: who knows what is left of what was found."""
        lookup.search.restart()
        lookup.repeated = True
        lookup.began = self._clock()
        lookup.until = lookup.began + self._timeout_s

    def _heed_probe(self) -> None:
        """Learn from the probe, whether or not the engine asks for its answer."""
        lookup = self._lookups.get(self._probe) if self._probe is not None else None
        if lookup is None:
            return
        was = self._circuit.state
        if lookup.call is not None and lookup.call.poll():
            self._circuit.succeeded()
        elif self._clock() < lookup.until:
            return
        elif lookup.call is None:
            self._circuit.forgotten()
        else:
            self._circuit.failed(lookup.began)
            self._is_late(lookup.call)
        self._probe = None
        self._tell(was)

    def _is_late(self, call: PendingCall) -> None:
        if call not in self._overdue:
            self._overdue.append(call)
            self._counters.add("lookups_timed_out")
            log.debug("kvrelay: the pool did not answer a lookup within %g s", self._timeout_s)

    def _learn(self, lookup: Lookup, answer: Found | Reason) -> None:
        """What an ended lookup says of the pool: any answer, a refusal too, says that it answers."""
        was = self._circuit.state
        self._probe = None if was is State.PROBING else self._probe
        if answer is Reason.TIMEOUT:
            # The pause begins with the lookup: after a first one there is none but the wait for its late answer.
            self._circuit.failed(lookup.began)
        elif answer is Reason.POOL_DOWN:
            self._circuit.forgotten()
        else:
            self._circuit.succeeded()
        self._tell(was)

    def _tell(self, was: State) -> None:
        """Once for each change."""
        state = self._circuit.state
        if state is State.OPEN and was is State.CLOSED:
            self._counters.add("circuit_opened")
            log.warning("kvrelay: the pool is slow: requests go on without lookups until it answers in time again")
        elif state is State.CLOSED and was is not State.CLOSED:
            self._counters.add("circuit_closed")
            log.info("kvrelay: the pool answers in time again")

    def _hope(self, lookup: Lookup) -> Reason | None:
        over = not self._link.hopeful or self._clock() >= lookup.until
        return Reason.POOL_DOWN if over else None

    def _result(self, lookup: Lookup, call: PendingCall) -> m.Matched | m.Existing | Reason | None:
        began = self._clock()
        try:
            reply = call.result(self._patience)
        except DeadlineError:
            if self._clock() < lookup.until:
                return None
            self._forget(call)
            self._is_late(call)
            return Reason.TIMEOUT
        except PoolUnavailableError as error:
            self._link.drop(error)
            return Reason.POOL_DOWN
        except KvRelayError as error:
            log.warning("kvrelay: a lookup failed: %s", error)
            return Reason.FAILED_LOAD
        finally:
            self._patience = max(0.0, self._patience - (self._clock() - began))
        assert isinstance(reply, (m.Matched, m.Existing))
        return reply

    def end(self, request_id: str) -> None:
        """Nobody waits for a request's lookup any more."""
        if request_id == self._probe:
            self._probe = None
            self._circuit.forgotten()
        lookup = self._lookups.pop(request_id, None)
        if lookup is not None and lookup.call is not None:
            self._forget(lookup.call)

    def end_all(self) -> None:
        """Nobody waits for any."""
        for request_id in list(self._lookups):
            self.end(request_id)

    def _forget(self, call: PendingCall) -> None:
        """Leave no lease behind: requests are handled in order, so the pool has given it when it hears this."""
        self._outbox.tell(m.Forget(0, call.number))

    def lost(self) -> None:
        """The connection is gone, and with it what was asked on it."""
        self._lookups = {name: lookup for name, lookup in self._lookups.items() if lookup.call is None}
        self._overdue.clear()
        was = self._circuit.state
        self._circuit.reset()
        self._tell(was)
