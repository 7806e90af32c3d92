"""How much later the first token comes after a hand-over than after a hit in D's own prefix cache."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from handoff_bench.asking import prompt_of
from handoff_bench.legs import Table
from kvrelay.bench.report import median, spread
from kvrelay.bench.section import Goal

if TYPE_CHECKING:
    from handoff_bench.legs import Legs, Settings
    from kvrelay.bench.section import Section


HELD_TO_GOALS = ("kvrelay", "kvrelay-native")


@dataclass
class Times:
    """Seconds, one of each in a round. ``plain``: a prefix hit in the engine without any connector."""

    handed: list[float]
    local: list[float]
    plain: list[float]

    @property
    def overhead_ms(self) -> float:
        """Median of the rounds' differences."""
        return 1e3 * median([one - other for one, other in zip(self.handed, self.local or self.plain, strict=True)])


def measure(legs: Legs, length: int, decodes: int, settings: Settings) -> Times:
    """Rounds of: a fresh prompt handed over; the same again, now in D's cache; a cached one on the plain engine.

    P computes a prompt before both of what is compared: the processor's caches are as cold, and who answers has idled.
    On D's core the plain engine has answered before that.

    Raises:
        KvRelayError: D computed prompts again.
    """
    times = Times([], [], [])
    length += legs.contestant.longer_by
    known = prompt_of(length, "plain", length)
    legs.plain.complete(known)
    before = legs.decode.external_tokens()
    with contextlib.ExitStack() as background:
        if decodes:
            background.enter_context(legs.decode.decoding(decodes, legs.model))
        done = 0
        for round_, counts in settings.rounds():
            done += 1
            prompt = prompt_of(length, legs.contestant.name, length, decodes, round_)
            taken = times if counts else Times([], [], [])
            taken.handed.append(legs.hand_over(prompt)[0])
            if legs.contestant.caches and not decodes:  # D has lost its core to the plain engine before either
                legs.plain.stream(known)
            with legs.other_prefilled(prompt, legs.contestant.name, decodes, round_):
                if legs.contestant.caches:
                    taken.local.append(legs.decode.stream(prompt)[0])
                if not decodes:  # nobody decodes there
                    taken.plain.append(legs.plain.stream(known)[0])
    legs.prove_taken(before, done * legs.handed_over(length))
    return times


def _cell(seconds: list[float]) -> str:
    return f"{1e3 * median(seconds):.1f} ±{spread(seconds):.0%}" if seconds else ""


class TtftTable(Table):
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
                "overhead",
                "handed over",
                "local hit",
                "hit in plain vLLM",
                "rounds",
            ],
        )
        self._goal_ms = goal_ms
        self._overheads: dict[tuple[str, int, int], float] = {}
        self._rounds: dict[tuple[str, int, int], int] = {}

    def add(self, legs: Legs, length: int) -> None:
        """Measure one contestant at one length."""
        for decodes in self.settings.decodes if legs.contestant.caches else (0,):
            self._note(legs.contestant.name, length, decodes, measure(legs, length, decodes, self.settings))

    def _note(self, name: str, length: int, decodes: int, times: Times) -> None:
        overhead = self._overheads[name, length, decodes] = times.overhead_ms
        self._rounds[name, length, decodes] = len(times.handed)
        cells = [_cell(values) for values in (times.handed, times.local, times.plain)]
        self.section.rows.append([name, str(length), str(decodes), f"{overhead:.1f}", *cells, str(len(times.handed))])
        self.section.figures[f"{name} {length} {decodes}"] = {
            "overhead_ms": overhead,
            "handed_ms": 1e3 * median(times.handed),
        }
        for what, seconds in (("local_ms", times.local), ("plain_ms", times.plain)):
            if seconds:
                self.section.figures[f"{name} {length} {decodes}"][what] = 1e3 * median(seconds)

    def finish(self) -> Section:
        """The table with its goals."""
        for (name, length, decodes), overhead in self._overheads.items():
            if name not in HELD_TO_GOALS:
                continue
            what, rounds = (
                f"{name}: overhead of {length} tokens, {decodes} decodes",
                self._rounds[name, length, decodes],
            )
            self.section.goals.append(Goal(f"{what}, ms", self._goal_ms, overhead, at_least=False, rounds=rounds))
            others = [
                value for (other, *case), value in self._overheads.items()
                if not other.startswith("kvrelay") and case == [length, decodes]
            ]  # fmt: skip
            if others:
                less = f"{what}, less that of the best other, ms"
                self.section.goals.append(Goal(less, 0.0, overhead - min(others), at_least=False, rounds=rounds))
        return self.section
