"""What saving costs the prefill: P's time to first token beside that of a plain engine on its core, on new prompts.

The goal allows for the copy itself: what as many bytes take from cold memory to cold memory, with nothing else done.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from handoff_bench.asking import prompt_of
from handoff_bench.legs import Table
from kvrelay.bench.report import median, spread
from kvrelay.bench.section import Goal
from kvrelay.errors import KvRelayError

if TYPE_CHECKING:
    from handoff_bench.legs import Legs, Settings


COPIES = 15
SAVED_WITHIN_S = 10.0
"""An engine's counters come after the answer."""


def copy_s(size_bytes: int) -> float:
    """Seconds that a plain copy of so many bytes takes, none of them in a cache: the median of some."""
    source, target = (np.ones((COPIES, size_bytes), np.uint8) for _ in range(2))
    taken = []
    for one, other in zip(source, target, strict=True):
        began = time.perf_counter()
        np.copyto(other, one)
        taken.append(time.perf_counter() - began)
    return median(taken)


class SavingTable(Table):
    """P beside plain, prompt by prompt, each first in half of the rounds."""

    def __init__(self, settings: Settings, kv_bytes_per_token: int) -> None:
        super().__init__(
            settings,
            "Prefill on P, saved, beside a plain prefill, ms",
            ["contestant", "prompt", "P", "plain", "ratio", "a copy of the bytes"],
        )
        self._kv_bytes_per_token = kv_bytes_per_token

    def add(self, legs: Legs, length: int) -> None:
        """Measure one contestant at one length."""
        name = legs.contestant.name
        saved, plain = self._measure(legs, length)
        pairs = list(zip(saved, plain, strict=True))
        ratio = median([one / other for one, other in pairs])
        copy = copy_s(length * self._kv_bytes_per_token)
        beyond = median([(one - copy) / other for one, other in pairs])
        cells = [f"{1e3 * median(values):.1f} ±{spread(values):.0%}" for values in (saved, plain)]
        self.section.rows.append([name, str(length), *cells, f"{ratio:.3f}", f"{1e3 * copy:.2f}"])
        self.section.figures[f"{name} {length}"] = {
            "prefill_ms": 1e3 * median(saved),
            "plain_ms": 1e3 * median(plain),
            "ratio": ratio,
            "copy_ms": 1e3 * copy,
            "ratio_beyond_copy": beyond,
        }
        if name == "kvrelay":
            what = f"prefill of {length} tokens, less the copy / plain"
            self.section.goals.append(Goal(what, 1.01, beyond, at_least=False, rounds=len(saved)))

    def _measure(self, legs: Legs, length: int) -> tuple[list[float], list[float]]:
        if (engine := legs.beside_p) is None:
            raise KvRelayError("there is no plain engine on P's core")
        saved: list[float] = []
        plain: list[float] = []
        before = legs.prefill.saved_tokens()
        rounds = 0
        for round_, counts in self.settings.rounds():
            prompt = prompt_of(length, "saving", legs.contestant.name, length, round_)
            other = engine.stream(prompt)[0] if round_ % 2 else 0.0
            one = legs.prefill.stream(prompt, legs.contestant.prefill_params())[0]
            other = other or engine.stream(prompt)[0]
            rounds += 1
            if counts:
                saved.append(one)
                plain.append(other)
        if legs.contestant.pooled:
            _prove_saved(legs, before, (rounds - 1) * (length - 1))  # the last is told with the next step
        return saved, plain


def _prove_saved(legs: Legs, before: float, tokens: int) -> None:
    """Raise `KvRelayError` unless P has saved ``tokens`` since its counter was ``before``."""
    until = time.monotonic() + SAVED_WITHIN_S
    while (saved := legs.prefill.saved_tokens() - before) < tokens:
        if time.monotonic() > until:
            raise KvRelayError(f"P saved {saved:.0f} of {tokens} prompt tokens")
        time.sleep(0.1)
