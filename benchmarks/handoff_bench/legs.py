"""The engines of one contestant, and a hand-over between them."""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from handoff_bench.asking import prompt_of
from kvrelay.errors import KvRelayError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from handoff_bench.asking import Engine
    from handoff_bench.contestants import Contestant
    from handoff_bench.desk import Desk

CHECKED = 8
"""Tokens of an answer that are compared with the plain engine's."""
DECODES = 4
"""Requests that D decodes meanwhile, where it is not idle."""
FEWEST = 5
"""Counted rounds that a median is taken of."""


@dataclass(frozen=True)
class Settings:
    """``repeats``: timed rounds of each case, after ``warmup`` that are not timed.

    ``limit_s``: a contestant whose turns of a case have taken longer ends it with the rounds it has, at least `FEWEST`.
    ``decodes``: how many requests D decodes meanwhile, case by case.
    """

    repeats: int
    warmup: int = 3
    limit_s: float = 120.0
    decodes: tuple[int, ...] = (0, DECODES)

    def rounds(self) -> Iterator[tuple[int, bool]]:
        """Number each round, and say whether it counts: the first after a start are cold, the plain engine's too."""
        for round_ in range(self.warmup + self.repeats):
            yield round_, round_ >= self.warmup


@dataclass(frozen=True)
class Legs:
    """The engines of one contestant, and the plain one that shows what is right."""

    contestant: Contestant
    prefill: Engine
    decode: Engine
    plain: Engine
    desk: Desk
    model: str
    prefill_pid: int = 0
    """P's first process: the others are its descendants."""
    pool: str = ""
    """The address of our pool, if it is one that is measured."""

    def hand_over(self, prompt: list[int], *, tokens: int = 1) -> tuple[float, list[int]]:
        """Prefill on P, then the decode leg: its seconds until the first token, and its tokens.

        Raises:
            KvRelayError: D's proof, where it leaves one, shows that it did not take the prompt.
        """
        with self.desk.handover() as handover:
            answer = self.prefill.complete(prompt, handover.prefill_params())
            answered = self.decode.stream(prompt, handover.decode_params(answer), tokens=tokens)
            handover.prove(len(prompt) - 1)
        return answered

    def check(self, length: int, what: str) -> None:
        """Prove that a hand-over of this length gives the right answer without computing the prompt again.

        ``what``: is checked for; a contestant hands every prompt over once.

        Raises:
            KvRelayError: it does not.
        """
        length += self.contestant.longer_by
        prompt = prompt_of(length, "check", what)
        before = self.decode.external_tokens()
        _, ours = self.hand_over(prompt, tokens=CHECKED)
        right = json.loads(self.plain.complete(prompt, tokens=CHECKED))["choices"][0]["token_ids"]
        if ours != right:
            raise KvRelayError(f"wrong answer to {length} tokens: {ours}, not {right}")
        self.prove_taken(before, self.handed_over(length))

    def handed_over(self, length: int) -> int:
        """How many tokens of a prompt D does not compute, if all is well."""
        return length - 1 - self.contestant.longer_by

    @contextmanager
    def other_prefilled(self, prompt: list[int], *seed: object) -> Iterator[None]:
        """Inside, P has computed another prompt as long: the machine is as it is after the prefill of a hand-over."""
        with self.desk.handover() as handover:
            params = None if self.contestant.keeps else handover.prefill_params()
            self.prefill.complete(prompt_of(len(prompt), "other", *seed), params)
            yield

    def prove_taken(self, before: float, tokens: int) -> None:
        """Raise `KvRelayError` unless D took ``tokens`` from its connector since its counter was ``before``."""
        taken = self.decode.external_tokens() - before
        if taken < tokens:
            raise KvRelayError(f"D took {taken:.0f} of {tokens} prompt tokens: the rest was computed again")
