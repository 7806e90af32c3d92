"""One engine, seeded: arrivals, aborts, resets, naps and steps in any order an engine may have them."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from kvrelay.connector.config import ConnectorConfig
from kvrelay.connector.counters import Counters
from kvrelay.connector.engine_calls import EngineCalls
from kvrelay.connector.link import PoolLink
from kvrelay.testing.bare_connector import BareScheduler, BareWorker
from kvrelay.testing.contract_guard import SchedulerGuard, WorkerGuard
from kvrelay.testing.engine_shapes import EngineRequest, Status
from kvrelay.testing.fake_scheduler import FakeScheduler, Settings
from kvrelay.testing.fake_worker import FakeWorker, layer_name
from kvrelay.testing.output_aggregator import OutputAggregator
from kvrelay.testing.paged_engine import chunks_of, shares
from kvrelay.testing.paged_rank import PagedRank
from kvrelay.testing.true_kv import CHUNK, GEOMETRY, Truth
from kvrelay.testing.true_models import DENSE, TrueModel
from kvrelay.testing.watched_side import WatchedSide
from kvrelay.types import OnLostKv

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence

FACTS = {"model": "truth"}


class GuardedScheduler(SchedulerGuard, BareScheduler):
    """The scheduler's side, watched."""


class GuardedWorker(WorkerGuard, BareWorker):
    """A worker's side, watched."""


@dataclass(frozen=True)
class Shape:
    """What an engine is made of."""

    tp: int = 1
    pp: int = 1
    settings: Settings = field(default_factory=Settings)
    saves: bool = True
    loads: bool = True
    shm: bool = True
    hold_s: float = 30.0
    load_s: float = 30.0
    lookup_s: float = 30.0
    sync_s: float = 30.0
    sync_loads: bool = True
    """Where the engine can take them; else every load is asynchronous."""
    model: TrueModel = DENSE
    drafter: bool = False
    """Its last layer is a drafter's."""

    @property
    def takes_sync_loads(self) -> bool:
        """Whether a step's reports are there before the next is scheduled, and it loads synchronously then."""
        return self.sync_loads and self.pp == 1 and self.settings.in_flight == 1 and not self.settings.placeholders

    @classmethod
    def drawn(cls, rng: random.Random, model: TrueModel = DENSE) -> Shape:
        """Any kind of engine."""
        tp, pp = rng.choice([(1, 1), (1, 1), (2, 1), (1, 2), (4, 1), (2, 2)])
        saves, loads = rng.choice([(True, True), (True, True), (True, False), (False, True)])
        placeholders = rng.random() < 0.4
        settings = Settings(
            budget=rng.choice([24, 40, 80]),
            in_flight=max(pp, 2 if placeholders else 1),
            placeholders=placeholders,
            drafts=0 if placeholders or pp > 1 or rng.random() < 0.4 else 3,
            caching=rng.random() < 0.6,
            consumer=loads,
            chunks=rng.choice([(7, 20, 40), (80,), (3, 5)]),
        )
        return cls(
            tp, pp, settings, saves, loads, shm=rng.random() < 0.7,
            hold_s=rng.choice([0.0, 0.02, 10.0]), load_s=rng.choice([0.02, 0.2, 5.0]),
            lookup_s=rng.choice([0.05, 0.5]), sync_s=rng.choice([0.0, 0.01, 1.0]), model=model,
            drafter=settings.drafts > 0 and rng.random() < 0.6,
        )  # fmt: skip


