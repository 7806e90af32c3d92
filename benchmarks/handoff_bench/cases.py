"""A table, and what one contestant does for it in its turns.

A case is one contestant at one prompt length, beside so many decodes. Its methods are called in turns: meanwhile its
stack runs, and every other stack is suspended. So it may time nothing across two calls.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from contextlib import ExitStack
from typing import TYPE_CHECKING, Generic, TypeVar

from handoff_bench.asking import FAILURES, prompt_of
from kvrelay.bench.report import median, median_interval
from kvrelay.bench.section import Section

if TYPE_CHECKING:
    from collections.abc import Sequence

    from handoff_bench.legs import Legs, Settings

BASE = "kvrelay"
"""The contestant that others are compared with, round by round."""


class Case(ABC):
    """One contestant in one case. ``length``: the prompt's, without what the contestant adds."""

    def __init__(self, legs: Legs, length: int, decodes: int = 0) -> None:
        self.legs = legs
        self.length = length
        self.decodes = decodes
        self._meanwhile = ExitStack()
        self._handed_over = 0
        self._before = 0.0
        self._what = ""

    @property
    def name(self) -> str:
        """The contestant's."""
        return self.legs.contestant.name

    @property
    def prompt_tokens(self) -> int:
        """The length of its prompts."""
        return self.length + self.legs.contestant.longer_by

    def begin(self, what: str) -> None:
        """Check its answer, and begin what goes on all the time. ``what``: names the case."""
        self._what = what
        self.legs.check(self.length, what)
        self._before = self.legs.decode.external_tokens()
        if self.decodes:
            self._meanwhile.enter_context(self.legs.decode.decoding(self.decodes, self.legs.model))

    def warm_up(self, round_: int) -> None:
        """Hand a prompt over and hit it in D's cache, without timing it: the stack has stood still."""
        prompt = prompt_of(self.prompt_tokens, "warm-up", self._what, round_)
        self.hand_over(prompt)
        if self.legs.contestant.caches:
            self.legs.decode.stream(prompt)

    @abstractmethod
    def measure(self, round_: int, *, counts: bool) -> None:
        """One round; ``counts``: it is to be kept. Raises `KvRelayError` when it cannot do it."""

    def end(self) -> None:
        """Stop what goes on. Raises `KvRelayError` when D has computed prompts that it was to take."""
        self._meanwhile.close()
        self.legs.prove_taken(self._before, self._handed_over * self.legs.handed_over(self.prompt_tokens))

    def close(self) -> None:
        """Stop what goes on, whatever has happened."""
        with contextlib.suppress(*FAILURES):
            self._meanwhile.close()

    def hand_over(self, prompt: list[int]) -> float:
        """Seconds from the decode leg's beginning to the first token; D's proof is looked at."""
        seconds, _ = self.legs.hand_over(prompt)
        self._handed_over += 1
        return seconds


C = TypeVar("C", bound=Case)


class Table(ABC, Generic[C]):
    """Collects what contestants reach, case by case. ``section``: what there is so far."""

    def __init__(self, settings: Settings, title: str, header: list[str]) -> None:
        self.settings = settings
        self.section = Section(title, header)

    @property
    def decodes(self) -> tuple[int, ...]:
        """Requests that D decodes meanwhile, case by case."""
        return (0,)

    @abstractmethod
    def case(self, legs: Legs, length: int, decodes: int) -> C | None:
        """What a contestant is to do; None where there is nothing to be measured of it."""

    @abstractmethod
    def note(self, cases: Sequence[C]) -> None:
        """Add the rows of contestants that have gone through the same rounds in turns."""

    def finish(self) -> Section:
        """The table with its goals."""
        return self.section


def beyond(one: Sequence[float], other: Sequence[float]) -> tuple[float, float, float] | None:
    """Median in ms, and its 95 % interval, of the differences in seconds of the rounds that both went through.

    Who ran out of time went through the first of the other's rounds. None where one has no rounds.
    """
    differences = [1e3 * (mine - yours) for mine, yours in zip(one, other, strict=False)]
    return (median(differences), *median_interval(differences)) if differences else None


def cell(value: Sequence[float] | None, digits: int = 1) -> str:
    """A median with its interval, as `beyond` gives it."""
    if value is None:
        return ""
    middle, low, high = value
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"
