"""Loads KV from the pool into one rank's blocks, on threads of their own, layer by layer as it is written.

A load is given up at its deadline, or when nobody waits for it any more. When the prefix it follows breaks (its writer
died, a checksum was wrong, time ran out), what is sealed of it is still taken: a shorter prefix is better than none.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from functools import partial
from typing import TYPE_CHECKING

from msgspec.structs import replace

from kvrelay.connector.attempt import SLICE_S, Attempt, CancelledLoadError, LoadJob, reason_of, write_layer
from kvrelay.connector.core.orders import LoadKind, LoadOutcome
from kvrelay.connector.early import Pursuit
from kvrelay.connector.placed import PlacedLoad
from kvrelay.connector.staging import Staging
from kvrelay.errors import BadRequestError
from kvrelay.types import Reason

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvrelay.client.blocking import PoolClient
    from kvrelay.connector.core.orders import LoadOrder
    from kvrelay.connector.counters import Counters
    from kvrelay.connector.link import PoolLink
    from kvrelay.connector.rank_kv import RankKv

log = logging.getLogger(__name__)

CONNECT_WAIT_S = 0.5
"""How long a load waits for a connection that is being made."""


class Loader:
    """The loading threads of one rank."""

    def __init__(
        self,
        *,
        kv: RankKv,
        links: Sequence[PoolLink],
        timeout_s: float,
        cancelled: Callable[[str], bool],
        ended: Callable[[str, LoadOutcome], None],
        counters: Counters,
        name: str,
        staging: Staging | None = None,
        stage_ended: Callable[[int, LoadOutcome], bool] = lambda *_: False,
        unstaged: Callable[[int], bool] = lambda _: False,
        lazy: bool = False,
    ) -> None:
        """``links``: one a thread, started by it when first needed if ``lazy``, and before this otherwise.

        ``ended`` is called once a load, from its thread, when it writes no more.

        ``staging``: where KV is kept that has no blocks yet; ``stage_ended``: called once for each that was ordered,
        and says whether it is still wanted; ``unstaged``: whether it is not wanted while it is brought.
        """
        self._unstaged = unstaged
        self._lazy = lazy
        self._staging = staging or Staging(0)
        self._stage_ended = stage_ended
        self._kv = kv
        self._links = links
        self._timeout_s = timeout_s
        self._cancelled = cancelled
        self._ended = ended
        self._counters = counters
        self._closing = False
        self._using = [threading.Lock() for _ in links]
        """Held by who uses the link."""
        self._queue: queue.SimpleQueue[tuple[LoadJob, bool] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, args=(link, using), name=f"{name} {at}", daemon=True)
            for at, (link, using) in enumerate(zip(links, self._using, strict=True))
        ]
        for thread in self._threads:
            thread.start()

    def load(self, order: LoadOrder) -> LoadJob:
        """Begin a load as soon as a thread is free."""
        job = LoadJob(order, time.monotonic() + self._timeout_s)
        self._queue.put((job, False))
        return job

    def load_here(self, order: LoadOrder) -> bool:
        """Load in the caller's thread what is only to be copied, if it is; whether it has been, and is over."""
        if order.placed is None or not self._kv.in_host_memory or not self._using[0].acquire(blocking=False):
            return False
        try:
            client = self._links[0].client()
            job = LoadJob(order, time.monotonic() + self._timeout_s)
            outcome = None if client is None else self._load_placed(client, job)
        finally:
            self._using[0].release()
        if outcome is None:
            return False
        self._end(job, outcome)
        return True

    def withdraw(self, job: LoadJob) -> None:
        """Wait for a load no longer: when this returns it has ended, and nothing is written for it any more."""
        with job.writing:
            job.withdrawn = True
        self._end(job, LoadOutcome(job.order.start, 0, 0.0, Reason.TIMEOUT))

    def stage(self, order: LoadOrder) -> None:
        """Begin to bring a request's KV into host memory, as soon as a thread is free."""
        self._queue.put((LoadJob(order, time.monotonic() + self._timeout_s), True))

    def unstage(self, number: int) -> None:
        """What is staged is not wanted any more."""
        self._staging.take(number)

    def close(self) -> None:
        """Give up the loads under way and stop."""
        self._closing = True
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join(10.0)
        for link in self._links:
            link.close()

    def _work(self, link: PoolLink, using: threading.Lock) -> None:
        started = not self._lazy
        while (item := self._queue.get()) is not None:
            if not started:
                link.start()
                started = True
            job, stage = item
            outcome = LoadOutcome(job.order.start, 0, 0.0, Reason.FAILED_LOAD)
            run = self._stage if stage else self._load_staged if job.order.staged else self._run
            try:
                with using:
                    outcome = run(link, job)
            except Exception:
                log.exception("kvrelay: a bug: this load counts as failed, the engine goes on")
            if stage:
                self._staging_over(job.order.staged, outcome)
            else:
                self._end(job, outcome)

    def _end(self, job: LoadJob, outcome: LoadOutcome) -> None:
        if not job.end():
            return
        self._counters.add("loaded_bytes", outcome.bytes)
        if outcome.reason:
            self._counters.add(f"load_failed_{outcome.reason}")
        self._ended(job.order.request_id, replace(outcome, took_s=time.monotonic() - job.began))

    def _run(self, link: PoolLink, job: LoadJob) -> LoadOutcome:
        order, now = job.order, job.order.kind is LoadKind.NOW
        client = link.client() if now else link.wait(CONNECT_WAIT_S)
        if client is None:
            return LoadOutcome(order.start, 0, 0.0, Reason.POOL_DOWN)
        cancelled = partial(self._is_cancelled, order)
        if order.kind is LoadKind.EARLY:
            outcome, error = Pursuit(self._kv, client, job, cancelled).run()
            if error is not None:
                link.drop_if_closed(error)
            return outcome
        placed = self._load_placed(client, job)
        if placed is not None:
            return placed
        first = Attempt(self._kv, client, job, cancelled, job.deadline, unsealed=not now)
        error = first.run()
        if error is None:
            return first.outcome(Reason.NONE if first.valid_end == order.end else Reason.FAILED_LOAD)
        reason = reason_of(error)
        if now:  # a step waits for it
            log.warning("kvrelay: request %s: %s; computing it here", order.request_id, error)
        elif not client.closed and not isinstance(error, CancelledLoadError):
            log.warning("kvrelay: request %s: %s; taking what is sealed", order.request_id, error)
            again = Attempt(self._kv, client, job, cancelled, time.monotonic() + SLICE_S, unsealed=False)
            if again.run() is None:
                again.bytes += first.bytes
                again.transfer_s += first.transfer_s
                return again.outcome(reason if again.valid_end < order.end else Reason.NONE)
        link.drop_if_closed(error)
        return LoadOutcome(order.start, first.bytes, first.transfer_s, reason)

    def _load_placed(self, client: PoolClient, job: LoadJob) -> LoadOutcome | None:
        """Copy what the order says the places of; None: it does not, or what is there is something else."""
        order = job.order
        load = PlacedLoad.of(self._kv, job, client)
        if load is None:
            return None
        began = time.monotonic()
        try:
            if not load.run(partial(self._is_cancelled, order)):
                log.debug("kvrelay: request %s: not where it was found", order.request_id)
                return None
        except BadRequestError as error:  # no such place in the arena
            log.debug("kvrelay: request %s: %s", order.request_id, error)
            return None
        except CancelledLoadError as error:
            return LoadOutcome(order.start, load.bytes, time.monotonic() - began, reason_of(error))
        return LoadOutcome(order.end, load.bytes, time.monotonic() - began)

    # --- staging ---

    def _stage(self, link: PoolLink, job: LoadJob) -> LoadOutcome:
        order = job.order
        if self._unstaged(order.staged):
            return LoadOutcome(order.start, 0, 0.0, Reason.FAILED_LOAD)
        staged = self._staging.begin(order.staged, self._kv.size_bytes(order))
        if staged is None:
            self._counters.add("staging_full")
            return LoadOutcome(order.start, 0, 0.0, Reason.STAGING_FULL)
        client = link.wait(CONNECT_WAIT_S)
        if client is None:
            return LoadOutcome(order.start, 0, 0.0, Reason.POOL_DOWN)
        cancelled = partial(self._is_cancelled, order, stage=True)
        attempt = Attempt(self._kv, client, job, cancelled, job.deadline, unsealed=True, staged=staged)
        error = attempt.run()
        if error is not None:
            log.debug("kvrelay: request %s cannot be staged: %s", order.request_id, error)
            link.drop_if_closed(error)
            return LoadOutcome(order.start, 0, 0.0, reason_of(error))
        staged.transfer_s = attempt.transfer_s
        self._counters.add("staged_bytes", attempt.bytes)
        return attempt.outcome(Reason.NONE if attempt.valid_end == order.end else Reason.PARTIAL)

    def _staging_over(self, number: int, outcome: LoadOutcome) -> None:
        wanted = self._stage_ended(number, outcome)
        if outcome.reason or not wanted:
            self._staging.take(number)

    def _load_staged(self, _link: PoolLink, job: LoadJob) -> LoadOutcome:
        """Put what is staged into the blocks."""
        order = job.order
        staged = self._staging.take(order.staged)
        if staged is None or not staged.covers(order, self._kv.held):
            return LoadOutcome(order.start, 0, 0.0, Reason.FAILED_LOAD)
        began = time.monotonic()
        for kept in staged.layers:
            part = kept.of(order.starts[kept.layer.group], order.end)
            if not part.chunks:
                continue
            if write_layer(order, part.layer, part.chunks, part.views, part.sums, order.end) is not None:
                return LoadOutcome(order.start, 0, 0.0, Reason.CORRUPT)
        return LoadOutcome(order.end, staged.used, staged.transfer_s + time.monotonic() - began)

    def _is_cancelled(self, order: LoadOrder, *, stage: bool = False) -> bool:
        """Whether nobody waits for a load, or for staging, any more."""
        return self._closing or (self._unstaged(order.staged) if stage else self._cancelled(order.request_id))
