"""Engines of every kind, in any order of what engines do, with pools of every temper: vLLM's contract holds.

Each seed is a kind of engine and an order of arrivals, aborts, resets, naps, steps on each rank and pool troubles. The
threads' own timing is left to the machine: what is asserted holds whatever it is.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from kvrelay.client.blocking import PoolClient
from kvrelay.errors import KvRelayError
from kvrelay.testing.contract_moves import said
from kvrelay.testing.contract_world import ContractEngine, Shape, options_of
from kvrelay.testing.fake_scheduler import Settings
from kvrelay.testing.pool_troubles import TroubledPool
from kvrelay.testing.true_models import DENSE, MIXED, SLIDING, TrueModel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

TURNS = 600
WAIT_S = 30.0
MAX_TURN = 150
NAMES = 12
"""Few, so that ids come again as soon as they are free."""
LIVES = 6
"""So many, of which some load synchronously, come across every kind of load."""
MUST_HAPPEN = {"whole", "part", "now", "later", "early", "cancelled"}


@pytest.fixture(scope="module")
def seen() -> Iterator[Counter[str]]:
    """Lives of small engines, and what became of their loads, in all tests of this module together."""
    counts: Counter[str] = Counter()
    yield counts
    missing = MUST_HAPPEN - counts.keys()
    assert counts["lives"] < LIVES or not missing, f"{missing} never happened: nothing is shown of them"


class Router:
    """What a router does about hand-overs, with a pool that may be gone at any moment."""

    def __init__(self, address: str, rng: random.Random) -> None:
        self._address = address
        self._rng = rng
        self._client: PoolClient | None = None
        self._tickets: list[str] = []
        self._opened = 0

    def open(self) -> str:
        """The ticket of a new hand-over; the pool may not know it."""
        self._opened += 1
        self._tickets.append(f"over{self._opened}")
        self._tell(PoolClient.open_ticket, self._tickets[-1], 60.0)
        return self._tickets[-1]

    def conclude(self) -> None:
        """Nothing more is announced under a ticket, or its hand-over is over."""
        if self._tickets:
            ticket = self._tickets.pop(self._rng.randrange(len(self._tickets)))
            self._tell(PoolClient.seal_ticket if self._rng.random() < 0.6 else PoolClient.end_ticket, ticket)

    def _tell(self, what: Callable[..., None], *told: object) -> None:
        with contextlib.suppress(KvRelayError):
            if self._client is None or self._client.closed:
                self.close()
                self._client = PoolClient.connect(self._address, name="router", map_arena=False)
            what(self._client, *told)

    def close(self) -> None:
        """Its hand-overs end with it."""
        if self._client is not None:
            self._client.close()


class World:
    """A pool, a router and two engines that share prompts."""

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
        self.windowed = model.tables.windowed
        self.router = Router(self.pool.address, rng)
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
            [
                self.go_on,
                self.arrive,
                self.abort,
                self.reset,
                self.nap,
                self.trouble,
                self.hand_over,
                self.conclude,
            ],
            [60, 14, 6, 0.5, 0.3, 3, 4, 3],
        )[0]
        happening(engine)
        engine.check()
        engine.check_free_blocks()

    def go_on(self, engine: ContractEngine) -> None:
        self.rng.choice(engine.moves())()

    def hand_over(self, engine: ContractEngine) -> None:
        """One engine is to take what the other computes, while it does; it may never come to compute it.

        Of a model with windows, which is not loaded early, it is to take what is there, and nothing if that is less.
        """
        other = self.engines[engine is self.engines[0]]
        prompt, ticket = self.rng.choice(self.prompts), self.router.open()
        how: dict[str, Any] = {"policy": self.rng.choice(["reprefill", "fail", "strict"])}
        if not self.windowed:
            prompt, how = [*prompt, self.rng.randrange(50)], {"overlapped": True}
        takes = said("decode", prefill="other", handover=ticket, **how)
        if (name := self.free_name(engine)) is not None:
            engine.add(name, prompt, self.rng.randrange(1, 12), kv_transfer_params=takes)
        if self.rng.random() < 0.8 and (name := self.free_name(other)) is not None:
            other.add(name, prompt, 1, kv_transfer_params=said("prefill", handover=ticket))

    def conclude(self, _engine: ContractEngine) -> None:
        self.router.conclude()

    def free_name(self, engine: ContractEngine) -> str | None:
        """For another request, if the engine is to have one more."""
        # vLLM would take a late output of the last request of a name for the next one's.
        used = {*engine.scheduler.requests, *(row.request.request_id for one in engine.batches for row in one.rows)}
        free = [name for name in map(str, range(NAMES)) if name not in used]
        return self.rng.choice(free) if free and len(engine.scheduler.requests) < 8 else None

    def arrive(self, engine: ContractEngine) -> None:
        if (name := self.free_name(engine)) is not None:
            again = self.turns and self.rng.random() < 0.3
            prompt = [*self.rng.choice(self.turns), 1, 2] if again else self.rng.choice(self.prompts)
            new = self.rng.choice([1, self.rng.randrange(1, 12), self.rng.randrange(1, 40)])
            request = engine.add(name, prompt, new, **options_of(self.rng, ["t1", "t2"]))
            self.turns = [tokens for tokens in [*self.turns[-6:], request.truth.tokens] if len(tokens) < MAX_TURN]

    def abort(self, engine: ContractEngine) -> None:
        if engine.scheduler.requests:
            engine.scheduler.abort(self.rng.choice(list(engine.scheduler.requests)))

    def reset(self, engine: ContractEngine) -> None:
        engine.scheduler.reset_prefix_cache(running=self.rng.random() < 0.7)

    def nap(self, engine: ContractEngine) -> None:
        engine.nap(weights_stay=self.rng.random() < 0.8)

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
        self.router.close()
        self.pool.check(self.truth)
        for engine in self.engines:
            engine.close()
        self.pool.check_idle()

    def close(self) -> None:
        """Stop what is left of it, whatever happened."""
        with contextlib.ExitStack() as left:
            left.callback(self.pool.close)
            for engine in self.engines:
                left.callback(engine.close)
            left.callback(self.router.close)


def live(seed: int, directory: Path, kind: type[ContractEngine], model: TrueModel = DENSE) -> World:
    """One world, from its beginning to its end."""
    with contextlib.closing(World(seed, directory, kind, model)) as world:
        for turn in range(TURNS):
            world.turn()
            if turn % 100 == 99:
                world.pool.check(world.truth)
        world.end()
    return world


def note(world: World, seen: Counter[str]) -> None:
    """What became of the loads of small engines: those with vLLM's scheduler are left out where there is none."""
    if type(world.engines[0]) is ContractEngine:
        seen["lives"] += 1
        for engine in world.engines:
            seen.update(engine.side.seen)


def test_the_contract_holds_in_any_order_of_events(
    seed: int, tmp_path: Path, kind: type[ContractEngine], seen: Counter[str]
) -> None:
    note(live(seed, tmp_path, kind), seen)


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")  # of vLLM and what it imports
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
    seed: int, tmp_path: Path, kind: type[ContractEngine], monkeypatch: pytest.MonkeyPatch, seen: Counter[str]
) -> None:
    monkeypatch.setattr(Shape, "drawn", classmethod(loads_at_once))
    note(live(seed, tmp_path, kind), seen)
