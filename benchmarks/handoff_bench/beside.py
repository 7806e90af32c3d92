"""What hand-overs cost those who decode on D meanwhile, beside hits in D's own cache at the same rate."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from handoff_bench.asking import prompt_of
from handoff_bench.cases import BASE, Case, Table, cell
from handoff_bench.legs import DECODES
from kvrelay.bench.report import median, median_interval, spread
from kvrelay.bench.section import Goal

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from handoff_bench.asking import Engine
    from handoff_bench.legs import Legs, Settings

HELD_TO_GOALS = ("kvrelay", "kvrelay-async")
WINDOW = 4
"""Requests in a window; windows of hand-overs and of local hits take turns."""


class Rate:
    """Tokens a second that an engine generates while this context lasts, in ``value`` after it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.value = 0.0

    def __enter__(self) -> Self:
        """Begin."""
        self._before, self._began = self._engine.generated_tokens(), time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        """End."""
        tokens = self._engine.generated_tokens() - self._before
        self.value = tokens / (time.perf_counter() - self._began)


@dataclass
class Rates:
    """Tokens a second of the decodes in windows of either kind, one of each in a round."""

    handed: list[float] = field(default_factory=list)
    local: list[float] = field(default_factory=list)


class BesideCase(Case):
    """A window of hand-overs and one of local hits in each round, both in one turn."""

    def __init__(self, legs: Legs, length: int, decodes: int) -> None:
        super().__init__(legs, length, decodes)
        self.rates = Rates()

    def measure(self, round_: int, *, counts: bool) -> None:
        """One window of each kind. P computes in both: what differs is where D finds the prompt."""
        prompts = [prompt_of(self.prompt_tokens, "beside", round_, at) for at in range(WINDOW)]
        taken = self.rates if counts else Rates()
        before = self.legs.decode.external_tokens()
        with Rate(self.legs.decode) as taking:
            for prompt in prompts:
                self.hand_over(prompt)
        self.legs.prove_taken(before, WINDOW * self.legs.handed_over(self.prompt_tokens))
        taken.handed.append(taking.value)
        if not self.legs.contestant.caches:
            return
        with Rate(self.legs.decode) as hitting:
            for at, prompt in enumerate(prompts):
                with self.legs.other_prefilled(prompt, "beside", round_, at):
                    self.legs.decode.stream(prompt)
        taken.local.append(hitting.value)


class BesideTable(Table[BesideCase]):
    """Tokens a second of the decodes, in windows of either kind."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(
            settings,
            f"Tokens a second of {DECODES} decodes on D meanwhile",
            [
                "contestant",
                "prompt",
                "with hand-overs",
                "with local hits",
                "time between tokens, ratio (95 %)",
                f"with hand-overs / {BASE}'s (95 %)",
                "rounds",
            ],
        )

    @property
    def decodes(self) -> tuple[int, ...]:
        """Always as many."""
        return (DECODES,)

    def case(self, legs: Legs, length: int, decodes: int) -> BesideCase:
        """Everyone's."""
        return BesideCase(legs, length, decodes)

    def note(self, cases: Sequence[BesideCase]) -> None:
        """Add everyone's row."""
        for length in {case.length for case in cases}:
            self.compare(length, {case.name: case.rates for case in cases})

    def compare(self, length: int, rates: Mapping[str, Rates]) -> None:
        """Add the rows of contestants, whose rounds were the same, and hold ours against the goal."""
        base = rates.get(BASE, Rates())
        for name, own in rates.items():
            slower = _ratio(own.local, own.handed)
            versus = None if name == BASE else _ratio(own.handed, base.handed)
            cells = [f"{median(of):.0f} ±{spread(of):.0%}" if of else "" for of in (own.handed, own.local)]
            rounds = len(own.handed)
            self.section.rows.append([name, str(length), *cells, cell(slower, 3), cell(versus, 2), str(rounds)])
            speeds = {"handed_tokens_s": own.handed, "local_tokens_s": own.local}
            self.section.figures[f"{name} {length}"] = {
                "rounds": rounds,
                **{what: median(each) for what, each in speeds.items() if each},
                **{what: list(value) for what, value in (("itl_ratio", slower), ("handed_ratio", versus)) if value},
            }
            if name in HELD_TO_GOALS and slower:
                what = f"{name}: ITL beside {length}-token hand-overs"
                self.section.goals.append(Goal(what, 1.05, slower[0], at_least=False, rounds=rounds))


def _ratio(over: Sequence[float], under: Sequence[float]) -> tuple[float, float, float] | None:
    """Median, and its 95 % interval, of the ratios of the rounds that both went through; None where there are none."""
    ratios = [one / other for one, other in zip(over, under, strict=False)]
    return (median(ratios), *median_interval(ratios)) if ratios else None
