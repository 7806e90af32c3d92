"""A scheduler that treats its connector as vLLM's treats one: what it asks, in which order, and what it then does.

After ``vllm/v1/core/sched/scheduler.py`` and ``async_scheduler.py`` of vLLM 0.32, for one KV cache group: chunked
prefill, prefix caching, asynchronous and synchronous loads and their failures, preemption, several steps in flight
(asynchronous scheduling, pipeline parallelism), n-gram speculation. Blocks of steps in flight are freed late.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvrelay.testing.engine_shapes import (
    BlockState,
    BlockTables,
    CachedRequests,
    ConnectorOutput,
    EngineRequest,
    NewRequest,
    Status,
    StepOutput,
)
from kvrelay.testing.true_kv import BLOCK, Blocks

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterable


@dataclass
class Row:
    """One request in one step."""

    request: EngineRequest
    computed: int
    count: int
    valid: int
    """Of ``count``; the rest are drafts that will be rejected."""
    blocks: list[int]
    sampled: list[int]
    tables: tuple[list[int], ...] = ()
    """All block tables, where there are several; ``blocks`` is the first."""

    def of(self, table: int) -> list[int]:
        """One block table."""
        return self.tables[table] if self.tables else self.blocks


@dataclass
class Batch:
    """One step, as its workers carry it out."""

    output: StepOutput
    rows: list[Row]
    changed: set[int]
    """Blocks that were given away, or to somebody, since the step before."""
    free: set[int]
    """Blocks that nobody holds, and of which nobody will read anything."""
    spoiled: set[str] = field(default_factory=set)
    """Requests that read what was not loaded: all they compute from then on is wrong."""


@dataclass(frozen=True)
class Settings:
    """What kind of engine it is."""

    budget: int = 40
    in_flight: int = 1
    """Steps scheduled before the first one's reports are taken in."""
    placeholders: bool = False
    """Asynchronous scheduling: a request goes on before its last token is known."""
    drafts: int = 0
    """Tokens guessed by n-gram speculation."""
    caching: bool = True
    consumer: bool = True
    max_running: int = 6
    chunks: tuple[int, ...] = (7, 20, 40)
    """Bounds on what one request may have of a step."""


