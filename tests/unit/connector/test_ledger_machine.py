"""The scheduler's and two ranks' ledgers, driven as vLLM would, in every order Hypothesis can think of.

The machine plays vLLM's part faithfully where it kills engines: it asserts, as vLLM does, that a finished report names
a request that is still there, and that nobody's blocks are freed twice.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from kvrelay.connector.core.ledger import Ledger
from kvrelay.connector.core.orders import LoadOutcome, RankReport, SaveOrder, StepOrders
from kvrelay.connector.core.rank import RankLedger, Results
from kvrelay.connector.core.requests import Entry, HandOver, Phase
from kvrelay.connector.core.tables import Tables
from kvrelay.identity.core.chunks import Chunk
from kvrelay.types import Reason

BLOCK, CHUNK, RANKS = 4, 6, 2


@dataclass
class Request:
    """A request as the engine sees it."""

    name: str
    tokens: int
    state: str = "waiting"
    computed: int = 0
    recv_left: set[int] = field(default_factory=set)
    send_left: set[int] = field(default_factory=set)
    proofs: int = 0


class Machine(RuleBasedStateMachine):
    """One engine with two ranks."""

    requests = Bundle("requests")

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(engine="e", tables=Tables.one(BLOCK), ranks=RANKS, saves=True, loads=True)
        self.ranks = [RankLedger(tables=Tables.one(BLOCK), hold_s=9.0) for _ in range(RANKS)]
        self.alive: dict[str, Request] = {}
        self.open_saves: list[tuple[int, SaveOrder]] = []
        self.open_loads: list[tuple[int, str, int, int]] = []
        self.leases: set[int] = set()
        self.counter = 0
        self.preempted: list[str] = []

    def entry(self, request: Request) -> Entry:
        entry = self.ledger.entry(request.name)
        assert entry is not None
        return entry

    # --- requests come, are looked up, get blocks ---

    @rule(target=requests, tokens=st.integers(1, 40), look=st.booleans())
    def arrive(self, tokens: int, look: bool) -> Request:
        self.counter += 1
        request = Request(f"r{self.counter}", tokens)
        self.alive[request.name] = request
        chunks = tuple(
            Chunk(f"{request.name}-{at}".encode(), at, min(at + CHUNK, tokens)) for at in range(0, tokens, CHUNK)
        )
        entry = self.ledger.add(request.name, tokens, chunks, HandOver("ho", "decode", "D"))
        if look:
            self.ledger.look(entry)
        else:
            self.ledger.settle(entry, Reason.POOL_DOWN)
        return request

    @rule(request=requests, share=st.floats(0, 1))
    def answer(self, request: Request, share: float) -> None:
        entry = self.ledger.entry(request.name)
        if entry is None or entry.phase is not Phase.LOOKING:
            return
        chunks = int(share * len(entry.chunks))
        lease = 0
        if chunks:
            self.counter += 1
            lease = self.counter
            self.leases.add(lease)
        self.ledger.match(entry, chunks, lease, look_again_at=1.0)

    @rule()
    def lose_the_pool(self) -> None:
        self.ledger.pool_lost()
        self.leases.clear()

    @rule(request=requests, local_blocks=st.integers(0, 5), old=st.booleans())
    def ask(self, request: Request, local_blocks: int, old: bool) -> None:
        if request.state != "waiting":
            return
        entry = self.entry(request)
        if self.ledger.wants_look(entry, now=2.0 if old else 0.0):
            self.ledger.look(entry)
        if entry.phase is Phase.LOOKING:
            return
        local = min(local_blocks * BLOCK, (request.tokens - 1) // BLOCK * BLOCK)
        external = self.ledger.claimable(entry, local)
        assert external == 0 or local + external <= request.tokens
        assert not (entry.failed and external)
        table = (list(range(-(-request.tokens // BLOCK))),)
        self.ledger.allocated(entry, external, table, now=0.0)
        request.computed = local + external
        request.state = "remote" if external else "running"
        request.recv_left = set(range(RANKS)) if external else set()
        self.step([])

    # --- steps ---

    def step(self, scheduled: list[tuple[Request, int]]) -> None:
        orders = []
        for request, count in scheduled:
            entry = self.entry(request)
            self.ledger.runs(entry)
            if not entry.scheduled:
                proof = self.ledger.prove(entry, request.computed)
                assert proof.handed_over_tokens + proof.local_tokens + proof.recomputed_tokens == request.tokens
                request.proofs += 1
            if self.ledger.has_unsaved(entry, request.computed + count):
                table = (list(range(-(-request.tokens // BLOCK))),)
                orders.append(self.ledger.order_save(entry, request.computed + count, table))
            request.computed += count
        lost = self.ledger.preempted(self.preempted)
        self.preempted = []
        for lease in self.ledger.take_releases():
            self.leases.remove(lease)
        self.carry_out(self.ledger.take_orders(orders, lost))

    def carry_out(self, orders: StepOrders) -> None:
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
                assert load.chunks[-1].end == load.end
                rank.load_ordered(load)
                self.open_loads.append((number, load.request_id, load.start, load.end))
            for save in orders.saves:
                rank.save_ordered(save.request_id)
                self.open_saves.append((number, save))

    def end_saves(self, number: int, name: str) -> None:
        for item in [item for item in self.open_saves if item[0] == number and item[1].request_id == name]:
            self.open_saves.remove(item)
            self.ranks[number].save_ended(name)

    @rule(request=requests, count=st.integers(1, 20))
    def compute(self, request: Request, count: int) -> None:
        if request.state == "running" and request.computed < request.tokens:
            self.step([(request, min(count, request.tokens - request.computed))])

    @rule(request=requests)
    def preempt(self, request: Request) -> None:
        if request.state == "running":
            request.state, request.computed = "waiting", 0
            self.preempted.append(request.name)
            self.step([])

    # --- the ranks work and report ---

    @rule(data=st.data())
    def a_save_ends(self, data: st.DataObject) -> None:
        if self.open_saves:
            number, save = self.open_saves.pop(data.draw(st.integers(0, len(self.open_saves) - 1)))
            self.ranks[number].save_ended(save.request_id)

    @rule(data=st.data(), share=st.sampled_from([0.0, 0.5, 1.0, 1.0]))
    def a_load_ends(self, data: st.DataObject, share: float) -> None:
        if self.open_loads:
            number, name, start, end = self.open_loads.pop(data.draw(st.integers(0, len(self.open_loads) - 1)))
            valid = start + int(share * (end - start))
            reason = Reason.NONE if valid == end else Reason.WRITER_LOST
            self.ranks[number].load_ended(name, LoadOutcome(valid, valid - start, 0.1, reason))

    @rule()
    def report(self) -> None:
        results = [rank.take() for rank in self.ranks]
        report = RankReport(saves_ended={}, loads={})
        for result in results:
            report = report.join(result.report)
        received = self.received(results)
        sent = self.sent(results)
        self.ledger.report(report)
        for name in received:
            self.ledger.loaded(name, now=1.0)
        for name in sent:
            self.ledger.sent(name)
        for lease in self.ledger.take_releases():
            self.leases.remove(lease)

    def received(self, results: list[Results]) -> list[str]:
        """What vLLM makes of loads that ended: the request goes on, or its blocks are freed now."""
        done = []
        for number, result in enumerate(results):
            for name in result.finished_recving:
                request = self.alive[name]  # vLLM asserts this
                request.recv_left.remove(number)
                if result.invalid_block_ids:
                    request.computed = min(request.computed, min(result.invalid_block_ids) * BLOCK)
                if not request.recv_left:
                    done.append(name)
                    assert request.state in ("remote", "aborted-remote")
                    if request.state == "aborted-remote":
                        self.free(request)
                    else:
                        request.state = "running" if request.computed else "waiting"
                        request.computed = min(request.computed, request.tokens - 1)
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
        hold = self.ledger.finish(self.entry(request)).hold
        if request.state == "remote":
            assert not hold, "vLLM frees these blocks itself: twice, if it were told to keep them"
            request.state = "aborted-remote"
        elif hold:
            request.state, request.send_left = "held", set(range(RANKS))
        else:
            self.free(request)
        self.step([])

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
            if request.state in ("waiting", "running", "remote"):
                self.end(request)
        while self.open_saves:
            number, save = self.open_saves.pop()
            self.ranks[number].save_ended(save.request_id)
        while self.open_loads:
            number, name, start, _ = self.open_loads.pop()
            self.ranks[number].load_ended(name, LoadOutcome(start, 0, 0.0, Reason.FAILED_LOAD))
        self.report()
        assert not self.alive
        assert len(self.ledger) == 0
        assert not self.leases
        assert not any(rank.waited_for for rank in self.ranks)


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
