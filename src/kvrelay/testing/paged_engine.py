"""A small engine that schedules, reuses and frees blocks as vLLM does, on real pages, for tests of the connector.

What it knows and vLLM does not: the *true* KV of every token, a function of all tokens up to it. It computes by writing
truth into its blocks, poisons blocks the moment they change hands, and before each layer checks that whatever its
attention would read is true.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from kvrelay.connector.config import ConnectorConfig
from kvrelay.connector.core.geometry import rank_share
from kvrelay.connector.core.orders import LoadKind, RankReport
from kvrelay.connector.core.tables import Tables
from kvrelay.connector.counters import Counters
from kvrelay.connector.layout import Run
from kvrelay.connector.link import PoolLink
from kvrelay.connector.scheduler_side import SchedulerSide
from kvrelay.identity.core.chunks import chain_seed, prompt_chunks
from kvrelay.testing.paged_rank import PagedRank
from kvrelay.testing.true_kv import BLOCK, BLOCKS, CHUNK, GEOMETRY, GROUP, Blocks, Request, Truth

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator, Sequence

    from kvrelay.connector.adapters import Adapters
    from kvrelay.connector.core.geometry import RankShare
    from kvrelay.connector.core.orders import StepOrders
    from kvrelay.identity.core.chunks import Chunk

BUDGET = 40
FACTS = {"model": "truth"}


class PagedEngine:
    """One engine: scheduler, blocks, ranks. ``step`` is the whole of its life."""

    def __init__(
        self,
        address: str,
        name: str,
        rng: random.Random,
        *,
        shape: tuple[int, int],
        caching: bool,
        shm: bool,
        drafts: int = 0,
        role: str = "kv_both",
        hold_s: float | None = None,
        load_s: float | None = None,
        lookup_s: float = 0.05,
        adapters: Adapters | None = None,
        sync_bytes: int = 0,
    ) -> None:
        """``shape``: tensor ranks of each pipeline stage, and stages.

        ``drafts``: how many tokens it guesses in a step at most; most guesses are wrong.
        ``hold_s``, ``load_s``: how long saves and loads may take, sometimes too short if not given; ``lookup_s``: how
        long the pool may take to answer. ``sync_bytes``: what it loads synchronously in one step.
        """
        self.name = name
        self.group = f"{name}/{rng.random()}"
        self._rng = rng
        self.blocks = Blocks(rng, caching=caching)
        self.counters = Counters()
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []
        self._drafts = drafts
        self.preempted: set[str] = set()
        self._freed: list[int] = []
        """By preemption: another's as soon as a rank has been told."""
        self.synchronous = 0
        """Synchronous loads that were claimed."""
        hold_s = rng.choice([0.0, 0.02, 10.0]) if hold_s is None else hold_s
        load_s = rng.choice([0.02, 0.2, 5.0]) if load_s is None else load_s
        sync_s = rng.choice([0.0, 0.01, 1.0])
        self.side = SchedulerSide(
            ConnectorConfig(
                pool=address, engine=name, chunk_tokens=CHUNK, lookup_timeout_s=lookup_s, sync_load_bytes=sync_bytes
            ),
            facts=FACTS, geometry=GEOMETRY, tables=Tables.one(BLOCK), ranks=shape[0] * shape[1], saves=True,
            loads=role != "kv_producer", role=role,
            counters=self.counters, adapters=adapters, evict=self.blocks.evict, sync_loads=shape[1] == 1,
            make_link=lambda greet: PoolLink(address, name=name, token=None, map_arena=False, greet=greet),
        )  # fmt: skip
        self.side.start()
        self.ranks = [
            PagedRank(
                address, f"{name}{rank}", group=self.group, share=share, shm=shm, counters=self.counters,
                hold_s=hold_s, load_s=load_s, sync_s=sync_s,
            )
            for rank, share in enumerate(shares(*shape))
        ]  # fmt: skip
        for rank in self.ranks:
            rank.settle()

    # --- between steps ---

    def add(
        self,
        name: str,
        tokens: Sequence[int],
        new: int,
        *,
        salt: str | None = None,
        params: dict[str, Any] | None = None,
        **more: Any,
    ) -> Request:
        """A request arrives; it will generate ``new`` tokens, which it shows at the end of its ``truth.tokens``.

        ``more``: what else `SchedulerSide.on_new_request` takes.
        """
        said = [self._rng.randrange(1 << 20) for _ in range(new)]
        request = Request(name, list(tokens), len(tokens), new, Truth([*tokens, *said]))
        self.requests[name] = request
        self.side.on_new_request(name, request.tokens, len(tokens), salt=salt, params=params, **more)
        return request

    def abort(self, name: str) -> None:
        """A client went away."""
        request = self.requests[name]
        if request.state in ("waiting", "loading", "running"):
            self._finish(request)

    def preempt(self, request: Request) -> None:
        """Take a running request's blocks."""
        self.running.remove(request)
        self._freed += self.blocks.give(request.blocks)
        request.blocks, request.computed, request.state = [], 0, "waiting"
        self.preempted.add(request.name)

    def reset_prefix_cache(self) -> None:
        """Preempt everybody; they come back in the same step."""
        for request in list(self.running):
            self.preempt(request)
        self.blocks.reset()

    def _finish(self, request: Request) -> None:
        hold = self.side.finished(request.name, request.computed, [request.blocks])
        loading = request.state == "loading" and not request.received
        assert not (hold and loading), "freed twice"
        if request in self.running:
            self.running.remove(request)
        request.state = "held" if hold else "aborted" if loading else "gone"
        if hold:
            request.left = set(range(len(self.ranks)))
        if request.state == "gone":
            self._free(request)

    def _free(self, request: Request) -> None:
        del self.requests[request.name]
        poisoned = self.blocks.give(request.blocks)
        for rank in self.ranks:
            rank.poison(poisoned)

    # --- a step ---

    def step(self, *, stop_at: int | None = None) -> None:
        """Schedule, run the forward pass, take reports. ``stop_at``: the pass is broken off before that layer."""
        forced = bool(self.preempted)
        scheduled = self._schedule_running()
        if forced or not self.preempted:
            scheduled += self._schedule_waiting(BUDGET - sum(count for _, _, count in scheduled))
        orders = self.side.step(
            [(request.name, computed, count) for request, computed, count in scheduled],
            self.preempted,
            lambda name: (self.requests[name].blocks,),
        )
        self.preempted = set()
        freed, self._freed = self._freed, []
        used = {block for request in self.requests.values() for block in request.blocks}
        results = [
            self._execute(number, orders, scheduled, [block for block in freed if block not in used], stop_at)
            for number in range(len(self.ranks))
        ]
        if stop_at is None:
            self._update(scheduled, results)

    def _schedule_running(self) -> list[tuple[Request, int, int]]:
        scheduled = []
        budget = BUDGET
        for request in list(self.running):
            if request.state != "running" or not budget:
                continue
            count = min(len(request.tokens) - request.computed, budget, self._rng.choice([7, 20, 40]))
            drafts = self._guess(request, count, budget)
            request.accepted, count = self._rng.randint(0, drafts), count + drafts
            while (more := self._grow(request, request.computed + count)) is None:
                self.preempt(self.running[-1])
                if request.state != "running":
                    break
            if more is None:
                break
            request.blocks += more
            scheduled.append((request, request.computed, count))
            budget -= count
            request.computed += count
        return [item for item in scheduled if item[0].state == "running"]

    def _guess(self, request: Request, count: int, budget: int) -> int:
        """How many drafts to compute beside a decoded token."""
        if request.computed + count < len(request.tokens) or len(request.tokens) == request.prompt:
            return 0
        room = len(request.truth.tokens) - len(request.tokens)
        return self._rng.randint(0, max(0, min(self._drafts, room, budget - count)))

    def _grow(self, request: Request, tokens: int) -> list[int] | None:
        return self.blocks.take(max(0, -(-tokens // BLOCK) - len(request.blocks)))

    def _schedule_waiting(self, budget: int) -> list[tuple[Request, int, int]]:
        scheduled = []
        for request in [one for one in self.requests.values() if one.state in ("waiting", "loading")]:
            if budget <= 0:
                break
            if request.state == "loading":
                if not request.received:
                    continue
                self._loaded(request)
            external, local = 0, request.computed
            if not request.computed:
                hits = self.blocks.hits(request)
                local = len(hits) * BLOCK
                answer, later = self.side.num_matched(request.name, local)
                if answer is None:
                    continue
                external = answer
                assert later <= (external > 0)
                assert local + external <= len(request.tokens) - (not later)
                total = local + external
                count = 0 if later else min(len(request.tokens) - total, budget)
                blocks = self.blocks.take(-(-(total + count) // BLOCK) - len(hits), hits)
                if blocks is None:
                    break
                request.blocks = blocks
            else:
                later = False
                count = min(len(request.tokens) - local, budget)
                more = self._grow(request, local + count)
                if more is None:
                    break
                request.blocks += more
            self.side.allocated(request.name, (request.blocks,), external)
            request.computed = local + external
            if later:
                request.state, request.received = "loading", False
                request.left = set(range(len(self.ranks)))
                continue
            self.synchronous += external > 0
            self.blocks.cache(request, request.computed + count)  # as vLLM: before anything is computed or loaded
            request.state, request.accepted = "running", 0
            self.running.append(request)
            scheduled.append((request, request.computed, count))
            request.computed += count
            budget -= count
        return scheduled

    def _loaded(self, request: Request) -> None:
        """A load has ended on all ranks: its tokens are there, as far as no rank said otherwise."""
        request.state, request.received = "waiting", False
        for rank in self.ranks:
            for layer in rank.own_layers:
                rank.check(request, layer, request.computed)
        if request.computed:
            self.blocks.cache(request, request.computed)
        else:
            poisoned = self.blocks.give(request.blocks)
            request.blocks = []
            for rank in self.ranks:
                rank.poison(poisoned)
        request.computed = min(request.computed, len(request.tokens) - 1)

    def _execute(
        self,
        number: int,
        orders: StepOrders,
        scheduled: list[tuple[Request, int, int]],
        freed: list[int],
        stop_at: int | None,
    ) -> Any:
        rank = self.ranks[number]
        rank.side.before_step(orders)
        rank.poison(freed)
        rank.side.begin_step(orders)
        # What failed to be loaded before the pass is read all the same; what comes of it is thrown away.
        untrue = {
            order.request_id
            for order in orders.loads
            if order.kind is LoadKind.NOW and rank.side._ledger._outcomes[order.request_id].valid_end < order.end
        }
        for layer in rank.own_layers if scheduled else ():
            if stop_at is not None and layer >= stop_at:
                break
            for request, computed, count in scheduled:
                tokens = rank.part(request.truth.kv, layer)[:, :, computed : computed + count].copy()
                tokens[:, :, len(request.tokens) + request.accepted - computed :] = 0xD12AF7
                block = computed // BLOCK
                run = Run(request.blocks[block:], computed % BLOCK, count)
                rank.blocks(layer).write(run, tokens)
            for request, computed, _ in scheduled:
                if request.name not in untrue:
                    rank.check(request, layer, computed)
            rank.side.layer_computed(layer - rank.share.first_layer)
        rank.side.end_step()
        return rank.side.take_results()

    def _update(self, scheduled: list[tuple[Request, int, int]], results: list[Any]) -> None:
        invalid = set().union(*(result.invalid_block_ids for result in results))
        failed: set[str] = set()
        before = {request.name: computed for request, computed, _ in scheduled}
        for request in self.requests.values():
            computed = before.get(request.name, request.computed)
            bad = [at for at, block in enumerate(request.blocks) if block in invalid and at * BLOCK < computed]
            if bad and request.state in ("loading", "running"):
                request.computed = bad[0] * BLOCK
                failed.add(request.name)
            assert not bad or request.state != "running" or before[request.name], "it loaded nothing in this step"
            assert not bad or request.state in ("loading", "aborted", "running"), "another's block is called invalid"
            # vLLM would take a block for computed that another is to compute again, and may not live to.
            invalid.difference_update(request.blocks[at] for at in bad)
            holders = [
                one.name for one in self.requests.values() if set(one.blocks) & {request.blocks[at] for at in bad}
            ]
            assert len(holders) <= 1, f"{holders} hold a block that a load failed to fill"
        for request, _, _ in scheduled:
            if request.state == "running" and request.name not in failed:
                certain = len(request.tokens) + request.accepted
                sampled = request.computed >= len(request.tokens)
                request.computed = min(request.computed, certain)
                if sampled:
                    request.tokens += request.truth.tokens[len(request.tokens) : certain + 1]
                self.blocks.cache(request, request.computed)
                if request.computed == len(request.tokens):
                    self._finish(request)
        report = RankReport(saves_ended={}, loads={})
        for result in results:
            report = report.join(result.report)
        received = self._ended(results, "finished_recving")
        sent = self._ended(results, "finished_sending")
        self.side.update(report, [one.name for one in sent], [one.name for one in received])
        for request in received:
            if request.state == "loading":
                request.received = True
            else:
                assert request.state == "aborted"
                self._free(request)
        for request in sent:
            assert request.state == "held"
            self._free(request)

    def _ended(self, results: list[Any], kind: str) -> list[Request]:
        done = []
        for number, result in enumerate(results):
            for name in getattr(result, kind):
                request = self.requests[name]  # vLLM asserts that it is there
                request.left.remove(number)
                if not request.left:
                    done.append(request)
        return done

    def finish_all(self, timeout_s: float) -> None:
        """Step until every request has generated what it is to, and nothing is held."""
        deadline = time.monotonic() + timeout_s
        while self.requests:
            assert time.monotonic() < deadline, {one.name: one.state for one in self.requests.values()}
            self.step()

    # --- the end ---

    def drain(self, timeout_s: float) -> None:
        """Abort everything and wait until nothing is held."""
        for name in list(self.requests):
            self.abort(name)
        self.finish_all(timeout_s)
        assert len(self.blocks.free) == BLOCKS
        self.step()
        assert len(self.side._ledger) == 0

    def close(self) -> None:
        """Stop, as on SIGTERM."""
        for rank in self.ranks:
            rank.side.close()
        self.side.close()


def shares(tp: int, pp: int) -> Iterator[RankShare]:
    """What each rank of an engine of this shape holds, in vLLM's order of ranks."""
    for stage in range(pp):
        first, end = (GEOMETRY.layers * edge // pp for edge in (stage, stage + 1))
        for rank in range(tp):
            yield rank_share(GROUP, tp_rank=rank, tp_size=tp, first_layer=first, layers=end - first)


def chunks_of(side: SchedulerSide, tokens: Sequence[int], salt: str | None = None) -> tuple[Chunk, ...]:
    """The chunks of a prompt."""
    return prompt_chunks(chain_seed(side.namespace, salt=salt), list(tokens), CHUNK)
