"""The scheduler's and two ranks' ledgers, driven as vLLM would, in every order chance can think of.

The machine plays vLLM's part faithfully where it kills engines: it asserts, as vLLM does, that a finished report names
a request that is still there, and that nobody's blocks are freed twice.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from kvrelay.connector.core.growth import Growth
from kvrelay.connector.core.ledger import Ledger
from kvrelay.connector.core.orders import LoadKind, LoadOrder, LoadOutcome, RankReport, SaveOrder, StepOrders
from kvrelay.connector.core.rank import RankLedger, Results
from kvrelay.connector.core.requests import Entry, HandOver, Phase
from kvrelay.connector.core.tables import Tables
from kvrelay.identity.core.chunks import ChunkChain
from kvrelay.types import Reason

BLOCK, CHUNK, RANKS = 4, 6, 2
CHUNK_BYTES, SYNC_BYTES, MAX_EARLY = 100, 500, 1
SHARES = [0.0, 0.5, 1.0, 1.0]
"""How much of a load comes."""
OVER = {
    "none": None,
    "prefill": HandOver("ho", "prefill", "P"),
    "decode": HandOver("ho", "decode", "D"),
    "overlapped": HandOver("ho", "decode", "D", overlapped=True),
}

MUST_HAPPEN = {
    "a later load: whole", "a later load: part", "a later load: nothing",
    "a now load: whole", "a now load: part", "a now load: nothing",
    "an early load: whole", "an early load: part", "an early load: nothing",
    "computed after a load", "handed over", "found from earlier", "saved what was generated", "saved at the end",
    "cancelled", "held", "preempted", "looked again", "lost a lease", "early loads queued", "waited for another's load",
    "ended in its synchronous load's step", "asked again after a failed load",
}  # fmt: skip
"""What long walks come across; a walk without them would show nothing of it."""


@dataclass
class Request:
    """A request as the engine sees it."""

    name: str
    number: int
    prompt: int
    tokens: list[int]
    """Its prompt's, and those it generated."""
    state: str = "waiting"
    computed: int = 0
    recv_left: set[int] = field(default_factory=set)
    send_left: set[int] = field(default_factory=set)
    proofs: int = 0

    @property
    def table(self) -> list[int]:
        """Its blocks, which are nobody else's."""
        return [self.number * 100 + at for at in range(-(-(len(self.tokens) + 1) // BLOCK))]


class Machine(RuleBasedStateMachine):
    """One engine with two ranks, whose synchronous loads are bounded."""

    requests = Bundle("requests")

    def __init__(self) -> None:
        super().__init__()
        tables = Tables.one(BLOCK)
        self.ledger = Ledger(
            engine="e", tables=tables, ranks=RANKS, saves=True, loads=True, sync_bytes=SYNC_BYTES, max_early=MAX_EARLY
        )
        self.ranks = [RankLedger(tables=tables, hold_s=9.0) for _ in range(RANKS)]
        self.alive: dict[str, Request] = {}
        self.open_saves: list[tuple[int, SaveOrder]] = []
        self.open_loads: list[tuple[int, LoadOrder]] = []
        self.leases: set[int] = set()
        self.counter = 0
        self.preempted: list[str] = []
        self.seen: Counter[str] = Counter()

    def entry(self, request: Request) -> Entry:
        entry = self.ledger.entry(request.name)
        assert entry is not None
        return entry

    # --- requests come, are looked up, get blocks ---

    @rule(
        target=requests, prompt=st.integers(1, 40), look=st.booleans(), over=st.sampled_from([*OVER]),
        grows=st.booleans(),
    )  # fmt: skip
    def arrive(self, prompt: int, look: bool, over: str, grows: bool) -> Request:
        self.counter += 1
        tokens = list(range(prompt))
        request = Request(f"r{self.counter}", self.counter, prompt, tokens)
        self.alive[request.name] = request
        chain = ChunkChain(request.name.encode(), CHUNK)
        chain.extend(tokens)
        growth = Growth(chain, tokens, prompt) if grows else None
        entry = self.ledger.add(request.name, prompt, tuple(chain.all()), OVER[over], growth)
        if look:
            self.ledger.look(entry)
        else:
            self.ledger.settle(entry, Reason.POOL_DOWN)
        return request

    @rule(request=requests, share=st.floats(0, 1), fresh=st.floats(0, 1), sealed=st.booleans())
    def answer(self, request: Request, share: float, fresh: float, sealed: bool) -> None:
        entry = self.ledger.entry(request.name)
        if entry is None or entry.phase is not Phase.LOOKING:
            return
        chunks = int(share * len(entry.chunks))
        lease = 0
        if chunks:
            self.counter += 1
            lease = self.counter
            self.leases.add(lease)
        self.ledger.match(
            entry, chunks, lease, look_again_at=1.0, fresh=range(int(fresh * chunks), chunks),
            sealed=chunks if sealed else chunks // 2, size_bytes=chunks * CHUNK_BYTES,
        )  # fmt: skip

    @rule()
    def lose_the_pool(self) -> None:
        self.seen["lost a lease"] += bool(self.leases)
        self.ledger.pool_lost()
        self.leases.clear()

    @rule(
        some=st.lists(requests, min_size=1, max_size=2), local_blocks=st.integers(0, 5), old=st.booleans(),
        shares=st.lists(st.sampled_from(SHARES), min_size=RANKS, max_size=RANKS), ends=st.booleans(),
    )  # fmt: skip
    def ask(self, some: list[Request], local_blocks: int, old: bool, shares: list[float], ends: bool) -> None:
        """A step's new requests; ``shares``: how much of a synchronous load each rank brings.

        ``ends``: a request whose load is synchronous ends with the step.
        """
        scheduled = []
        for at, request in enumerate(some):
            if request.state == "waiting" and self.admit(request, local_blocks + 2 * at, old=old):
                scheduled.append((request, 1))
        self.step(scheduled, shares, scheduled[0][0] if scheduled and ends else None)

    def admit(self, request: Request, local_blocks: int, *, old: bool) -> bool:
        """What the engine asks about a waiting request. Whether it computes in this very step, after its load."""
        entry = self.entry(request)
        local = min(local_blocks * BLOCK, (request.prompt - 1) // BLOCK * BLOCK)
        if self.ledger.must_wait(local):
            self.seen["waited for another's load"] += 1
            return False
        if self.ledger.wants_look(entry, now=2.0 if old else 0.0):
            self.seen["looked again"] += 1
            self.ledger.look(entry)
        if entry.phase is Phase.LOOKING:
            return False
        if self.ledger.must_queue(entry, local):
            self.seen["early loads queued"] += 1
            return False
        external = self.ledger.claimable(entry, local)
        assert external == 0 or local + external <= request.prompt - entry.near
        assert not (entry.failed and external)
        self.seen["asked again after a failed load"] += entry.failed
        self.ledger.allocated(entry, external, (request.table,), now=0.0)
        request.computed = local + external
        later = external > 0 and not entry.near
        request.state = "remote" if later else "running"
        request.recv_left = set(range(RANKS)) if later else set()
        return external > 0 and not later

    # --- steps ---

    def step(
        self, scheduled: list[tuple[Request, int]], shares: list[float] | None = None, ends: Request | None = None
    ) -> None:
        """``scheduled``: who computes how many tokens in it."""
        saves = []
        for request, count in scheduled:
            entry = self.entry(request)
            self.ledger.runs(entry)
            if not entry.scheduled and not self.ledger.loads_now(entry):
                self.prove(entry, request, request.computed)
            if self.ledger.has_unsaved(entry, request.computed + count):
                save = self.ledger.order_save(entry, request.computed + count, (request.table,))
                assert save.chunks[-1].end <= min(len(request.tokens), request.computed + count)
                self.seen["saved what was generated"] += save.chunks[-1].end > request.prompt
                saves.append(save)
            self.compute_on(request, count)
        lost = self.ledger.preempted(self.preempted)
        self.preempted = []
        self.release()
        self.carry_out(self.ledger.take_orders(saves, lost), shares or [])
        if shares and any(self.ledger.loads_now(self.entry(request)) for request, _ in scheduled):
            self.report(ends=ends)

    @staticmethod
    def compute_on(request: Request, count: int) -> None:
        """Tokens beyond those it has are drafts: the engine accepts all but the last of them, and samples one more."""
        drafts = max(0, request.computed + count - len(request.tokens))
        request.computed += count - min(drafts, 1)
        if request.computed >= len(request.tokens):
            request.tokens += range(len(request.tokens), request.computed + 1)

    def prove(self, entry: Entry, request: Request, computed: int) -> None:
        proof = self.ledger.prove(entry, computed)
        taken = proof.handed_over_tokens + proof.earlier_tokens
        assert taken + proof.local_tokens + proof.recomputed_tokens == request.prompt
        assert min(proof.handed_over_tokens, proof.earlier_tokens, proof.local_tokens, proof.recomputed_tokens) >= 0
        assert sum(proof.reasons.values()) == (proof.recomputed_tokens if proof.recomputed_tokens > 1 else 0)
        assert taken == 0 or entry.claimed_at or entry.bytes, "nothing was loaded"
        request.proofs += 1
        self.seen["computed after a load"] += taken > 0
        self.seen["handed over"] += proof.handed_over_tokens > 0
        self.seen["found from earlier"] += proof.earlier_tokens > 0

    def release(self) -> None:
        for lease in self.ledger.take_releases():
            self.leases.remove(lease)

    def carry_out(self, orders: StepOrders, shares: list[float]) -> None:
        self.seen["cancelled"] += len(orders.cancelled)
        self.seen["held"] += len(orders.held)
        self.seen["preempted"] += len(orders.preempted)
        self.seen["saved at the end"] += sum(save.complete for save in orders.saves)
        for number, rank in enumerate(self.ranks):
            for name in orders.preempted:
                self.end_saves(number, name)
            for name in orders.held:
                rank.hold(name, now=0.0)
            for name in orders.cancelled:
                rank.cancel(name)
            for load in orders.loads:
                assert len(load.tables[0].ids) == -(-load.end // BLOCK) - load.tables[0].first
                assert load.chunks[0].start <= load.start < load.chunks[0].end
                assert load.chunks[-1].start < load.end <= load.chunks[-1].end
                assert load.end == load.chunks[-1].end or load.kind is LoadKind.NOW
                rank.load_ordered(load)
                if load.kind is LoadKind.NOW:
                    self.end_load(number, load, shares[number])
                else:
                    self.open_loads.append((number, load))
            for save in orders.saves:
                rank.save_ordered(save.request_id)
                self.open_saves.append((number, save))

    def end_saves(self, number: int, name: str) -> None:
        for item in [item for item in self.open_saves if item[0] == number and item[1].request_id == name]:
            self.open_saves.remove(item)
            self.ranks[number].save_ended(name)

    def end_load(self, number: int, load: LoadOrder, share: float) -> None:
        valid = load.start + int(share * (load.end - load.start))
        reason = Reason.NONE if valid == load.end else Reason.WRITER_LOST
        self.ranks[number].load_ended(load.request_id, LoadOutcome(valid, valid - load.start, 0.1, reason))
        how = "whole" if valid == load.end else "part" if valid > load.start else "nothing"
        kind = {LoadKind.LATER: "a later", LoadKind.NOW: "a now", LoadKind.EARLY: "an early"}[load.kind]
        self.seen[f"{kind} load: {how}"] += 1

    @rule(request=requests, count=st.integers(1, 20))
    def compute(self, request: Request, count: int) -> None:
        if request.state == "running" and request.computed < len(request.tokens):
            drafts = count % 3 if request.computed >= request.prompt else 0
            self.step([(request, min(count, len(request.tokens) - request.computed) + drafts)])

    @rule(request=requests)
    def preempt(self, request: Request) -> None:
        if request.state == "running":
            request.state, request.computed = "waiting", 0
            self.preempted.append(request.name)
            self.step([])

    # --- the ranks work and report ---

    @rule(pick=st.integers(0))
    def a_save_ends(self, pick: int) -> None:
        if self.open_saves:
            number, save = self.open_saves.pop(pick % len(self.open_saves))
            self.ranks[number].save_ended(save.request_id)

    @rule(pick=st.integers(0), share=st.sampled_from(SHARES))
    def a_load_ends(self, pick: int, share: float) -> None:
        if self.open_loads:
            self.end_load(*self.open_loads.pop(pick % len(self.open_loads)), share)

    @rule()
    def report(self, ends: Request | None = None) -> None:
        """What vLLM does with a step's reports, in its order. ``ends``: who ends by what the step computed."""
        results = [rank.take() for rank in self.ranks]
        report = RankReport(saves_ended={}, loads={})
        for result in results:
            report = report.join(result.report)
        self.start_again({block for result in results for block in result.invalid_block_ids})
        if ends is not None:
            self.seen["ended in its synchronous load's step"] += 1
            self.release_blocks(ends)
        received = self.received(results)
        sent = self.sent(results)
        for entry, ended in self.ledger.report(report):
            self.ledger.loaded_now(entry, ended.took_s)
            request = self.alive.get(entry.request_id)
            if request is not None and ended.untrue:
                assert request.computed == ended.computed
                assert list(ended.untrue) == request.table[ended.computed // BLOCK :][: len(ended.untrue)]
            if request is not None and not entry.scheduled:
                self.prove(entry, request, ended.computed)
        for name in received:
            self.ledger.loaded(name, now=1.0)
        for name in sent:
            self.ledger.sent(name)
        self.release()

    def start_again(self, blocks: set[int]) -> None:
        """Who has a block that holds nothing goes on before the first of them."""
        for request in self.alive.values():
            bad = [at for at, block in enumerate(request.table) if block in blocks]
            if bad:
                request.computed = min(request.computed, bad[0] * BLOCK)

    def received(self, results: list[Results]) -> list[str]:
        """What vLLM makes of loads that ended: the request goes on, or its blocks are freed now."""
        done = []
        for number, result in enumerate(results):
            for name in result.finished_recving:
                request = self.alive[name]  # vLLM asserts this
                request.recv_left.remove(number)
                if not request.recv_left:
                    done.append(name)
                    assert request.state in ("remote", "aborted-remote")
                    if request.state == "aborted-remote":
                        self.free(request)
                    else:
                        request.state = "running" if request.computed else "waiting"
                        request.computed = min(request.computed, len(request.tokens) - 1)
        return done

    def sent(self, results: list[Results]) -> list[str]:
        done = []
        for number, result in enumerate(results):
            for name in result.finished_sending:
                request = self.alive[name]  # vLLM asserts this
                assert request.state == "held"
                request.send_left.remove(number)
                if not request.send_left:
                    done.append(name)
                    self.free(request)
        return done

    def free(self, request: Request) -> None:
        del self.alive[request.name]
        request.state = "gone"

    @rule(request=consumes(requests))
    def finish(self, request: Request) -> None:
        self.end(request)

    def end(self, request: Request) -> None:
        if request.state in ("waiting", "running", "remote"):
            self.release_blocks(request)
            self.step([])

    def release_blocks(self, request: Request) -> None:
        """The request is over; its blocks are free at once, or when what needs them is reported."""
        hold = self.ledger.finish(self.entry(request), request.computed, (request.table,)).hold
        if request.state == "remote":
            assert not hold, "vLLM frees these blocks itself: twice, if it were told to keep them"
            request.state = "aborted-remote"
        elif hold:
            request.state, request.send_left = "held", set(range(RANKS))
        else:
            self.free(request)

    # --- always ---

    @invariant()
    def books_balance(self) -> None:
        self.ledger.check_integrity()
        for rank in self.ranks:
            rank.check_integrity()
        assert all(request.proofs <= 1 for request in self.alive.values())
        held = {entry.lease for name in self.alive if (entry := self.ledger.entry(name)) and entry.lease}
        assert held | set(self.ledger._releases) == self.leases

    def teardown(self) -> None:
        """Everything ends: nothing may be left anywhere."""
        for request in list(self.alive.values()):
            self.end(request)
        while self.open_saves:
            number, save = self.open_saves.pop()
            self.ranks[number].save_ended(save.request_id)
        while self.open_loads:
            number, load = self.open_loads.pop()
            self.ranks[number].load_ended(load.request_id, LoadOutcome(load.start, 0, 0.0, Reason.FAILED_LOAD))
        self.report()
        assert not self.alive
        assert len(self.ledger) == 0
        assert not self.leases
        assert not any(rank.waited_for for rank in self.ranks)


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


# Hypothesis leaves out rules at random, and seldom goes the long way of a load; a walk with weights does.

WEIGHTS = {
    "arrive": 12, "answer": 16, "lose_the_pool": 1, "ask": 25, "compute": 25, "preempt": 3, "a_save_ends": 20,
    "a_load_ends": 14, "report": 14, "finish": 5,
}  # fmt: skip


def walk(rng: random.Random, steps: int) -> Counter[str]:
    """Do ``steps`` things at random, checking after each. What happened, and how often."""
    machine = Machine()
    for _ in range(steps):
        there = [one for one in machine.alive.values() if one.state in ("waiting", "running", "remote")]
        event = rng.choices([*WEIGHTS], [*WEIGHTS.values()])[0] if there else "arrive"
        request = rng.choice(there) if there else None
        match event:
            case "arrive" if len(there) < 8:
                machine.arrive(rng.randint(1, 40), rng.random() < 0.9, rng.choice([*OVER]), rng.random() < 0.5)
            case "answer" if request:
                machine.answer(request, rng.choice([0, 0.5, 0.9, 1, 1]), rng.random(), rng.random() < 0.6)
            case "lose_the_pool":
                machine.lose_the_pool()
            case "ask":
                some = rng.sample(there, min(len(there), rng.randint(1, 2)))
                shares = [rng.choice(SHARES) for _ in range(RANKS)]
                machine.ask(some, rng.choice([0, 0, 0, 1, 2, 5]), rng.random() < 0.2, shares, rng.random() < 0.2)
            case "compute" if request:
                machine.compute(request, rng.randint(1, 20))
            case "preempt" if request:
                machine.preempt(request)
            case "a_save_ends":
                machine.a_save_ends(rng.randrange(1000))
            case "a_load_ends":
                machine.a_load_ends(rng.randrange(1000), rng.choice(SHARES))
            case "report":
                machine.report()
            case "finish" if request:
                machine.end(request)
        machine.books_balance()
    machine.teardown()
    return machine.seen


def test_long_walks_keep_the_books_and_come_across_everything() -> None:
    seen: Counter[str] = Counter()
    for seed in range(60):
        seen += walk(random.Random(seed), 600)
    assert not MUST_HAPPEN - seen.keys()
