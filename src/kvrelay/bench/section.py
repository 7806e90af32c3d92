"""What a section gives back: figures for programs, rows for people, and goals with what was reached."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvrelay.bench.report import table

JUDGED_ROUNDS = 20
"""A median of fewer rounds is shown, and held against no goal."""


@dataclass(frozen=True)
class Goal:
    """A bound on a figure. ``at_least``: whether more is better. ``value`` None: it could not be measured.

    ``rounds``: of how many the figure is a median, where these may be too few to judge it.
    """

    what: str
    bound: float
    value: float | None
    at_least: bool = True
    rounds: int = JUDGED_ROUNDS

    @property
    def met(self) -> bool | None:
        """Whether it was reached; None: not measured, or not judged."""
        if self.value is None or self.rounds < JUDGED_ROUNDS:
            return None
        return self.value >= self.bound if self.at_least else self.value <= self.bound

    def row(self) -> list[str]:
        """Cells of the goals' table."""
        reached = "not measured" if self.value is None else f"{self.value:.2f}"
        unjudged = "not measured" if self.value is None else f"not judged: {self.rounds} rounds"
        word = {True: "met", False: "NOT met", None: unjudged}[self.met]
        return [self.what, f"{'>=' if self.at_least else '<='} {self.bound:g}", reached, word]


@dataclass
class Section:
    """Results of one section. ``notes`` are printed under its table."""

    title: str
    header: list[str]
    rows: list[list[str]] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    goals: list[Goal] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    def text(self) -> str:
        """The section as Markdown."""
        parts = [f"\n### {self.title}\n", table(self.header, self.rows)]
        parts += [f"\n{note}" for note in self.notes]
        parts += [f"\n{name}: absent, {why}" for name, why in self.absent.items()]
        if self.goals:
            parts += ["", table(["goal", "bound", "reached", ""], [goal.row() for goal in self.goals])]
        return "\n".join(parts)

    def data(self) -> dict[str, Any]:
        """The section for the closing JSON line."""
        return {
            **self.figures,
            "goals": {goal.what: {"bound": goal.bound, "value": goal.value, "met": goal.met} for goal in self.goals},
            "absent": self.absent,
        }


def ratio(over: float | None, under: float | None) -> float | None:
    """``over / under``, None where either is missing."""
    return None if over is None or not under else over / under