class FakeScheduler:
    """One engine's scheduler. ``connector`` has the methods of vLLM's, its scheduler's half."""

    def __init__(self, connector: Any, rng: random.Random, settings: Settings) -> None:
        self.connector = connector
        self.settings = settings
        self._rng = rng
        self.pool = Blocks(rng, caching=settings.caching)
        self.requests: dict[str, EngineRequest] = {}
        self.waiting: list[EngineRequest] = []
        self.holding: list[EngineRequest] = []
        """Waiting, with blocks: for a load, or after one."""
        self.running: list[EngineRequest] = []
        self.paused = False
        self.on_failed: Callable[[str], None] = lambda _: None
        """Told of every request whose load was not whole."""
        self._finished: set[str] = set()
        self._preempted: set[str] = set()
        self._received: set[str] = set()
        self._failed: set[str] = set()
        self._changed: set[int] = set()
        self._scheduled_steps = 0
        self._done_steps = 0
        self._late_frees: deque[tuple[int, list[int]]] = deque()
        self._late = settings.in_flight > 1 and settings.consumer

    # --- between steps ---

    def add(self, request: EngineRequest) -> None:
        """A request arrives."""
        assert request.request_id not in self.requests, "duplicate request id"
        self.waiting.append(request)
        self.requests[request.request_id] = request
        self.connector.on_new_request(request)

    def abort(self, name: str) -> None:
        """A client went away."""
        request = self.requests.get(name)
        if request is None or request.status is Status.FINISHED:
            return
        self._unqueue(request)
        late = request.status is Status.REMOTE and name not in self._received
        self._received.discard(name)
        self._failed.discard(name)
        self._finish(request, late=late)

    def reset_prefix_cache(self, *, running: bool = False, connector: bool = False) -> bool:
        """Forget what is cached; False if somebody holds blocks. ``running``: preempt who runs."""
        while running and self.running:
            self._preempt(self.running.pop(), drop=True)
        idle = not any(self.pool.users(block) for block in range(len(self.pool)))
        if idle:
            self.pool.reset()
        if connector:
            idle = self.connector.reset_cache() is not False and idle
        return idle

    def lose_memory(self) -> None:
        """The engine slept: no block holds what it held. Only after a reset, and with nothing in flight."""
        self._changed.update(range(len(self.pool)))

    @property
    def idle(self) -> bool:
        """Whether the engine would stop stepping."""
        return not self.requests and not self._finished

    def _unqueue(self, request: EngineRequest) -> None:
        for queue in (self.waiting, self.holding, self.running):
            if request in queue:
                queue.remove(request)

    def _finish(self, request: EngineRequest, *, late: bool = False) -> None:
        request.status = Status.FINISHED
        kept = -(-request.num_computed_tokens // BLOCK)
        hold, _ = self.connector.request_finished_all_groups(request, (request.blocks[:kept],))
        self._finished.add(request.request_id)
        if not (hold or late):
            self._forget(request)

    def _forget(self, request: EngineRequest) -> None:
        assert request.status is Status.FINISHED
        self._free(request)
        del self.requests[request.request_id]

    def _free(self, request: EngineRequest) -> None:
        blocks, request.blocks = request.blocks, []
        if self._freeable(request):
            self._changed.update(self.pool.give(blocks))
        elif blocks:
            self._late_frees.append((self._scheduled_steps, blocks))

    def _freeable(self, request: EngineRequest) -> bool:
        return not self._late or request.last_step <= self._done_steps

    def _preempt(self, request: EngineRequest, *, drop: bool = False) -> None:
        self._free(request)
        request.status = Status.PREEMPTED
        request.num_computed_tokens = 0
        request.spec_token_ids = []
        request.drop_stale_output = drop or (request.drop_stale_output and request.num_stale_output_tokens > 0)
        request.num_stale_output_tokens = request.num_in_flight_tokens
        request.num_output_placeholders = 0
        request.num_preemptions += 1
        self.waiting.insert(0, request)
        self._preempted.add(request.request_id)

    # --- a step is scheduled ---

    def schedule(self) -> Batch:
        """One step; perhaps with nothing in it."""
        self._counts: dict[str, int] = {}
        self._budget = 0 if self.paused else self.settings.budget
        self._sync = False
        before = set(self._preempted)
        new: list[EngineRequest] = []
        resumed: list[EngineRequest] = []
        cached = self._schedule_running()
        if self._preempted == before and not self.paused:
            for request in self._schedule_waiting():
                (resumed if request.num_preemptions else new).append(request)
        return self._dispatch(new, resumed, cached)

    def _schedule_running(self) -> list[EngineRequest]:
        scheduled: list[EngineRequest] = []
        at = 0
        while at < len(self.running) and self._budget:
            request = self.running[at]
            at += 1
            last = request.num_computed_tokens + 2 - request.num_output_placeholders
            if request.num_output_placeholders and last >= request.num_prompt_tokens + request.max_tokens:
                continue
            want = request.num_tokens + len(request.spec_token_ids) + request.num_output_placeholders
            count = min(want - request.num_computed_tokens, self._budget, self._rng.choice(self.settings.chunks))
            if count <= 0:
                continue
            while not self._grow(request, request.num_computed_tokens + count):
                victim = self.running[-1]
                if not self._freeable(victim):
                    return scheduled
                self.running.pop()
                self._preempt(victim)
                if victim is request:
                    return scheduled
            scheduled.append(request)
            self._take(request, count)
        return scheduled

    def _take(self, request: EngineRequest, count: int) -> None:
        self._counts[request.request_id] = count
        self._budget -= count
        self.pool.cache(request, min(request.num_computed_tokens + count, request.num_tokens))

    def _grow(self, request: EngineRequest, tokens: int) -> bool:
        more = self.pool.take(max(0, -(-tokens // BLOCK) - len(request.blocks)))
        if more is not None:
            request.blocks += more
            self._changed.update(more)
        return more is not None

    def _schedule_waiting(self) -> list[EngineRequest]:
        admitted: list[EngineRequest] = []
        for request in [*self.holding, *self.waiting]:
            if not self._budget or len(self.running) >= self.settings.max_running:
                break
            if request.status is Status.REMOTE and not self._arrived(request):
                continue
            if request.num_stale_output_tokens and not request.drop_stale_output:
                continue
            verdict = self._admit(request)
            if verdict is None:
                break
            if verdict:
                admitted.append(request)
        return admitted

    def _arrived(self, request: EngineRequest) -> bool:
        """Whether its load has ended; then it waits as others do."""
        name = request.request_id
        if name not in self._received:
            return False
        if name in self._failed and not request.num_computed_tokens:
            self._free(request)
        else:
            self.pool.cache(request, request.num_computed_tokens)
        request.num_computed_tokens = min(request.num_computed_tokens, request.num_tokens - 1)
        self._failed.discard(name)
        self._received.remove(name)
        request.status = Status.PREEMPTED if request.num_preemptions else Status.WAITING
        return True

    def _admit(self, request: EngineRequest) -> bool | None:
        """Whether it was scheduled; None: there is no room, nor will there be for the next one."""
        hits: list[int] = []
        external, later, local = 0, False, request.num_computed_tokens
        if not request.num_computed_tokens:
            hits = [] if request.skip_reading_prefix_cache else self.pool.hits(request)
            local = len(hits) * BLOCK
            answer, later = self.connector.get_num_new_matched_tokens(request, local)
            if request.skip_reading_prefix_cache:
                answer, later = 0, False
            if answer is None:
                return False
            external = answer
        total = local + external
        assert total <= request.num_tokens
        count = 0
        if not later:
            count = min(request.num_tokens - total, self._budget, self._rng.choice(self.settings.chunks))
            assert count > 0
        if not self._allocate(request, hits, total + count, reserve=later):
            return None
        self.connector.update_state_after_alloc(request, BlockTables((list(request.blocks),)), external)
        request.num_computed_tokens = total
        self._unqueue(request)
        if later:
            request.status = Status.REMOTE
            self.holding.append(request)
            return False
        self.running.append(request)
        request.status = Status.RUNNING
        self._sync |= external > 0
        self._take(request, count)
        return True

    def _allocate(self, request: EngineRequest, hits: list[int], tokens: int, *, reserve: bool) -> bool:
        """Blocks for its first ``tokens`` tokens. ``reserve``: leave room for who has begun."""
        have = len(request.blocks) or len(hits)
        need = max(0, -(-tokens // BLOCK) - have)
        if reserve:
            begun = [one for one in self.requests.values() if one.blocks and one.status is not Status.FINISHED]
            left = sum(max(0, -(-one.num_tokens // BLOCK) - len(one.blocks)) for one in begun)
            if len([block for block in self.pool.free if block not in hits]) - left < need:
                return False
        if request.blocks:
            return self._grow(request, tokens)
        blocks = self.pool.take(need, hits)
        if blocks is None:
            return False
        request.blocks = blocks
        self._changed.update(blocks[len(hits) :])
        return True

    def _dispatch(self, new: list[EngineRequest], resumed: list[EngineRequest], running: list[EngineRequest]) -> Batch:
        counts = self._counts
        known = [*running, *resumed]
        drafts = {one.request_id: one.spec_token_ids[: self._drafted(one)] for one in running if self._drafted(one) > 0}
        tables = {name: list(self.requests[name].blocks) for name in counts}
        output = StepOutput(
            scheduled_new_reqs=[
                NewRequest(one.request_id, one.prompt_token_ids, (tables[one.request_id],), one.num_computed_tokens)
                for one in new
            ],
            scheduled_cached_reqs=CachedRequests(
                req_ids=[one.request_id for one in known],
                resumed_req_ids={one.request_id for one in resumed},
                new_block_ids=[(tables[one.request_id],) if one in resumed else None for one in known],
                num_computed_tokens=[one.num_computed_tokens for one in known],
                num_output_tokens=[one.num_output_tokens + one.num_output_placeholders for one in known],
            ),
            num_scheduled_tokens=dict(counts),
            total_num_scheduled_tokens=sum(counts.values()),
            scheduled_spec_decode_tokens=drafts,
            preempted_req_ids=self._preempted,
            finished_req_ids=self._finished,
            has_sync_kv_loads=self._sync,
            kv_connector_block_state=BlockState(set(counts), lambda name: (list(self.requests[name].blocks),)),
        )
        rows = [self._row(self.requests[name], count, len(drafts.get(name, ()))) for name, count in counts.items()]
        output.kv_connector_metadata = self.connector.build_connector_meta(output)
        output.kv_connector_block_state = None
        if counts:
            self._scheduled_steps += 1
        for row in rows:
            self._advance(row, len(drafts.get(row.request.request_id, ())))
        changed, self._changed = self._changed, set()
        self._preempted, self._finished = set(), set()
        return Batch(output, rows, changed, set(self.pool.meaningless))

    def _drafted(self, request: EngineRequest) -> int:
        """How many of a running request's scheduled tokens are drafts."""
        count = self._counts.get(request.request_id, 0)
        return count + request.num_computed_tokens - request.num_tokens - request.num_output_placeholders

    def _row(self, request: EngineRequest, count: int, drafts: int) -> Row:
        """What the workers will find: how many drafts are right, and what comes after them."""
        computed, whole = request.num_computed_tokens, request.truth.tokens
        wrong = self._rng.randint(0, drafts)
        valid = min(count - wrong, len(whole) - computed)
        samples = computed + count - drafts >= request.num_tokens + request.num_output_placeholders
        first = computed + count - drafts
        sampled = whole[first : computed + valid + 1] if samples else []
        return Row(request, computed, count, valid, list(request.blocks), list(sampled))

    def _advance(self, row: Row, drafts: int) -> None:
        request = row.request
        request.num_computed_tokens += row.count
        request.num_in_flight_tokens += row.count
        request.last_step = self._scheduled_steps
        prefilling = request.num_computed_tokens < request.num_tokens + request.num_output_placeholders
        request.spec_token_ids = []
        if self.settings.placeholders and not prefilling:
            request.num_output_placeholders += 1 + drafts

    # --- a step's reports ---

    def update(self, batch: Batch, reports: ConnectorOutput) -> None:
        """Take in what a step brought; steps come in the order they were scheduled."""
        if batch.rows:
            self._done_steps += 1
            self._free_late()
        broken = self._invalid(reports.invalid_block_ids, batch) if reports.invalid_block_ids else set()
        for name in reports.failed_recving:
            if name in self.requests and self.requests[name].status is Status.REMOTE:
                self.requests[name].num_computed_tokens = 0
                self._failed.add(name)
                self.on_failed(name)
        wrong = {name for name in batch.spoiled if self.requests.get(name) is not None} - broken
        alive = {name for name in wrong if self.requests[name].status is Status.RUNNING}
        assert not alive, f"{alive} computed on KV that was never loaded, and nobody said so"
        for row in batch.rows:
            self._output(row, broken)
        self._transfers(reports)

    def _free_late(self) -> None:
        while self._late_frees and self._late_frees[0][0] <= self._done_steps:
            self._changed.update(self.pool.give(self._late_frees.popleft()[1]))

    def _invalid(self, blocks: set[int], batch: Batch) -> set[str]:
        """Requests that run on blocks that were not loaded: they start again behind the last good one."""
        marked: set[int] = set()
        broken: set[str] = set()
        counts = {row.request.request_id: row.count for row in batch.rows}
        for request in [one for one in self.holding if one.status is Status.REMOTE] + self.running:
            computed = request.num_computed_tokens - counts.get(request.request_id, 0)
            bad = [at for at, block in enumerate(request.blocks[: -(-computed // BLOCK)]) if block in blocks]
            if not bad:
                continue
            own = [at for at in bad if request.blocks[at] not in marked]
            marked |= {request.blocks[at] for at in bad}
            request.num_computed_tokens = own[0] * BLOCK if own else computed
            if request.status is Status.REMOTE:
                self._failed.add(request.request_id)
                self.on_failed(request.request_id)
            else:
                broken.add(request.request_id)
                self.on_failed(request.request_id)  # its blocks stay cached under their names
        return broken

    def _output(self, row: Row, broken: set[str]) -> None:
        request = row.request
        request.num_in_flight_tokens -= row.count
        stale = request.num_stale_output_tokens > 0
        if stale:
            request.num_stale_output_tokens -= row.count
            assert request.num_stale_output_tokens >= 0
        if request.request_id in broken or request.status is Status.FINISHED:
            return
        if stale and request.drop_stale_output:
            return
        if row.count != row.valid and not stale:
            request.num_computed_tokens -= row.count - row.valid
        for token in row.sampled:
            request.tokens.append(token)
            if not stale and self.settings.placeholders:
                request.num_output_placeholders -= 1
            if request.num_output_tokens == request.max_tokens:
                break
        assert request.tokens == request.truth.tokens[: request.num_tokens]
        if row.sampled and request.num_output_tokens == request.max_tokens:
            self._unqueue(request)
            self._finish(request)
        elif row.sampled and request.status is Status.RUNNING and self.settings.drafts:
            request.spec_token_ids = self._draft(request)

    def _draft(self, request: EngineRequest) -> list[int]:
        left = request.max_tokens - request.num_output_tokens - 1
        return request.truth.tokens[request.num_tokens :][: min(left, self._rng.randint(0, self.settings.drafts))]

    def _transfers(self, reports: ConnectorOutput) -> None:
        self.connector.update_connector_output(reports)
        for name in reports.finished_recving or ():
            request = self.requests[name]  # vLLM asserts that it is there
            if request.status is Status.REMOTE:
                self._received.add(name)
            else:
                assert request.status is Status.FINISHED
                self._forget(request)
        for name in reports.finished_sending or ():
            self._forget(self.requests[name])

    # --- for tests ---

    @property
    def meaningless(self) -> set[int]:
        """Blocks that were given away, and spoiled since, and hold nothing that will be read."""
        return set(self.pool.meaningless) - self._changed

    @property
    def held(self) -> int:
        """How many blocks are not free."""
        return len(self.pool) - len(self.pool.free)

    def check_integrity(self) -> None:
        """Raise `AssertionError` if the books do not balance."""
        users = [0] * len(self.pool)
        for blocks in [*(one.blocks for one in self.requests.values()), *(blocks for _, blocks in self._late_frees)]:
            for block in blocks:
                users[block] += 1
        assert users == [self.pool.users(block) for block in range(len(users))], "blocks are lost"
        queued: list[EngineRequest] = [*self.waiting, *self.holding, *self.running]
        assert len({one.request_id for one in queued}) == len(queued)
        ended = {name for name, one in self.requests.items() if one.status is Status.FINISHED}
        assert ended | {one.request_id for one in queued} == self.requests.keys()

    def statuses(self, names: Iterable[str] | None = None) -> dict[str, str]:
        """Where requests stand."""
        return {name: str(self.requests[name].status) for name in (names or self.requests)}
