"""Histograms of one thread: an observation costs a bisection and two additions.

`prometheus_client`'s take a lock for each of two values and look the bucket up one by one: five times as long.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from kvrelay.router.core.observing.observation import Facts

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
QUEUE = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
REQUEST = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0)
TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)
GONE = "gone"
"""What workers that have left are called together, so that there are never more series than workers."""


class Series:
    """One histogram."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        """``bounds``: of the buckets, upper ones inclusive, rising; one more takes the rest."""
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """One more."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class Family:
    """Histograms of one name. Labels: ``worker`` first, if at all."""

    def __init__(self, name: str, help_text: str, labels: tuple[str, ...], bounds: Sequence[float]) -> None:
        """``bounds``: of every series."""
        self.name = name
        self.help = help_text
        self.labels = labels
        self.bounds = bounds
        self.series: dict[tuple[str, ...], Series] = {}

    def at(self, *values: str) -> Series:
        """The series of these label values, in the labels' order."""
        return self.of(values)

    def of(self, values: tuple[str, ...]) -> Series:
        """The same."""
        found = self.series.get(values)
        if found is None:
            found = self.series[values] = Series(self.bounds)
        return found

    def forget(self, worker: str) -> None:
        """A worker has left."""
        if self.labels[0] == "worker":
            for values in [values for values in self.series if values[0] == worker]:
                del self.series[values]


class Timings:
    """Where requests' time goes, by worker and outcome."""

    def __init__(self, workers: Iterable[str] = ()) -> None:
        """``workers``: those there are now."""
        self._workers = set(workers)
        outcome = ("worker", "outcome")
        self.leg = Family(
            "kvrelay_router_leg_seconds", "From sending a leg to the end of its answer", ("role",), SECONDS
        )
        self.ttft = Family(
            "kvrelay_router_ttft_seconds", "From a request to the first byte of its answer", ("worker",), SECONDS
        )
        self.itl = Family(
            "kvrelay_router_itl_seconds", "Mean time between a streamed answer's tokens, once a request",
            outcome, TOKEN,
        )  # fmt: skip
        self.request = Family(
            "kvrelay_router_request_seconds", "From a hand-over's request to the end of its answer", outcome, REQUEST
        )
        self.queue = Family(
            "kvrelay_router_queue_seconds", "From a request until an engine was asked", ("outcome",), QUEUE
        )
        self.prefill = Family(
            "kvrelay_router_prefill_seconds", "Prefill legs, from sending to the end of the answer", outcome, SECONDS
        )
        self.migration = Family(
            "kvrelay_router_migration_seconds", "From sending a decode leg to its first byte", outcome, SECONDS
        )
        self.decode = Family(
            "kvrelay_router_decode_seconds", "From an answer's first byte to its end", outcome, REQUEST
        )

    def __iter__(self) -> Iterator[Family]:
        return (value for value in vars(self).values() if isinstance(value, Family))

    def welcome(self, worker: str) -> None:
        """A worker has joined."""
        self._workers.add(worker)

    def forget(self, worker: str) -> None:
        """A worker has left: its series go, and what is still observed of it is put down to `GONE`."""
        self._workers.discard(worker)
        for family in self:
            family.forget(worker)

    def name(self, worker: str) -> str:
        """What a worker is called in labels."""
        return worker if worker in self._workers or not worker else GONE

    def first_byte(self, worker: str, seconds: float) -> None:
        """``worker`` begins to answer, so long after the request."""
        self.ttft.at(self.name(worker)).observe(seconds)

    def observe(self, facts: Facts) -> None:
        """A request is over. Only hand-overs are looked at; TTFT is observed when it happens."""
        if facts.seen.record is None:
            return
        outcome, decoder = facts.outcome, self.name(facts.decoder)
        key = (decoder, outcome)
        self.request.of(key).observe(facts.seconds)
        self.queue.of((outcome,)).observe(facts.queue_s)
        for leg in facts.seen.legs:
            if leg.ended and leg.role == "prefill":
                self.prefill.of((self.name(leg.worker), leg.outcome)).observe(leg.ended - leg.began)
        if (seconds := facts.migration_s) is not None:
            self.migration.of(key).observe(seconds)
        if (seconds := facts.decode_s) is not None:
            self.decode.of(key).observe(seconds)
        if (seconds := facts.itl_s) is not None:
            self.itl.of(key).observe(seconds)
