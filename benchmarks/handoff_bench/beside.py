"""What hand-overs cost those who decode on D meanwhile, beside hits in D's own cache at the same rate."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Self

from handoff_bench.asking import prompt_of
from handoff_bench.legs import DECODES, Table
from kvrelay.bench.report import median, spread
from kvrelay.bench.section import Goal

if TYPE_CHECKING:
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


class BesideTable(Table):
    """Tokens a second of the decodes, in windows of either kind."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(
            settings,
            f"Tokens a second of {DECODES} decodes on D meanwhile",
            ["contestant", "prompt", "with hand-overs", "with local hits", "time between tokens, ratio"],
        )

    def run(self, legs: Legs, length: int) -> None:
        """Measure one contestant, if there is something to compare with."""
        if legs.contestant.caches:
            super().run(legs, length)
        else:
            self.section.absent[legs.contestant.name] = "D has no prefix cache to compare with"

    def add(self, legs: Legs, length: int) -> None:
        """Measure one contestant at one length."""
        name = legs.contestant.name
        handed, local = self._measure(legs, length)
        ratio = median([other / one for one, other in zip(handed, local, strict=True)])
        cells = [f"{median(values):.0f} ±{spread(values):.0%}" for values in (handed, local)]
        self.section.rows.append([name, str(length), *cells, f"{ratio:.3f}"])
        self.section.figures[f"{name} {length}"] = {
            "handed_tokens_s": median(handed),
            "local_tokens_s": median(local),
            "itl_ratio": ratio,
        }
        if name in HELD_TO_GOALS:
            what = f"{name}: ITL beside {length}-token hand-overs"
            self.section.goals.append(Goal(what, 1.05, ratio, at_least=False, rounds=len(handed)))

    def _measure(self, legs: Legs, length: int) -> tuple[list[float], list[float]]:
        handed: list[float] = []
        local: list[float] = []
        with legs.decode.decoding(DECODES, legs.model):
            for round_, counts in self.settings.rounds():
                prompts = [prompt_of(length, "beside", legs.contestant.name, round_, at) for at in range(WINDOW)]
                before = legs.decode.external_tokens()
                with Rate(legs.decode) as taking:
                    for prompt in prompts:
                        legs.hand_over(prompt)
                legs.prove_taken(before, WINDOW * legs.handed_over(length))
                # P computes in both kinds of window: what differs is where D finds the prompt.
                with Rate(legs.decode) as hitting:
                    for at, prompt in enumerate(prompts):
                        with legs.other_prefilled(prompt, "beside", legs.contestant.name, round_, at):
                            legs.decode.stream(prompt)
                if counts:
                    handed.append(taking.value)
                    local.append(hitting.value)
        return handed, local
