"""Two engines that run short of blocks, a pool that is small, slow, away and robbed: no wrong byte anywhere.

Each seed is one order of arrivals, aborts, preemptions, broken-off passes, lost connections and pool troubles. The
threads' own timing is left to the machine: what is asserted holds whatever it is.
"""

from __future__ import annotations

import random
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("numpy")

from kvrelay.testing.paged_engine import PagedEngine, chunks_of
from kvrelay.testing.pool_troubles import TroubledPool
from kvrelay.testing.true_kv import GEOMETRY, true_object

if TYPE_CHECKING:
    from pathlib import Path

STEPS = 250
WAIT_S = 30.0


class World:
    """A pool and two engines that share prompts, and everything that can befall them."""

    def __init__(self, seed: int, directory: Path) -> None:
        self.rng = rng = random.Random(seed)
        self.shm = rng.random() < 0.7
        self.pool = TroubledPool(directory, rng)
        trunk = [rng.randrange(50) for _ in range(90)]
        self.prompts = [
            trunk[: rng.randrange(90)] + [rng.randrange(50) for _ in range(rng.randrange(1, 40))] for _ in range(12)
        ]
        self.engines = [self._new_engine(name) for name in ("A", "B")]
        self.truth: dict[bytes, bytes] = {}
        self.arrived = 0
        self.checked = 0

    def _new_engine(self, name: str) -> PagedEngine:
        caching = self.rng.random() < 0.5
        drafts = self.rng.choice([0, 0, 3])
        shape = self.rng.choice([(1, 1), (1, 1), (2, 1), (1, 2), (4, 1), (2, 2)])  # of two KV heads
        return PagedEngine(
            self.pool.address, name, self.rng, shape=shape, caching=caching, shm=self.shm, drafts=drafts,
            sync_bytes=self.rng.choice([0, 20 << 10]),
        )  # fmt: skip

    def turn(self) -> None:
        """One engine makes a step; something may happen before."""
        engine = self.rng.choice(self.engines)
        happening = self.rng.choices(
            [self.arrive, self.abort, self.preempt, self.reset, self.rob, self.stall, self.cut, self.restart, self.die],
            [30, 12, 8, 1, 4, 4, 3, 0.4, 2],
        )[0]
        happening(engine)
        if engine in self.engines:
            engine.step()

    # --- what happens ---

    def arrive(self, engine: PagedEngine) -> None:
        self.arrived += 1
        if len(engine.requests) < 8:
            request = engine.add(f"r{self.arrived}", self.rng.choice(self.prompts), self.rng.randrange(1, 30))
            for tokens in (request.tokens, request.truth.tokens):
                for chunk in chunks_of(engine.side, tokens):
                    self.truth[chunk.key] = true_object(tokens, chunk.start, chunk.end)
            if self.rng.random() < 0.3:  # its next turn
                self.prompts[self.rng.randrange(12)] = [*request.truth.tokens, self.rng.randrange(50)][:150]

    def abort(self, engine: PagedEngine) -> None:
        if engine.requests:
            engine.abort(self.rng.choice(list(engine.requests)))

    def preempt(self, engine: PagedEngine) -> None:
        if engine.running:
            engine.preempt(self.rng.choice(engine.running))

    def reset(self, engine: PagedEngine) -> None:
        engine.reset_prefix_cache()

    def rob(self, _: PagedEngine) -> None:
        self.pool.rob(self.rng.sample(list(self.truth), min(5, len(self.truth))))

    def stall(self, _: PagedEngine) -> None:
        self.pool.stall()

    def cut(self, engine: PagedEngine) -> None:
        self.pool.cut([link for rank in engine.ranks for link in rank.links] + [engine.side._link])

    def restart(self, _: PagedEngine) -> None:
        self.pool.restart()

    def die(self, engine: PagedEngine) -> None:
        """The pass is broken off, and with it the engine; another takes its place."""
        engine.step(stop_at=self.rng.randrange(GEOMETRY.layers))
        engine.close()
        self.engines[self.engines.index(engine)] = self._new_engine(engine.name)

    # --- what must be true ---

    def check_pool(self) -> None:
        self.checked += self.pool.check(self.truth)

    def end(self) -> None:
        """Everything ends: nothing is left anywhere."""
        for engine in self.engines:
            engine.drain(WAIT_S)
        self.check_pool()
        for engine in self.engines:
            engine.close()
        self.pool.check_idle()

    def close(self) -> None:
        """Stop what is left of it, whatever happened."""
        with ExitStack() as left:
            left.callback(self.pool.close)
            for engine in self.engines:
                left.callback(engine.close)


@pytest.mark.parametrize("seed", range(6))
def test_no_byte_is_wrong_whatever_happens(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvrelay.connector.worker_side.DRAIN_S", 0.005)
    with closing(World(seed, tmp_path)) as world:
        for turn in range(STEPS):
            world.turn()
            if turn % 50 == 49:
                world.check_pool()
        world.end()
    assert world.checked > 0, "nothing was ever saved"
