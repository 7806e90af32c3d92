"""What saving costs the prefill: prompts of one engine that are saved beside prompts that are not, round by round.

Two engines started alike differ by several per cent: more than is to be seen. So each round asks one P for three new
prompts, in random order: one that is saved; one that is not, but is looked up; and one of which the connector hears
nothing. The hook in `unsaved` lets prompts say which they are. Differences are within rounds. Beside the time to the
first token stands the core time of P's processes, in which is also what goes on after the token; and the share of it
that threads took which run for saved prompts only: small, but known far better than a difference of whole prefills.

The goal allows for the copy itself: what as many bytes take from cold memory to cold memory, with nothing else done.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from handoff_bench.asking import prompt_of
from handoff_bench.cases import Case, Table, beyond, cell
from kvrelay.bench.report import median, spread
from kvrelay.bench.section import Goal
from kvrelay.errors import KvRelayError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from handoff_bench.legs import Legs, Settings

KINDS = ("saved", "unsaved", "unknown")
"""As the hook calls them."""
MORE_ROUNDS = 10
"""Times the rounds of other sections: what is to be seen is a hundredth of what is measured."""
PAUSE_S = 0.015
"""After each prompt, so that what it left to be done is not the next one's."""
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


def core_s(pid: int) -> dict[int, float]:
    """Seconds that each thread of a process and of its descendants has run so far."""
    found, left = {}, [pid]
    while left:
        tasks = Path(f"/proc/{left.pop()}/task")
        for task in tasks.iterdir():
            found[int(task.name)] = int((task / "schedstat").read_text().split()[0]) / 1e9
            left += map(int, (task / "children").read_text().split())
    return found


