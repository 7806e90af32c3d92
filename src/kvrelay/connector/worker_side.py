"""The connector in a worker process: carries out the scheduler's orders on one rank's blocks, and reports.

The engine's calls of one step come in this order: `before_step` (blocks are about to change hands), `begin_step`,
`layer_computed` for every layer, `end_step`, `take_results`.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from kvrelay.connector.core.orders import LoadKind
from kvrelay.connector.core.rank import RankLedger
from kvrelay.connector.saves import Job

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvrelay.connector.core.orders import LoadOrder, LoadOutcome, StepOrders
    from kvrelay.connector.core.rank import Results
    from kvrelay.connector.core.tables import Tables
    from kvrelay.connector.loader import Loader
    from kvrelay.connector.saver import Saver
    from kvrelay.connector.saves import Step

IDLE_WAIT_S = 0.002
"""How long a step without a forward pass waits for something to report: the engine would only ask again."""
DRAIN_S = 0.5
"""How long saves of a preempted request may go on before they are given up."""


class WorkerSide:
    """One rank. Its methods are called by the engine's thread; saves and loads end on others."""

    def __init__(
        self,
        *,
        layers: int,
        tables: Tables,
        hold_s: float,
        announce_wait_s: float,
        sync_load_wait_s: float = 0.25,
        step_begins: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``layers``: how many this rank has. ``sync_load_wait_s``: how long a step waits for its synchronous loads.

        ``step_begins``: called when blocks have changed hands, before anything else of a step.
        """
        self._step_begins = step_begins
        self._clock = clock
        self._sync_load_wait_s = sync_load_wait_s
        self._announce_wait_s = announce_wait_s
        self._layers = layers
        self._changed = threading.Condition()
        self._ledger = RankLedger(tables=tables, hold_s=hold_s)
        self._jobs: dict[str, list[Job]] = {}
        self._step: Step | None = None
        self._late: Step | None = None
        self._computed: set[int] = set()
        """Layers of this step that the engine has reported."""
        self._saver: Saver
        self._loader: Loader
        self._sync_loader: Loader
        self._early_loader: Loader

    def start(
        self, saver: Saver, loader: Loader, sync_loader: Loader | None = None, early_loader: Loader | None = None
    ) -> None:
        """Take the threads that do the work; `save_ended` and `load_ended` are for them.

        ``sync_loader``: for synchronous loads, which must not queue behind others. ``early_loader``: for early ones,
        which others must not queue behind.
        """
        self._saver = saver
        self._loader = loader
        self._sync_loader = sync_loader or loader
        self._early_loader = early_loader or loader

    # --- for the threads ---

    def is_cancelled(self, request_id: str) -> bool:
        """Whether a load's result is not wanted any more."""
        with self._changed:
            return self._ledger.cancelled(request_id)

    def load_ended(self, request_id: str, outcome: LoadOutcome) -> None:
        """A load is over."""
        with self._changed:
            self._ledger.load_ended(request_id, outcome)
            self._changed.notify_all()

    def is_unstaged(self, number: int) -> bool:
        """Whether what is being staged is not wanted any more."""
        with self._changed:
            return self._ledger.unstaged(number)

    def stage_ended(self, number: int, outcome: LoadOutcome) -> bool:
        """Staging is over; whether anybody still waits for it."""
        with self._changed:
            wanted = self._ledger.stage_ended(number, outcome)
            self._changed.notify_all()
        return wanted

    def _save_ended(self, job: Job) -> None:
        request_id = job.order.request_id
        with self._changed:
            self._ledger.save_ended(request_id, job.order.number)
            self._jobs[request_id].remove(job)
            if not self._jobs[request_id]:
                del self._jobs[request_id]
            self._changed.notify_all()

    # --- one step ---

    def before_step(self, orders: StepOrders) -> None:
        """Blocks of preempted requests are about to be given to others: be done with them."""
        if orders.preempted:
            self._drain(orders.preempted, DRAIN_S)

    def _drain(self, request_ids: Iterable[str], timeout_s: float) -> None:
        """When this returns, no block of these requests is read any more."""
        names = set(request_ids)
        with self._changed:
            self._changed.wait_for(lambda: not any(map(self._ledger.saving, names)), timeout_s)
            left = [job for name in names for job in self._jobs.get(name, ())]
        if left:
            self._saver.cancel(left)

    def begin_step(self, orders: StepOrders) -> None:
        """Take the step's orders on: announce its saves, start its loads."""
        if self._step is not None:  # the engine broke off before it said so
            self.end_step()
        self._step_begins()
        self._computed.clear()
        jobs: list[Job] = []
        with self._changed:
            for request_id in orders.held:
                self._ledger.hold(request_id, self._clock())
            for request_id in orders.cancelled:
                self._ledger.cancel(request_id)
            for stage in orders.stages:
                self._ledger.stage_ordered(stage.staged)
            for number in orders.unstaged:  # of this step's, too
                self._ledger.unstage(number)
            for load in orders.loads:
                self._ledger.load_ordered(load)
            for save in orders.saves:
                job = Job(save, self._save_ended)
                self._ledger.save_ordered(save.request_id)
                self._jobs.setdefault(save.request_id, []).append(job)
                jobs.append(job)
        self._begin_loads(orders)
        now = [job for job in jobs if not job.order.complete]
        self._step = self._saver.begin(now) if now else None
        if late := [job for job in jobs if job.order.complete]:
            self._saver.computed(self._saver.begin(late), range(self._layers))
        self._load_now([load for load in orders.loads if load.kind is LoadKind.NOW])

    def _begin_loads(self, orders: StepOrders) -> None:
        for number in orders.unstaged:
            self._loader.unstage(number)
        for stage in orders.stages:
            self._loader.stage(stage)
        for load in orders.loads:
            if load.kind is not LoadKind.NOW:
                (self._early_loader if load.kind is LoadKind.EARLY else self._loader).load(load)

    def _load_now(self, orders: Sequence[LoadOrder]) -> None:
        """Load before the forward pass: here what is only to be copied; the rest is given up if it takes too long."""
        asked = [order for order in orders if not self._sync_loader.load_here(order)]
        if not asked:
            return
        loads = [self._sync_loader.load(order) for order in asked]
        names = [order.request_id for order in asked]
        with self._changed:
            self._changed.wait_for(lambda: all(map(self._ledger.has_ended, names)), self._sync_load_wait_s)
        for load in loads:
            self._sync_loader.withdraw(load)

    def layer_computed(self, layer: int) -> None:
        """The step's tokens are in this layer's blocks (``layer``: of this rank's, from 0).

        A drafter's layer is told of again for each token that it guesses beyond: of a step's tokens nothing is new.
        """
        if layer in self._computed:
            return
        self._computed.add(layer)
        if self._step is not None:
            self._saver.computed(self._step, (layer,))

    def end_step(self) -> None:
        """The forward pass is over. Waits a bounded moment for the announcements, so that no reader comes before.

        The engine says so too when the pass was broken off, by an error or by a signal that ends the process: only
        layers reported as computed are.
        """
        step, self._step = self._step, None
        if step is None:
            return
        if len(self._computed) < self._layers:
            self._saver.interrupted(step)
            return
        if not any(job.order.prompt for job in step.jobs):
            return  # Nobody looks for what was generated before the next turn.
        if self._late is not None and not self._late.announced.is_set():
            return  # The pool is slow, and has been waited for once.
        self._late = None if step.announced.wait(self._announce_wait_s) else step

    def take_results(self) -> Results:
        """What ended since the last step."""
        with self._changed:
            overdue = [job for name in self._ledger.overdue(self._clock()) for job in self._jobs.get(name, ())]
        if overdue:
            self._saver.cancel(overdue)
        with self._changed:
            if not self._computed and self._ledger.waited_for:
                self._changed.wait_for(lambda: self._ledger.has_results, IDLE_WAIT_S)
            return self._ledger.take()

    def close(self) -> None:
        """Stop the threads."""
        self._saver.close()
        for loader in dict.fromkeys((self._loader, self._sync_loader, self._early_loader)):
            loader.close()
