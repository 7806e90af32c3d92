"""Loads begun while the prefill engine still computes: they take each layer as it is written.

The prefill engine announces a step's chunks when the step begins. A load follows: it waits until the next chunk is
announced, or until it is known that none will be, loads layer by layer what has been announced, and goes on. What was
loaded before a writer died stays; another prefill engine may take over under the same ticket, and is followed then.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from msgspec.structs import replace

from kvrelay.connector.attempt import SLICE_S, Attempt, CancelledLoadError, LoadJob, reason_of
from kvrelay.connector.core.orders import LoadOutcome
from kvrelay.errors import KvRelayError, WriterLostError
from kvrelay.types import Reason

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvrelay.client.blocking import PoolClient
    from kvrelay.connector.core.orders import LoadOrder
    from kvrelay.connector.rank_kv import RankKv

log = logging.getLogger(__name__)


class Pursuit:
    """One early load on one rank. Its KV is one group's in one block table."""

    def __init__(self, kv: RankKv, client: PoolClient, job: LoadJob, cancelled: Callable[[], bool]) -> None:
        self._kv = kv
        self._client = client
        self._order = job.order
        self._deadline = job.deadline
        self._cancelled = cancelled
        self._end = job.order.start
        self._bytes = 0
        self._transfer_s = 0.0

    def run(self) -> tuple[LoadOutcome, KvRelayError | None]:
        """Follow until everything is loaded or cannot be; the error that ended it, if one did."""
        reason, error = Reason.NONE, None
        while self._end < self._order.end and error is None:
            try:
                reason = self._go_on(reason)
            except WriterLostError as lost:
                log.debug("kvrelay: request %s: %s", self._order.request_id, lost)
                reason = Reason.WRITER_LOST
                continue
            except _OverError as over:
                reason = over.reason
                break
            except KvRelayError as caught:
                reason, error = reason_of(caught), caught
        if error is not None and not self._client.closed and not isinstance(error, CancelledLoadError):
            log.warning("kvrelay: request %s: %s; taking what is sealed", self._order.request_id, error)
            self._load(time.monotonic() + SLICE_S, unsealed=False)
        whole = self._end >= self._order.end
        return LoadOutcome(self._end, self._bytes, self._transfer_s, Reason.NONE if whole else reason), error

    def _go_on(self, reason: Reason) -> Reason:
        """Wait a moment for the next chunk and load what there is; why what is missing is missing, so far."""
        if self._cancelled():
            raise CancelledLoadError("the request was aborted")
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            raise _OverError(reason or Reason.TIMEOUT)
        order = self._rest()
        (group,) = self._kv.held
        key = self._kv.geometry.groups[group].key(order.chunks[0].key)
        told = self._client.follow(order.ticket, key, timeout_s=min(SLICE_S, left_s))
        if told.present:
            before = self._end
            error = self._load(self._deadline, unsealed=True)
            if error is not None:
                raise error
            return Reason.NONE if self._end > before else reason
        if not told.open:
            raise _OverError(reason or (Reason.PARTIAL if self._end > self._order.start else Reason.MISS))
        return reason

    def _rest(self) -> LoadOrder:
        """What is still to be loaded."""
        chunks = tuple(chunk for chunk in self._order.chunks if chunk.end > self._end)
        return replace(self._order, chunks=chunks, starts=(self._end,), start=self._end)

    def _load(self, deadline: float, *, unsealed: bool) -> KvRelayError | None:
        """Load what is announced of the rest."""
        job = LoadJob(self._rest(), deadline)
        attempt = Attempt(self._kv, self._client, job, self._cancelled, deadline, unsealed=unsealed)
        error = attempt.run()
        self._bytes += attempt.bytes
        self._transfer_s += attempt.transfer_s
        self._end = max(self._end, attempt.valid_end)
        return error


class _OverError(Exception):
    """There is nothing more to follow."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason)
        self.reason = reason