class ContractEngine:
    """A scheduler, its ranks, and the connector between them."""

    def __init__(self, address: str, name: str, rng: random.Random, shape: Shape, *, troubled: bool = False) -> None:
        self.name, self.shape, self._rng = name, shape, rng
        self._others = set(threading.enumerate())
        """Threads that are not this engine's."""
        self.group = f"{name}/{rng.random()}"
        self.counters = Counters()
        ranks = shape.tp * shape.pp
        config = ConnectorConfig(
            pool=address, engine=name, chunk_tokens=CHUNK, lookup_timeout_s=shape.lookup_s, lost_kv_wait_s=0.05,
            load_timeout_s=shape.load_s,
        )  # fmt: skip
        self.side = WatchedSide(
            config, facts=FACTS, geometry=shape.model.geometry, tables=shape.model.tables, ranks=ranks,
            saves=shape.saves, loads=shape.loads, role="kv_both", counters=self.counters,
            sync_loads=shape.takes_sync_loads,
            make_link=lambda greet: PoolLink(address, name=name, token=None, map_arena=False, greet=greet),
        )  # fmt: skip
        self.side.start()
        self.ranks = [
            PagedRank(
                address, f"{name}{rank}", group=self.group, share=share, shm=shape.shm,
                counters=self.counters, hold_s=shape.hold_s, load_s=shape.load_s, sync_s=shape.sync_s,
                model=shape.model,
            )
            for rank, share in enumerate(shares(shape.tp, shape.pp))
        ]  # fmt: skip
        for rank in self.ranks:
            rank.settle()
        self.connector = self._connector()
        self.connector.watch(troubled=troubled)
        self.workers = [FakeWorker(self._worker(rank), rank, drafter=shape.drafter) for rank in self.ranks]
        for worker in self.workers:
            worker.connector.watch(self.connector)
        self.scheduler = self._scheduler()
        self.aggregator = self._aggregator()
        self.batches: list[Any] = []
        """Scheduled, and not taken in yet; oldest first."""
        self.truths: dict[bytes, bytes] = {}
        """Everything a pool may hold for it, by key."""

    # --- what it is made of: another kind of engine makes them of other parts ---

    def _connector(self) -> Any:
        return GuardedScheduler(self.side)

    def _worker(self, rank: PagedRank) -> Any:
        return GuardedWorker(rank.side, {layer_name(layer): at for at, layer in enumerate(rank.own_layers)})

    def _scheduler(self) -> Any:
        scheduler = FakeScheduler(self.connector, self._rng, self.shape.settings)
        scheduler.on_failed = self.connector.load_failed
        self.side.evict = scheduler.pool.evict
        return scheduler

    def _aggregator(self) -> Any:
        return OutputAggregator(len(self.ranks))

    # --- requests ---

    def add(self, name: str, prompt: Sequence[int], new: int, **options: Any) -> EngineRequest:
        """A request arrives that will generate ``new`` tokens."""
        more = [self._rng.randrange(1 << 20) for _ in range(new)]
        request = EngineRequest(name, list(prompt), new, Truth([*prompt, *more]), **options)
        self._note(request)
        self.scheduler.add(request)
        return request

    def _note(self, request: EngineRequest) -> None:
        """What a pool may hold of a request: its prompt's chunks, and every full one of all it will be."""
        truth, size = request.truth, len(request.truth.tokens) // CHUNK * CHUNK
        for tokens in (request.prompt_token_ids, truth.tokens[:size]):
            for chunk in chunks_of(self.side, tokens, request.cache_salt):
                self.truths |= self.shape.model.objects(truth, chunk)

    # --- steps ---

    def schedule(self) -> None:
        """Schedule a step."""
        self.last = batch = self.scheduler.schedule()
        self.batches.append(batch)
        for worker in self.workers:
            worker.todo.append(batch)

    def execute(self, number: int) -> None:
        """One rank carries out its next step."""
        self.workers[number].execute()

    def update(self) -> None:
        """Take in the oldest step's reports, which all ranks have made."""
        outputs = [worker.done.popleft() for worker in self.workers]
        self.scheduler.update(self.batches.pop(0), self.aggregator.aggregate(outputs))

    def moves(self) -> list[Callable[[], None]]:
        """What the engine may do next."""
        moves: list[Callable[[], None]] = []
        if len(self.batches) < self.shape.settings.in_flight:
            moves.append(self.schedule)
        moves += [lambda at=at: self.execute(at) for at, one in enumerate(self.workers) if one.todo]  # type: ignore[misc]
        if self.batches and all(worker.done for worker in self.workers):
            moves.append(self.update)
        return moves

    def step(self) -> None:
        """A whole step, whatever is in flight."""
        self.schedule()
        self.settle()

    def settle(self) -> None:
        """Carry out and take in all that was scheduled."""
        while self.batches:
            for number, worker in enumerate(self.workers):
                while worker.todo:
                    self.execute(number)
            self.update()

    # --- other things that happen to engines ---

    def nap(self, *, weights_stay: bool = True) -> bool:
        """Sleep and wake up: what the blocks held is gone. Whether it was allowed to sleep.

        ``weights_stay``: it is known that they are what they were.
        """
        self.settle()
        with EngineCalls([self.side], None).dropping(weights_stay=weights_stay):
            if not self.scheduler.reset_prefix_cache(running=True, connector=True):
                return False
        self.scheduler.lose_memory()
        return True

    # --- what must be true ---

    def check(self) -> None:
        """Every ledger's books balance; no free block was written to."""
        self.scheduler.check_integrity()
        self.side._ledger.check_integrity()
        for rank in self.ranks:
            with rank.side._changed:
                rank.side._ledger.check_integrity()
        for name in (*self.connector.held, *self.connector.loading):
            assert name in self.scheduler.requests

    def check_free_blocks(self) -> None:
        """Blocks that were given away hold what they held then."""
        if self.batches:
            return
        for worker in self.workers:
            fresh = [block for block in self.scheduler.meaningless if block in worker.spoiled]
            assert not worker.touched(fresh), "a block was written after it was given away"

    def drain(self, timeout_s: float) -> None:
        """Abort everything and step until nothing is held: then nothing is left anywhere."""
        self.settle()
        for name in list(self.scheduler.requests):
            self.scheduler.abort(name)
        deadline = time.monotonic() + timeout_s
        while not self.scheduler.idle:
            assert time.monotonic() < deadline, self.scheduler.statuses()
            self.step()
        self.step()
        self.check()
        self.check_free_blocks()
        assert not self.scheduler.held, "blocks are left"
        assert len(self.side._ledger) == 0, "the ledger remembers requests that are gone"
        assert not self.aggregator.waiting, "a rank reported what the others did not"
        assert not any((self.connector.held, self.connector.loading, self.connector.known))
        for rank in self.ranks:
            with rank.side._changed:
                assert not rank.side._ledger.waited_for
                assert not rank.side._jobs
            assert not rank.staging.used, "what was staged is left"

    def close(self) -> None:
        """Stop, as on SIGTERM; a second time nothing happens."""
        for _ in range(2):
            for worker in self.workers:
                worker.connector.shutdown()
            self.connector.shutdown()
        threads = set(threading.enumerate()) - self._others
        left = [thread.name for thread in threads if thread.name.startswith(self.name)]
        assert not left, f"threads were left behind: {left}"


def options_of(rng: random.Random, names: Sequence[str]) -> dict[str, Any]:
    """What else a request may say."""
    options: dict[str, Any] = {}
    if rng.random() < 0.1:
        options["cache_salt"] = rng.choice(["a", "b"])
    if rng.random() < 0.1:
        options["sampling_params"] = SimpleNamespace(prompt_logprobs=1)
        options["skip_reading_prefix_cache"] = True
    if rng.random() < 0.3:
        leg, ticket = rng.choice(["prefill", "decode"]), rng.choice(names)
        said: dict[str, Any] = {"handover": ticket, "leg": leg, "worker": "w"}
        if leg == "decode":
            said |= {"prefill": rng.choice(["P0", ""]), "policy": rng.choice(list(OnLostKv)), "attempt": 2}
        options["kv_transfer_params"] = {"kvrelay": said}
    return options


__all__ = ["GEOMETRY", "ContractEngine", "Shape", "Status", "options_of"]
