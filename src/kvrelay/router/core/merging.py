"""Metrics of several workers as one router's."""

from __future__ import annotations

from operator import add
from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

Labels = tuple[tuple[str, str], ...]
Sample = tuple[str, Labels, float]

_BY: dict[str, Callable[[float, float], float]] = {"sum": add, "max": max, "min": min}


class Shown(Struct, frozen=True, array_like=True):
    """One family of series as it is exposed."""

    name: str
    documentation: str
    kind: str
    merged: str
    """How the series of several workers become one: ``sum``, ``max`` or ``min``."""
    samples: tuple[Sample, ...]

    @property
    def grows(self) -> bool:
        """Whether its values only grow, so that they outlive the worker that counted."""
        return self.kind in {"counter", "histogram"}


Snapshot = tuple[Shown, ...]
"""Everything one worker exposes."""


def merge(snapshots: Iterable[Snapshot]) -> Snapshot:
    """One snapshot of many; families and series in the order in which they are first seen."""
    families: dict[str, Shown] = {}
    values: dict[str, dict[tuple[str, Labels], float]] = {}
    for snapshot in snapshots:
        for family in snapshot:
            families.setdefault(family.name, family)
            known = values.setdefault(family.name, {})
            together = _BY[family.merged]
            for name, labels, value in family.samples:
                key = (name, labels)
                known[key] = together(known[key], value) if key in known else value
    return tuple(
        Shown(
            family.name,
            family.documentation,
            family.kind,
            family.merged,
            tuple((name, labels, value) for (name, labels), value in values[family.name].items()),
        )
        for family in families.values()
    )


def lasting(snapshot: Snapshot) -> Snapshot:
    """What is left of a worker that has ended: what it counted."""
    return tuple(family for family in snapshot if family.grows)


def weight(snapshot: Snapshot) -> float:
    """Larger the later a snapshot of one worker was taken: what it has counted in all."""
    return sum(value for family in snapshot if family.kind == "counter" for _, _, value in family.samples)
