"""What saving costs the prefill: P's time to first token beside that of a plain engine on its core, on new prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from handoff_bench.asking import prompt_of
from handoff_bench.legs import Table
from kvrelay.bench.report import median, spread
from kvrelay.bench.section import Goal
from kvrelay.errors import KvRelayError

if TYPE_CHECKING:
    from handoff_bench.legs import Legs, Settings


class SavingTable(Table):
    """P beside plain, prompt by prompt, each first in half of the rounds."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(
            settings, "Prefill on P, saved, beside a plain prefill, ms", ["contestant", "prompt", "P", "plain", "ratio"]
        )

    def add(self, legs: Legs, length: int) -> None:
        """Measure one contestant at one length."""
        name = legs.contestant.name
        saved, plain = self._measure(legs, length)
        ratio = median([one / other for one, other in zip(saved, plain, strict=True)])
        cells = [f"{1e3 * median(values):.1f} ±{spread(values):.0%}" for values in (saved, plain)]
        self.section.rows.append([name, str(length), *cells, f"{ratio:.3f}"])
        self.section.figures[f"{name} {length}"] = {
            "prefill_ms": 1e3 * median(saved),
            "plain_ms": 1e3 * median(plain),
            "ratio": ratio,
        }
        if name == "kvrelay":
            self.section.goals.append(Goal(f"prefill of {length} tokens / plain", 1.01, ratio, at_least=False))

    def _measure(self, legs: Legs, length: int) -> tuple[list[float], list[float]]:
        if (engine := legs.beside_p) is None:
            raise KvRelayError("there is no plain engine on P's core")
        saved: list[float] = []
        plain: list[float] = []
        for round_, counts in self.settings.rounds():
            prompt = prompt_of(length, "saving", legs.contestant.name, length, round_)
            other = engine.stream(prompt)[0] if round_ % 2 else 0.0
            one = legs.prefill.stream(prompt, legs.contestant.prefill_params())[0]
            other = other or engine.stream(prompt)[0]
            if counts:
                saved.append(one)
                plain.append(other)
        return saved, plain
