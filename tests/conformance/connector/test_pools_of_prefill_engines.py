"""A decode engine with the pools of two prefill engines: who prefilled decides, and a dead one is no loss to others."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, Any

import pytest

from kvrelay.connector.config import ConnectorConfig
from kvrelay.connector.link import PoolLink
from kvrelay.connector.scheduler_side import SchedulerSide
from kvrelay.connector.several import SeveralSchedulers, SeveralWorkers
from kvrelay.testing.bare_connector import BareScheduler, BareWorker
from kvrelay.testing.contract_guard import SchedulerGuard, WorkerGuard
from kvrelay.testing.contract_moves import WAIT_S, until_idle
from kvrelay.testing.contract_world import FACTS, ContractEngine, Shape
from kvrelay.testing.fake_scheduler import Settings
from kvrelay.testing.fake_worker import layer_name
from kvrelay.testing.paged_rank import PagedRank
from kvrelay.testing.pool import PoolThread
from kvrelay.testing.true_kv import CHUNK
from kvrelay.types import Reason

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PROMPT = list(range(100, 170))
WHOLE = (len(PROMPT), len(PROMPT) - 1)


class SeveralEngine(ContractEngine):
    """An engine with two pools: the second is that of P1."""

    def __init__(self, addresses: tuple[str, str], name: str, shape: Shape) -> None:
        self._second = addresses[1]
        self.others: list[PagedRank] = []
        super().__init__(addresses[0], name, random.Random(3), shape)

    def _connector(self) -> Any:
        shape, name, address = self.shape, f"{self.name} second", self._second
        self.other = SchedulerSide(
            ConnectorConfig(pool=address, engine=self.name, chunk_tokens=CHUNK, load_timeout_s=shape.load_s),
            facts=FACTS, geometry=shape.model.geometry, tables=shape.model.tables, ranks=len(self.ranks),
            saves=shape.saves, loads=shape.loads, role="kv_consumer", counters=self.counters, sync_loads=True,
            make_link=lambda greet: PoolLink(address, name=name, token=None, map_arena=False, greet=greet),
        )  # fmt: skip
        self.other.start()
        several: Any = SeveralSchedulers({"P0": self.side, "P1": self.other})
        return type("Guarded", (SchedulerGuard, BareScheduler), {})(several)

    def _worker(self, rank: PagedRank) -> Any:
        shape = self.shape
        second = PagedRank(
            self._second, f"{self.name} second", group=self.group, share=rank.share, shm=shape.shm,
            counters=self.counters, hold_s=shape.hold_s, load_s=shape.load_s, sync_s=shape.sync_s,
            pages=rank.pages,
        )  # fmt: skip
        second.settle()
        self.others.append(second)
        names = {layer_name(layer): at for at, layer in enumerate(rank.own_layers)}
        both: Any = SeveralWorkers([rank.side, second.side])
        return type("Guarded", (WorkerGuard, BareWorker), {})(both, names)

    def _scheduler(self) -> Any:
        scheduler = super()._scheduler()
        self.other.evict = scheduler.pool.evict
        return scheduler

    def check(self) -> None:
        super().check()
        self.other._ledger.check_integrity()
        for rank in self.others:
            with rank.side._changed:
                rank.side._ledger.check_integrity()

    def drain(self, timeout_s: float) -> None:
        super().drain(timeout_s)
        assert len(self.other._ledger) == 0
        for rank in self.others:
            with rank.side._changed:
                assert not rank.side._ledger.waited_for
                assert not rank.side._jobs


@pytest.fixture
def pools(tmp_path: Path) -> Iterator[tuple[PoolThread, PoolThread]]:
    for name in ("p0", "p1"):
        (tmp_path / name).mkdir()
    with PoolThread(tmp_path / "p0") as one, PoolThread(tmp_path / "p1") as other:
        yield one, other


@pytest.fixture(params=[1, 2], ids=["tp1", "tp2"])
def engine(request: pytest.FixtureRequest, pools: tuple[PoolThread, PoolThread]) -> Iterator[SeveralEngine]:
    made = SeveralEngine((pools[0].unix, pools[1].unix), "D", Shape(tp=request.param))
    yield made
    made.close()


def prefill(pool: PoolThread, name: str, prompt: list[int]) -> None:
    """As a prefill engine with a pool of its own does."""
    writer = ContractEngine(pool.unix, name, random.Random(1), Shape())
    writer.add(name, prompt, 1)
    until_idle(writer)
    writer.drain(WAIT_S)
    writer.close()


def ask(engine: SeveralEngine, name: str, prompt: list[int], prefilled_by: str) -> dict[str, float]:
    """A decode leg, and what the engine counted."""
    engine.counters.take()
    leg = {"handover": name, "leg": "decode", "worker": "D0", "prefill": prefilled_by}
    engine.add(name, prompt, 2, kv_transfer_params={"kvrelay": leg})
    until_idle(engine)
    return engine.counters.take()


def test_kv_is_loaded_from_the_pool_of_who_prefilled(
    pools: tuple[PoolThread, PoolThread], engine: SeveralEngine
) -> None:
    prompts = [PROMPT, PROMPT[::-1]]
    for pool, name, prompt in zip(pools, ("P0", "P1"), prompts, strict=True):
        prefill(pool, name, prompt)
    for name, prompt in zip(("P1", "P0"), prompts, strict=True):
        told = ask(engine, f"wrong {name}", [7, *prompt], name)  # of which no pool has anything
        assert told.get("loaded_tokens", 0) == 0
    for name, prompt in zip(("P0", "P1"), prompts, strict=True):
        assert ask(engine, name, prompt, name)["loaded_tokens"] in WHOLE
    engine.drain(WAIT_S)


def test_requests_of_both_go_on_at_once(pools: tuple[PoolThread, PoolThread], engine: SeveralEngine) -> None:
    prompts = [[*range(at, at + 60)] for at in range(1000, 1600, 100)]
    for at, prompt in enumerate(prompts):
        prefill(pools[at % 2], f"P{at}", prompt)
    for at, prompt in enumerate(prompts):
        leg = {"handover": f"h{at}", "leg": "decode", "worker": "D0", "prefill": f"P{at % 2}"}
        engine.add(f"r{at}", prompt, 3, kv_transfer_params={"kvrelay": leg})
    until_idle(engine)
    assert engine.counters.take()["loaded_tokens"] >= len(prompts) * 59
    engine.drain(WAIT_S)


def test_a_pool_that_is_gone_costs_the_requests_of_its_prefill_engine_alone(tmp_path: Path) -> None:
    """1. Both pools serve. 2. That of P0 ends. 3. What P0 prefilled is computed; what P1 did is loaded as before."""
    for name in ("p0", "p1"):
        (tmp_path / name).mkdir()
    with PoolThread(tmp_path / "p1") as second:
        with PoolThread(tmp_path / "p0") as first:
            prefill(first, "P0", PROMPT)
            prefill(second, "P1", PROMPT[::-1])
            engine = SeveralEngine((first.unix, second.unix), "D", Shape())
        try:
            lost = ask(engine, "a", PROMPT, "P0")
            assert lost.get("loaded_tokens", 0) == 0
            assert lost[f"recomputed_{Reason.POOL_DOWN}"] == len(PROMPT)
            assert ask(engine, "b", PROMPT[::-1], "P1")["loaded_tokens"] in WHOLE
            assert ask(engine, "c", [*range(900, 960)], "")["prompt_tokens"] == 60  # nobody prefilled
            engine.drain(WAIT_S)
        finally:
            engine.close()


def test_a_prefill_engine_that_nobody_configured_is_not_connected_to(
    pools: tuple[PoolThread, PoolThread], engine: SeveralEngine
) -> None:
    prefill(pools[1], "P1", PROMPT)
    told = ask(engine, "a", PROMPT, "unix:/elsewhere.sock")
    assert told.get("loaded_tokens", 0) == 0
    assert {side._config.pool for side in (engine.side, engine.other)} == {pool.unix for pool in pools}
    engine.drain(WAIT_S)


def test_a_reset_reaches_every_side(pools: tuple[PoolThread, PoolThread], engine: SeveralEngine) -> None:
    prefill(pools[1], "P1", PROMPT)
    both: Any = engine.connector
    assert both.reset_cache() is True
    assert ask(engine, "a", PROMPT, "P1").get("loaded_tokens", 0) == 0
    assert engine.side.namespace != engine.other.namespace


TURNS = 250


def test_the_contract_holds_whoever_prefilled_and_whichever_pool_hangs(
    seed: int, pools: tuple[PoolThread, PoolThread]
) -> None:
    """Requests of both prefill engines and of none that share beginnings, aborts, and pools that answer late.

    What attention reads is compared with the truth in every step.
    """
    rng = random.Random(seed)
    shape = Shape(tp=rng.choice([1, 2]), load_s=rng.choice([0.05, 5.0]), settings=Settings(budget=rng.choice([24, 80])))
    engine = SeveralEngine((pools[0].unix, pools[1].unix), "D", shape)
    writers = [ContractEngine(pool.unix, f"P{at}", rng, Shape()) for at, pool in enumerate(pools)]
    beginnings = [[rng.randrange(2000) for _ in range(80)] for _ in range(3)]
    try:
        for turn in range(TURNS):
            kind = rng.random()
            prompt = [*rng.choice(beginnings)[: rng.randrange(1, 81)], *(rng.randrange(2000) for _ in range(9))]
            if kind < 0.15:
                rng.choice(writers).add(f"w{turn}", prompt, 1)
            elif kind < 0.35:
                leg = {"handover": f"h{turn}", "leg": "decode", "worker": "D0", "prefill": rng.choice(["P0", "P1", ""])}
                more = {"kv_transfer_params": {"kvrelay": leg}} if rng.random() < 0.8 else {}
                engine.add(f"r{turn}", prompt, rng.randrange(1, 5), **more)
            elif kind < 0.4 and engine.scheduler.requests:
                engine.scheduler.abort(rng.choice(sorted(engine.scheduler.requests)))
            elif kind < 0.45:
                rng.choice(pools)._loop.call_soon_threadsafe(time.sleep, rng.choice([0.001, 0.02, 0.1]))
            for one in (engine, *writers):
                one.step()
                one.check()
        for one in (engine, *writers):
            one.drain(WAIT_S)
    finally:
        for one in (engine, *writers):
            one.close()
