"""Engines of every kind, in any order of what engines do, with pools of every temper: vLLM's contract holds.

Each seed is a kind of engine and an order of arrivals, aborts, resets, naps, steps on each rank and pool troubles. The
threads' own timing is left to the machine: what is asserted holds whatever it is.
"""

from __future__ import annotations

import importlib.util
import random
from typing import TYPE_CHECKING

import pytest

from kvrelay.testing.contract_world import Shape, options_of
from kvrelay.testing.fake_scheduler import Settings
from kvrelay.testing.pool_troubles import TroubledPool
from kvrelay.testing.true_models import DENSE, MIXED, SLIDING, TrueModel

if TYPE_CHECKING:
    from pathlib import Path

    from kvrelay.testing.contract_world import ContractEngine

TURNS = 600
WAIT_S = 30.0
MAX_TURN = 150
NAMES = 12
"""Few, so that ids come again as soon as they are free."""


class World:
    """A pool and two engines that share prompts."""

    def __init__(self, seed: int, directory: Path, kind: type[ContractEngine], model: TrueModel) -> None:
        self.rng = rng = random.Random(seed)
        self.pool = TroubledPool(directory, rng)
        self.troubled = rng.random() < 0.7
        trunk = [rng.randrange(50) for _ in range(90)]
        self.prompts = [
            trunk[: rng.randrange(90)] + [rng.randrange(50) for _ in range(rng.randrange(1, 40))] for _ in range(12)
        ]
        self.engines = [
            kind(self.pool.address, f"{name}{seed}-", rng, Shape.drawn(rng, model), troubled=self.troubled)
            for name in ("A", "B")
        ]
        self.turns: list[list[int]] = []
        """What was said in full: prompts of which the next turn may be made."""

    @property
    def truth(self) -> dict[bytes, bytes]:
        """Everything the pool may hold."""
        return {key: value for engine in self.engines for key, value in engine.truths.items()}

    def turn(self) -> None:
        """Something happens to an engine, or it goes on."""
        engine = self.rng.choice(self.engines)
        happening = self.rng.choices(
            [self.go_on, self.arrive, self.abort, self.reset, self.nap, self.trouble], [60, 14, 6, 0.5, 0.3, 3]
        )[0]
        happening(engine)
        engine.check()
        engine.check_free_blocks()

    def go_on(self, engine: ContractEngine) -> None:
        self.rng.choice(engine.moves())()

    def arrive(self, engine: ContractEngine) -> None:
        # vLLM would take a late output of the last request of a name for the next one's.
        used = {*engine.scheduler.requests, *(row.request.request_id for one in engine.batches for row in one.rows)}
        free = [name for name in map(str, range(NAMES)) if name not in used]
        if free and len(engine.scheduler.requests) < 8:
            again = self.turns and self.rng.random() < 0.3
            prompt = [*self.rng.choice(self.turns), 1, 2] if again else self.rng.choice(self.prompts)
            new = self.rng.choice([1, self.rng.randrange(1, 12), self.rng.randrange(1, 40)])
            request = engine.add(self.rng.choice(free), prompt, new, **options_of(self.rng, ["t1", "t2"]))
            self.turns = [tokens for tokens in [*self.turns[-6:], request.truth.tokens] if len(tokens) < MAX_TURN]

    def abort(self, engine: ContractEngine) -> None:
        if engine.scheduler.requests:
            engine.scheduler.abort(self.rng.choice(list(engine.scheduler.requests)))

    def reset(self, engine: ContractEngine) -> None:
        engine.scheduler.reset_prefix_cache(running=self.rng.random() < 0.7)

    def nap(self, engine: ContractEngine) -> None:
        engine.nap(connector=self.rng.random() < 0.2)

    def trouble(self, engine: ContractEngine) -> None:
        if not self.troubled:
            return
        links = [link for rank in engine.ranks for link in rank.links] + [engine.side._link]
        keys = self.rng.sample(sorted(self.truth), min(5, len(self.truth)))
        self.rng.choices(
            [lambda: self.pool.rob(keys), self.pool.stall, lambda: self.pool.cut(links), self.pool.restart],
            [4, 4, 3, 0.4],
        )[0]()

    def end(self) -> None:
        """Everything ends: nothing is left anywhere."""
        for engine in self.engines:
            engine.drain(WAIT_S)
        self.pool.check(self.truth)
        for engine in self.engines:
            engine.close()
        self.pool.end()


def live(seed: int, directory: Path, kind: type[ContractEngine], model: TrueModel = DENSE) -> World:
    """One world, from its beginning to its end."""
    world = World(seed, directory, kind, model)
    for turn in range(TURNS):
        world.turn()
        if turn % 100 == 99:
            world.pool.check(world.truth)
    world.end()
    return world


def test_the_contract_holds_in_any_order_of_events(seed: int, tmp_path: Path, kind: type[ContractEngine]) -> None:
    live(seed, tmp_path, kind)


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")  # of vLLM and what it imports
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.parametrize("model", [MIXED, SLIDING], ids=["mixed", "sliding"])
def test_the_contract_holds_where_vllm_frees_what_windows_have_passed(
    seed: int, model: TrueModel, tmp_path: Path
) -> None:
    from kvrelay.testing.vllm_engine import VllmEngine

    world = live(seed, tmp_path, VllmEngine, model)
    for rank in (rank for engine in world.engines for rank in engine.ranks):
        assert all((pages[0] == 0xDEAD).all() for pages in rank.pages), "somebody wrote into the null block"


def loads_at_once(_: type[Shape], rng: random.Random, model: TrueModel) -> Shape:
    """An engine whose steps end before the next is scheduled, and whose prefix cache others may hit."""
    settings = Settings(
        budget=rng.choice([24, 40, 80]), drafts=rng.choice([0, 3]), chunks=rng.choice([(7, 20, 40), (80,)])
    )
    assert model is DENSE
    return Shape(
        tp=rng.choice([1, 1, 2]), settings=settings, load_s=rng.choice([0.2, 5.0]), sync_s=rng.choice([0.0, 0.005, 1.0])
    )


def test_the_contract_holds_where_loads_are_synchronous_and_often_too_slow(
    seed: int, tmp_path: Path, kind: type[ContractEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Shape, "drawn", classmethod(loads_at_once))
    live(seed, tmp_path, kind)
