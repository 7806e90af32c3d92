"""The connector's two halves without vLLM, for tests: `kvrelay.connector.calls` with types of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvrelay.connector.calls import SchedulerCalls, WorkerCalls

if TYPE_CHECKING:
    from kvrelay.connector.core.orders import RankReport, StepOrders
    from kvrelay.connector.scheduler_side import SchedulerSide
    from kvrelay.connector.worker_side import WorkerSide


@dataclass
class BareStep:
    """Scheduler to workers."""

    orders: StepOrders


@dataclass
class BareReport:
    """Workers to scheduler."""

    report: RankReport

    def aggregate(self, other: BareReport) -> BareReport:
        """Both ranks' reports."""
        return BareReport(self.report.join(other.report))


@dataclass
class BareTransfers:
    """What a step's reports name."""

    finished_sending: set[str]
    finished_recving: set[str]
    failed_recving: set[str]


class BareScheduler(SchedulerCalls):
    """The scheduler's half."""

    _metadata = BareStep

    def __init__(self, side: SchedulerSide) -> None:
        self._scheduler = side

    def shutdown(self) -> None:
        """Disconnect."""
        self._scheduler.close()


class BareWorker(WorkerCalls):
    """One rank's half."""

    _report = BareReport
    _transfers = BareTransfers

    def __init__(self, side: WorkerSide, layer_of: dict[str, int]) -> None:
        """``layer_of``: the rank's layers by name, from 0."""
        self._worker = side
        self._layer_of = layer_of

    def clear_connector_metadata(self) -> None:
        """Nothing."""

    def shutdown(self) -> None:
        """Stop the threads."""
        self._worker.close()
