"""How much later the first token comes after a hand-over than after a hit in D's own prefix cache."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from handoff_bench.asking import prompt_of
from handoff_bench.cases import BASE, Case, Table, beyond, cell
from kvrelay.bench.report import median, spread
from kvrelay.bench.section import Goal

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from handoff_bench.legs import Legs, Settings


HELD_TO_GOALS = ("kvrelay", "kvrelay-native")


@dataclass
class Times:
    """Seconds, one of each in a round. ``plain``: a prefix hit in the engine without any connector."""

    handed: list[float] = field(default_factory=list)
    local: list[float] = field(default_factory=list)
    plain: list[float] = field(default_factory=list)

    @property
    def overheads(self) -> list[float]:
        """The rounds' differences; none where there is nothing to compare with."""
        hits = self.local or self.plain
        return [one - other for one, other in zip(self.handed, hits, strict=True)] if hits else []


class TtftCase(Case):
    """Rounds of: a fresh prompt handed over; the same again, now in D's cache; a cached one on the plain engine.

    P computes a prompt before both of what is compared: the processor's caches are as cold, and who answers has idled.
    On D's core the plain engine has answered before that.
    """

    def __init__(self, legs: Legs, length: int, decodes: int) -> None:
        super().__init__(legs, length, decodes)
        self.times = Times()
        self._known = prompt_of(self.prompt_tokens, "plain")

    def begin(self, what: str) -> None:
        """Put a prompt into the plain engine's cache, too."""
        self.legs.plain.complete(self._known)
        super().begin(what)

    def warm_up(self, round_: int) -> None:
        """The plain engine answers last, as before each that is timed."""
        super().warm_up(round_)
        if not self.decodes:
            self.legs.plain.stream(self._known)

    def measure(self, round_: int, *, counts: bool) -> None:
        """One of each."""
        caches = self.legs.contestant.caches
        prompt = prompt_of(self.prompt_tokens, "ttft", self.decodes, round_)
        taken = self.times if counts else Times()
        taken.handed.append(self.hand_over(prompt))
        if caches and not self.decodes:  # D has lost its core to the plain engine before either
            self.legs.plain.stream(self._known)
        if not caches and self.decodes:
            return
        with self.legs.other_prefilled(prompt, "ttft", self.decodes, round_):
            if caches:
                taken.local.append(self.legs.decode.stream(prompt)[0])
            if not self.decodes:  # nobody decodes there
                taken.plain.append(self.legs.plain.stream(self._known)[0])


def _cell(seconds: list[float]) -> str:
    return f"{1e3 * median(seconds):.1f} ±{spread(seconds):.0%}" if seconds else ""


class TtftTable(Table[TtftCase]):
    """Collects contestants' times."""

    def __init__(self, settings: Settings, goal_ms: float) -> None:
        """``goal_ms``: the most overhead of ours."""
        super().__init__(
            settings,
            "First token after a hand-over, ms",
            [
                "contestant",
                "prompt",
                "decodes on D",
                "overhead (95 %)",
                "handed over",
                "local hit",
                "hit in plain vLLM",
                f"overhead beyond {BASE}'s (95 %)",
                f"handed over beyond {BASE}'s (95 %)",
                "rounds",
            ],
        )
        self._goal_ms = goal_ms

    @property
    def decodes(self) -> tuple[int, ...]:
        """D idle, and beside decodes."""
        return self.settings.decodes

    def case(self, legs: Legs, length: int, decodes: int) -> TtftCase:
        """Everyone goes through every case."""
        return TtftCase(legs, length, decodes)

    def note(self, cases: Sequence[TtftCase]) -> None:
        """Add everyone's row."""
        for length, decodes in {(case.length, case.decodes) for case in cases}:
            self.compare(length, decodes, {case.name: case.times for case in cases})

    def compare(self, length: int, decodes: int, times: Mapping[str, Times]) -> None:
        """Add the rows of contestants, whose rounds were the same, and hold ours against the goals."""
        base = times.get(BASE, Times())
        for name, own in times.items():
            intervals = {"overhead_ms": beyond(own.overheads, [0.0] * len(own.overheads))}
            if name != BASE:
                intervals["overhead_beyond_ms"] = beyond(own.overheads, base.overheads)
                intervals["handed_beyond_ms"] = beyond(own.handed, base.handed)
            self.section.rows.append(
                [
                    name,
                    str(length),
                    str(decodes),
                    cell(intervals["overhead_ms"]),
                    *map(_cell, (own.handed, own.local, own.plain)),
                    cell(intervals.get("overhead_beyond_ms")),
                    cell(intervals.get("handed_beyond_ms")),
                    str(len(own.handed)),
                ]
            )
            seconds = {"handed_ms": own.handed, "local_ms": own.local, "plain_ms": own.plain}
            self.section.figures[f"{name} {length} {decodes}"] = {
                "rounds": len(own.handed),
                **{what: 1e3 * median(each) for what, each in seconds.items() if each},
                **{what: list(value) for what, value in intervals.items() if value},
            }
            if name in HELD_TO_GOALS and own.overheads:
                self._judge(name, length, decodes, times)

    def _judge(self, name: str, length: int, decodes: int, times: Mapping[str, Times]) -> None:
        own = times[name].overheads
        what = f"{name}: overhead of {length} tokens, {decodes} decodes"
        self.section.goals.append(
            Goal(f"{what}, ms", self._goal_ms, 1e3 * median(own), at_least=False, rounds=len(own))
        )
        others = [beyond(own, other.overheads) for who, other in times.items() if not who.startswith("kvrelay")]
        if less := [value[0] for value in others if value]:
            goal = Goal(f"{what}, less that of the best other, ms", 0.0, max(less), at_least=False, rounds=len(own))
            self.section.goals.append(goal)
