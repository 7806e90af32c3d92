"""Who runs when: contestants take turns within each round, and all but one are suspended.

Machines drift by more than contestants differ. So what is compared is a few seconds apart: each round has one turn of
every contestant, in random order. Stacks whose turn it is not are suspended (SIGSTOP): NIXL's engines keep cores busy
while they have nothing to do, and every idle engine looks for work. Who is suspended loses nothing: requests that D
decodes stand still, connections and leases are longer-lived than the turns of the others. Caches and schedulers forget
it meanwhile, so a turn begins with a request that is not timed.
"""

from __future__ import annotations

import random
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from handoff_bench.asking import FAILURES
from handoff_bench.legs import FEWEST

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from handoff_bench.cases import Case, Table
    from handoff_bench.engines import Pair
    from handoff_bench.legs import Legs

PROGRESS_S = 10.0


class Player:
    """One contestant in one case: its stack, what it does there, and why it stopped."""

    def __init__(self, pair: Pair, case: Case) -> None:
        self.pair = pair
        self.case = case
        self.failure = ""
        self.took_s = 0.0
        """What its turns have taken so far, without the first one, in which its answer is checked."""

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Its stack runs meanwhile, and no other does. What it cannot do is its failure, and ends the turn."""
        with self.pair.turn():
            try:
                yield
            except FAILURES as error:
                self.failure = str(error) or type(error).__name__

    def play(self, round_: int, *, counts: bool) -> None:
        """Its turn of one round."""
        began = time.monotonic()
        with self.turn():
            self.case.warm_up(round_)
            self.case.measure(round_, counts=counts)
        self.took_s += time.monotonic() - began


def tell(text: str) -> None:
    """Show progress."""
    print(text, file=sys.stderr, flush=True)


def interleave(table: Table[Any], length: int, decodes: int, started: Sequence[tuple[Pair, Legs]]) -> None:
    """Have everyone who has started go through one case of a table, and note what they reached.

    What one of them cannot do is noted as absent; the others go on.
    """
    what = f"{table.section.title}, {length} tokens, {decodes} decodes"
    players = [Player(pair, case) for pair, legs in started if (case := table.case(legs, length, decodes)) is not None]
    if not players:
        return
    tell(f"{what}: {', '.join(player.case.name for player in players)}")
    try:
        _play(table, players, what)
    finally:
        for player in players:
            with player.pair.turn():
                player.case.close()
    for player in players:
        if player.failure:
            table.section.absent[f"{player.case.name}, {length} tokens, {decodes} decodes"] = player.failure
            tell(f"  {player.case.name}: {player.failure}")
    known = len(table.section.rows)
    table.note([player.case for player in players if not player.failure])
    for row in table.section.rows[known:]:
        tell("  " + " | ".join(row))


def _play(table: Table[Any], players: Sequence[Player], what: str) -> None:
    settings = table.settings
    told = began = time.monotonic()
    order = random.Random(what)
    for player in players:
        with player.turn():
            player.case.begin(what)
    playing = [player for player in players if not player.failure]
    for round_, counts in settings.rounds():
        for player in order.sample(playing, len(playing)):
            player.play(round_, counts=counts)
            if player.took_s > settings.limit_s and (counted := round_ + 1 - settings.warmup) < FEWEST:
                player.failure = player.failure or f"{max(0, counted)} rounds in {settings.limit_s:g} s"
        playing = [player for player in playing if not player.failure and player.took_s <= settings.limit_s]
        if playing and (now := time.monotonic()) > told + PROGRESS_S:
            told = now
            tell(f"  round {round_ + 1}, {now - began:.0f} s")
    for player in players:
        if not player.failure:
            with player.turn():
                player.case.end()


def grouped(names: Sequence[str], at_once: int) -> list[list[str]]:
    """Who is there together, where no more than ``at_once`` fit: the first is in no way favoured."""
    return [list(names[first : first + at_once]) for first in range(0, len(names), at_once)]
