"""Promises in random orders of events: what is staged is claimed or dropped, exactly once."""

from __future__ import annotations

import random

import pytest

from kvrelay.connector.core.orders import LoadOutcome
from kvrelay.connector.core.promises import TRANSITIONS, Event, Promise, Promises, State
from kvrelay.connector.core.requests import Entry, HandOver, Phase
from kvrelay.connector.core.tables import Table, Tables
from kvrelay.identity.core.chunks import prompt_chunks
from kvrelay.types import Reason

OVER = HandOver("ho-1", "decode", "D0", prefill="P0", policy="fail", attempt=2)
REASONS = (Reason.NONE, Reason.NONE, Reason.NONE, Reason.CORRUPT, Reason.STAGING_FULL)


def entry_of(name: str, tokens: int, found: int) -> Entry:
    chunks = prompt_chunks(b"seed", list(range(tokens)), 64)
    phase = Phase.CLAIMABLE if found else Phase.SETTLED
    return Entry(
        request_id=name, prompt_tokens=tokens, chunks=chunks, hand_over=OVER, phase=phase, matched_end=found,
        reason=Reason.NONE if found == tokens else Reason.PARTIAL,
    )  # fmt: skip


def test_every_transition_of_the_table_leads_to_a_state_that_ends_or_goes_on() -> None:
    for state in State:
        leaving = [after for (before, _), after in TRANSITIONS.items() if before is state]
        assert bool(leaving) == (state is not State.OVER)


def test_what_cannot_happen_raises() -> None:
    with pytest.raises(KeyError):
        Promise(state=State.LOST).move(Event.WHOLE)


MIXED = Tables((Table(32, 1), Table(32, 1), Table(16, 0)), (0, 96))
"""A window's layers under two tables, full attention under a third."""


@pytest.mark.parametrize(
    ("local", "starts", "first"),
    [
        pytest.param(0, (0, 192), 0, id="nothing local: full attention from the first token, the window from a block"),
        pytest.param(64, (64, 192), 1, id="within what the window does not reach"),
        pytest.param(256, (256, 256), 4, id="beyond where the window begins"),
    ],
)
def test_of_each_group_what_its_claim_will_load_is_staged(local: int, starts: tuple[int, ...], first: int) -> None:
    """Of 300 tokens 299 are claimed, and the last one's window begins at 204."""
    promises = Promises(ranks=1, tables=MIXED, stages=True, staging_s=5.0, patience_s=3.0)
    entry = entry_of("r", 300, 300)
    promises.add("r")
    assert not promises.may_claim(entry, local, 0.0)
    (order,) = promises.take_stages()
    assert (order.start, order.end, order.starts) == (local, 299, starts)
    assert order.chunks == entry.chunks[first:]
    assert [chunk.start for chunk in order.of(1)] == [at for at in (192, 256) if at + 64 > starts[1]]


def test_a_last_chunk_of_one_token_is_not_staged_where_that_token_is_never_claimed() -> None:
    promises = Promises(ranks=1, tables=MIXED, stages=True, staging_s=5.0, patience_s=3.0)
    promises.add("r")
    assert not promises.may_claim(entry_of("r", 129, 129), 0, 0.0)
    (order,) = promises.take_stages()
    assert (order.end, [chunk.end for chunk in order.chunks]) == (128, [64, 128])


class World:
    """The engine and its workers, acting at random."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.ranks = rng.choice((1, 2))
        self.promises = Promises(
            ranks=self.ranks, tables=Tables.one(32), stages=rng.random() < 0.9, staging_s=5.0, patience_s=3.0
        )
        self.held: dict[int, int] = {}
        """What the workers hold or bring, and how many ranks have reported."""
        self.told: dict[str, float] = {}
        """When each loss was told."""
        self.now = 0.0
        self.entries: dict[str, Entry] = {}
        for at in range(6):
            tokens = rng.choice((1, 100, 128))
            found = rng.choice((0, min(64, tokens), tokens))
            self.entries[f"r{at}"] = entry_of(f"r{at}", tokens, found)
            self.promises.add(f"r{at}")

    def ask(self, name: str) -> None:
        """As the engine does in each step; it may then take what it is offered."""
        entry = self.entries[name]
        local = self.rng.choice((0, 32)) if self.rng.random() < 0.9 else entry.prompt_tokens
        if not self.promises.may_claim(entry, local, self.now):
            return
        if number := self.promises.staged(name):
            if self.rng.random() < 0.5:
                self.promises.claimed(name)
                assert self.held.pop(number) == self.ranks, "claimed before every rank had it"
                del self.entries[name]
        elif name in self.told:
            assert self.now >= self.told[name] + 3.0, "computed before the router could break it off"

    def report(self) -> None:
        """One rank has ended staging something."""
        waiting = [number for number, count in self.held.items() if count < self.ranks]
        if waiting:
            number = self.rng.choice(waiting)
            self.held[number] += 1
            name = self.promises.owner(number)
            assert name is not None
            self.promises.report(self.entries[name], LoadOutcome(0, 1, 0.1, self.rng.choice(REASONS)), self.now)

    def end(self, name: str) -> None:
        """The request is gone."""
        self.promises.end(name)
        del self.entries[name]

    def take(self) -> None:
        """Carry out what is ordered."""
        for order in self.promises.take_stages():
            assert order.staged not in self.held, "staged twice"
            self.held[order.staged] = 0
        for number in self.promises.take_unstaged():
            del self.held[number]
        for lost in self.promises.take_losses():
            assert lost.request_id not in self.told, "told twice"
            assert (lost.attempt, lost.missing_tokens > 1) == (2, True)
            self.told[lost.request_id] = self.now


@pytest.mark.parametrize("seed", range(40))
def test_in_any_order_what_is_staged_is_dropped_or_claimed_and_each_loss_is_told_once(seed: int) -> None:
    world = World(seed)
    for _ in range(300):
        if not world.entries:
            break
        world.now += world.rng.choice((0.0, 0.1, 2.0))
        name, step = world.rng.choice(list(world.entries)), world.rng.random()
        if step < 0.5:
            world.ask(name)
        elif step < 0.9:
            world.report()
        elif step < 0.95:
            world.end(name)
        world.take()
    for name in list(world.entries):
        world.end(name)
    world.take()
    assert not world.held, "the workers keep what nobody will claim"
    assert len(world.promises) == 0