@dataclass
class Costs:
    """Of each kind of prompt, round by round: seconds to the first token, and core seconds of each thread."""

    first_s: dict[str, list[float]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    threads_s: dict[str, list[dict[int, float]]] = field(default_factory=lambda: {kind: [] for kind in KINDS})

    @property
    def core_s(self) -> dict[str, list[float]]:
        """Core seconds of all threads together."""
        return {kind: [sum(of.values()) for of in rounds] for kind, rounds in self.threads_s.items()}

    @property
    def own_s(self) -> list[float]:
        """Core seconds, for each saved prompt, of threads that hardly ever run for others."""
        saved, others = self.threads_s["saved"], self.threads_s["unsaved"] + self.threads_s["unknown"]
        threads = {thread for of in saved for thread in of}
        own = [thread for thread in threads if not median([of.get(thread, 0.0) for of in others])]
        return [sum(of.get(thread, 0.0) for thread in own) for of in saved]


def added(costs: dict[str, list[float]], kind: str, other: str) -> tuple[float, float, float]:
    """Milliseconds that one kind of prompt costs beyond another: median of the rounds' differences, 95 % interval."""
    found = beyond(costs[kind], costs[other])
    assert found is not None
    return found


class SavingCase(Case):
    """Rounds of one new prompt of each kind, in random order."""

    def __init__(self, legs: Legs, length: int) -> None:
        super().__init__(legs, length)
        self.costs = Costs()
        self._order = random.Random(length)
        self._saved_before = 0.0
        self._saved = 0

    def begin(self, what: str) -> None:
        """Count from here on what P saves."""
        super().begin(what)
        self._saved_before = self.legs.prefill.saved_tokens()

    def warm_up(self, round_: int) -> None:
        """One that is saved, as every third that is timed."""
        _ask(self.legs, prompt_of(self.length, "saving", "warm-up", round_), KINDS[0])
        self._saved += 1

    def measure(self, round_: int, *, counts: bool) -> None:
        """One of each kind."""
        for kind in self._order.sample(KINDS, len(KINDS)):
            first, core = _ask(self.legs, prompt_of(self.length, "saving", kind, round_), kind)
            if counts:
                self.costs.first_s[kind].append(first)
                self.costs.threads_s[kind].append(core)
        self._saved += 1

    def end(self) -> None:
        """Prove that P has saved what was to be saved, and no more."""
        super().end()
        _prove_saved(self.legs, self._saved_before, self._saved, self.length)


class SavingTable(Table[SavingCase]):
    """Collects contestants' costs, of those that save to our pool."""

    def __init__(self, settings: Settings, kv_bytes_per_token: int) -> None:
        super().__init__(
            replace(settings, repeats=MORE_ROUNDS * settings.repeats),
            "What saving adds to a prefill on P, ms",
            [
                "contestant",
                "prompt",
                "not saved",
                "saving adds",
                "in core time",
                "of which threads of its own",
                "a copy of the bytes",
                "keys and lookup add",
                "rounds",
            ],
        )
        self._kv_bytes_per_token = kv_bytes_per_token

    def case(self, legs: Legs, length: int, decodes: int) -> SavingCase | None:  # noqa: ARG002
        """Those that save to our pool."""
        return SavingCase(legs, length) if legs.pool else None

    def note(self, cases: Sequence[SavingCase]) -> None:
        """Add everyone's row."""
        for case in cases:
            self.judge(case.name, case.length, case.costs)

    def judge(self, name: str, length: int, costs: Costs) -> None:
        """Add a contestant's row, and hold it against the goal."""
        saves = added(costs.first_s, "saved", "unsaved")
        core = added(costs.core_s, "saved", "unsaved")
        own = beyond(costs.own_s, [0.0] * len(costs.own_s))
        assert own is not None
        looks = added(costs.first_s, "unsaved", "unknown")
        unsaved, rounds = costs.first_s["unsaved"], len(costs.first_s["unsaved"])
        copy = copy_s(length * self._kv_bytes_per_token)
        ratio = 1 + (saves[0] / 1e3 - copy) / median(unsaved)
        self.section.rows.append(
            [
                name,
                str(length),
                f"{1e3 * median(unsaved):.1f} ±{spread(unsaved):.0%}",
                *(cell(value, 2) for value in (saves, core, own)),
                f"{1e3 * copy:.2f}",
                cell(looks, 2),
                str(rounds),
            ]
        )
        self.section.figures[f"{name} {length}"] = {
            "unsaved_ms": 1e3 * median(unsaved),
            "saving_ms": list(saves),
            "saving_core_ms": list(core),
            "own_core_ms": list(own),
            "looking_ms": list(looks),
            "copy_ms": 1e3 * copy,
            "ratio_beyond_copy": ratio,
        }
        if name == "kvrelay":
            what = f"prefill of {length} tokens, saved, less the copy / not saved"
            self.section.goals.append(Goal(what, 1.01, ratio, at_least=False, rounds=rounds))


def _ask(legs: Legs, prompt: list[int], kind: str) -> tuple[float, dict[int, float]]:
    """Have P compute a prompt as a hand-over's; seconds to its first token, and core seconds of P's threads."""
    with legs.desk.handover() as handover:
        params = {**(handover.prefill_params() or {}), "benchmark": kind}
        before = core_s(legs.prefill_pid)
        first, _ = legs.prefill.stream(prompt, params)
        time.sleep(PAUSE_S)
        after = core_s(legs.prefill_pid)
        return first, {thread: now - before.get(thread, 0.0) for thread, now in after.items()}


def _prove_saved(legs: Legs, before: float, rounds: int, length: int) -> None:
    """Raise `KvRelayError` unless P has saved one prompt a round, and no other, since its counter was ``before``."""
    until = time.monotonic() + SAVED_WITHIN_S
    fewest = (rounds - 1) * length  # the last is told with the next step
    while (saved := legs.prefill.saved_tokens() - before) < fewest and time.monotonic() < until:
        time.sleep(0.1)
    if not fewest <= saved <= rounds * length:
        raise KvRelayError(f"P saved {saved:.0f} prompt tokens of {rounds} prompts of {length} that were to be saved")
