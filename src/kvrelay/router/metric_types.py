"""Counters, gauges and histograms for one thread: an increment is an addition.

They look like `prometheus_client`'s, whose own take a lock and several calls for each increment, which a request makes
a dozen of. A registry of `prometheus_client` collects and renders them.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, ClassVar, Generic, Literal, Protocol, TypeVar

from prometheus_client.core import Metric

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from prometheus_client import CollectorRegistry


class _Child(Protocol):
    """The series of one set of labels."""

    def samples(self, name: str) -> Iterator[tuple[str, dict[str, str], float]]:
        """Names, labels beside the family's, values."""
        ...


_C = TypeVar("_C", bound=_Child)


class CounterChild:
    """What only grows."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        """From 0."""
        self.value = 0.0

    def inc(self, amount: float = 1) -> None:
        """Add; ``amount`` is not negative."""
        self.value += amount

    def samples(self, name: str) -> Iterator[tuple[str, dict[str, str], float]]:
        """One."""
        yield f"{name}_total", {}, self.value


class GaugeChild:
    """What goes up and down."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        """From 0."""
        self.value = 0.0

    def set(self, value: float) -> None:
        """To a value."""
        self.value = float(value)

    def inc(self, amount: float = 1) -> None:
        """Up."""
        self.value += amount

    def dec(self, amount: float = 1) -> None:
        """Down."""
        self.value -= amount

    def samples(self, name: str) -> Iterator[tuple[str, dict[str, str], float]]:
        """One."""
        yield name, {}, self.value


class HistogramChild:
    """How often which size."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        """``bounds``: each bucket's largest value, ascending; one without a bound follows."""
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, amount: float) -> None:
        """One more."""
        self._counts[bisect_left(self._bounds, amount)] += 1
        self._sum += amount

    def samples(self, name: str) -> Iterator[tuple[str, dict[str, str], float]]:
        """Cumulative buckets, the count, the sum."""
        total = 0
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            yield f"{name}_bucket", {"le": bound}, float(total)
        yield f"{name}_count", {}, float(total)
        yield f"{name}_sum", {}, self._sum


class Told(Metric):
    """What is collected, with how several workers' become one."""

    merged: Literal["sum", "max", "min"] = "sum"


class Family(Generic[_C]):
    """A metric with labels: a series for each set of their values that was asked for; without labels, one series."""

    kind: ClassVar[str]
    merged: Literal["sum", "max", "min"] = "sum"
    """What several workers' values become together."""

    def __init__(
        self, name: str, documentation: str, labelnames: Sequence[str] = (), *, registry: CollectorRegistry
    ) -> None:
        """``registry`` collects it."""
        self.name = name
        self.documentation = documentation
        self.labelnames = tuple(labelnames)
        self._children: dict[tuple[str, ...], _C] = {}
        if not self.labelnames:
            self._only = self.labels()
        registry.register(self)

    def labels(self, *values: str) -> _C:
        """The series of these values; keep it where it is used often.

        Raises:
            ValueError: they are more or fewer than the labels.
        """
        child = self._children.get(values)
        if child is None:
            if len(values) != len(self.labelnames):
                raise ValueError(f"{self.name} has the labels {self.labelnames}, not {values}")
            child = self._children[values] = self._make()
        return child

    def remove(self, *values: str) -> None:
        """Forget the series of these values, if there is one."""
        self._children.pop(values, None)

    def remove_all(self, some: Mapping[str, str]) -> None:
        """Forget every series that has these values of these labels."""
        places = [(self.labelnames.index(name), value) for name, value in some.items()]
        for values in list(self._children):
            if all(values[place] == value for place, value in places):
                del self._children[values]

    def describe(self) -> list[Metric]:
        """What a registry asks for when it is told of the metric."""
        return [Metric(self.name, self.documentation, self.kind)]

    def collect(self) -> list[Told]:
        """Everything, for a registry."""
        metric = Told(self.name, self.documentation, self.kind)
        metric.merged = self.merged
        for values, child in self._children.items():
            labels = dict(zip(self.labelnames, map(str, values), strict=True))
            for name, more, value in child.samples(self.name):
                metric.add_sample(name, labels | more, value)
        return [metric]

    def _make(self) -> _C:
        raise NotImplementedError


class Counter(Family[CounterChild]):
    """What only grows; its name is given without the ``_total`` it is rendered with."""

    kind = "counter"

    def inc(self, amount: float = 1) -> None:
        """Of a counter without labels."""
        self._only.value += amount

    def _make(self) -> CounterChild:
        return CounterChild()


class Gauge(Family[GaugeChild]):
    """What goes up and down."""

    kind = "gauge"

    def __init__(
        self,
        name: str,
        documentation: str,
        labelnames: Sequence[str] = (),
        *,
        registry: CollectorRegistry,
        merged: Literal["sum", "max", "min"] = "sum",
    ) -> None:
        """``merged``: what several workers' values become together."""
        super().__init__(name, documentation, labelnames, registry=registry)
        self.merged = merged

    def set(self, value: float) -> None:
        """Of a gauge without labels."""
        self._only.set(value)

    def inc(self, amount: float = 1) -> None:
        """Of a gauge without labels."""
        self._only.inc(amount)

    def dec(self, amount: float = 1) -> None:
        """Of a gauge without labels."""
        self._only.dec(amount)

    def _make(self) -> GaugeChild:
        return GaugeChild()


class Histogram(Family[HistogramChild]):
    """How often which size."""

    kind = "histogram"

    def __init__(
        self,
        name: str,
        documentation: str,
        labelnames: Sequence[str] = (),
        *,
        buckets: Sequence[float],
        registry: CollectorRegistry,
    ) -> None:
        """``buckets``: their largest values, ascending."""
        self._bounds = tuple(map(float, buckets))
        super().__init__(name, documentation, labelnames, registry=registry)

    def observe(self, amount: float) -> None:
        """Of a histogram without labels."""
        self._only.observe(amount)

    def _make(self) -> HistogramChild:
        return HistogramChild(self._bounds)
