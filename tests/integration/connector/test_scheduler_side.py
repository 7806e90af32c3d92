"""The scheduler's side against a real pool."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from kvrelay.client.blocking import PoolClient
from kvrelay.client.core.operations import StagePart
from kvrelay.connector.config import ConnectorConfig
from kvrelay.connector.core.geometry import KvGeometry
from kvrelay.connector.core.orders import LoadOutcome, RankReport
from kvrelay.connector.core.tables import Blocks, Tables
from kvrelay.connector.counters import Counters
from kvrelay.connector.link import PoolLink
from kvrelay.connector.scheduler_side import SchedulerSide, read_hand_over
from kvrelay.connector.several import SeveralSchedulers
from kvrelay.errors import ConfigError, PoolUnavailableError
from kvrelay.identity.core.chunks import chain_seed, prompt_chunks
from kvrelay.testing.pool import PoolThread
from kvrelay.types import Lost, Proof, Reason
from kvrelay.wire import messages as m
from kvrelay.wire.messages import Spec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kvrelay.client.blocking import PendingCall
    from kvrelay.connector.core.orders import StepOrders

WAIT_S = 20.0
FACTS = {"layers": "1", "weights": "w"}
PROMPT = list(range(100))
DECODE = {"kvrelay": {"handover": "ho-1", "leg": "decode", "prefill": "P0", "worker": "D1"}}
GEOMETRY = KvGeometry.dense(layers=1, kv_heads=1, head_size=1, item_bytes=4)
TABLE = (list(range(50)),)


class Side(SchedulerSide):
    """With what the tests need to see."""

    def ask(self, request_id: str, local: int = 0) -> tuple[int, bool]:
        """Ask as the engine does, step after step, until there is an answer."""
        deadline = time.monotonic() + WAIT_S
        while True:
            count, later = self.num_matched(request_id, local)
            if count is not None:
                return count, later
            assert time.monotonic() < deadline
            self.step((), (), lambda _: TABLE)

    def give(self, request_id: str, local: int) -> None:
        """Give blocks to a request of which nothing is to be loaded, in the step that asks of it and has its answer."""
        assert self.num_matched(request_id, local) == (0, False)
        self.allocated(request_id, TABLE, 0)

    def reason(self, request_id: str) -> Reason:
        """Why less than all of a request is loaded."""
        entry = self._ledger.entry(request_id)
        assert entry is not None
        return entry.reason

    def asked(self, request_id: str) -> PendingCall:
        """The question that is asked for a request."""
        call = self._lookups._lookups[request_id].call
        assert call is not None
        return call

    def new(self, request_id: str = "r", tokens: list[int] | None = None, **more: Any) -> None:
        """A new request."""
        given = PROMPT if tokens is None else tokens
        self.on_new_request(request_id, given, len(given), **{"salt": None, "params": None, **more})


@pytest.fixture
def make_side() -> Iterator[Callable[..., Side]]:
    sides: list[Side] = []

    def make(
        address: str,
        *,
        token: str | None = None,
        start: bool = True,
        role: str = "kv_both",
        sync_loads: bool = False,
        in_flight: int = 1,
        tables: Tables | None = None,
        **config: Any,
    ) -> Side:
        side = Side(
            ConnectorConfig(pool=address, engine="D0", **config),
            facts=FACTS,
            geometry=GEOMETRY,
            tables=tables or Tables.one(32),
            ranks=1,
            saves=role != "kv_consumer",
            loads=role != "kv_producer",
            role=role,
            sync_loads=sync_loads,
            in_flight=in_flight,
            counters=Counters(),
            make_link=lambda greet: PoolLink(address, name="D0", token=token, map_arena=False, greet=greet),
        )
        sides.append(side)
        if start:
            side.start()
        return side

    yield make
    for side in sides:
        side.close()


@pytest.fixture
def client(pool: PoolThread) -> Iterator[PoolClient]:
    with PoolClient.connect(pool.unix, name="other") as other:
        yield other


def store(
    client: PoolClient,
    side: SchedulerSide,
    chunks: int = 2,
    tokens: list[int] = PROMPT,
    salt: str | None = None,
    ticket: str | None = None,
) -> None:
    """Put the first chunks of a prompt into the pool."""
    for chunk in prompt_chunks(chain_seed(side.namespace, salt=salt), tokens, 64)[:chunks]:
        spec = Spec(chunk.key, 8)
        (grant,) = client.announce([spec], group="P", lease_s=60.0, ticket=ticket).grants
        if grant.state == "sealed":
            continue
        parts = [StagePart(grant, spec, 0, 1)]
        client.commit(parts, client.stage(parts))


def settled(done: Callable[[], bool], side: SchedulerSide | None = None) -> None:
    deadline = time.monotonic() + WAIT_S
    while not done():
        assert time.monotonic() < deadline
        if side is not None:
            side.step((), (), lambda _: TABLE)
        threading.Event().wait(0.01)


@contextmanager
def hung(pool: PoolThread) -> Iterator[None]:
    """A pool that does nothing at all, for the length of a ``with`` block."""
    stop, go = threading.Event(), threading.Event()

    def hang() -> None:
        stop.set()
        go.wait(WAIT_S)

    pool._loop.call_soon_threadsafe(hang)
    assert stop.wait(WAIT_S)
    try:
        yield
    finally:
        go.set()


def test_the_engine_registers_with_what_makes_its_namespace(
    pool: PoolThread, client: PoolClient, make_side: Callable[..., Side]
) -> None:
    side = make_side(pool.unix)
    (engine,) = client.engines()
    assert (engine.engine, engine.role, engine.namespace) == ("D0", "kv_both", side.namespace)
    assert engine.facts == FACTS


def test_a_prompt_in_the_pool_is_claimed_leased_and_let_go_when_loaded(
    pool: PoolThread, client: PoolClient, make_side: Callable[..., Side]
) -> None:
    side = make_side(pool.unix)
    store(client, side)
    side.new()
    assert side.ask("r") == (100, True)
    assert client.stat()["leases"] == 1
    side.allocated("r", TABLE, 100)
    (load,) = side.step((), (), lambda _: TABLE).loads
    assert (load.start, load.end, load.tables) == (0, 100, (Blocks((0, 1, 2, 3), 0),))
    side.update(RankReport(saves_ended={}, loads={"r": LoadOutcome(100, 1, 0.1)}), (), ("r",))
    settled(lambda: client.stat()["leases"] == 0)


def test_a_proof_reaches_the_ticket_when_the_request_is_first_scheduled(
    pool: PoolThread, client: PoolClient, make_side: Callable[..., Side]
) -> None:
    side = make_side(pool.unix)
    client.open_ticket("ho-1", 60.0)
    store(client, side, chunks=1)
    store(client, side, ticket="ho-1")
    side.new(params=DECODE)
    side.ask("r")
    side.allocated("r", TABLE, 100)
    side.step((), (), lambda _: TABLE)
    side.update(RankReport(saves_ended={}, loads={"r": LoadOutcome(100, 1, 0.1)}), (), ("r",))
    side.step([("r", 99, 1)], (), lambda _: TABLE)
    side.step([("r", 100, 1)], (), lambda _: TABLE)
    (note,) = client.collect("ho-1", WAIT_S)
    proof = msgspec.json.decode(note, type=Proof)
    assert (proof.handover, proof.worker, proof.engine) == ("ho-1", "D1", "D0")
    assert (proof.handed_over_tokens, proof.earlier_tokens) == (35, 64), "the first chunk was there before"
    assert (proof.recomputed_tokens, proof.reason, proof.reasons, proof.attempt) == (1, "", {}, 1)
    assert client.collect("ho-1", 0.0) == []


@pytest.mark.parametrize(
    ("more", "reason"), [({}, "miss"), ({"skip": Reason.PROMPT_LOGPROBS}, "prompt_logprobs"), ({"salt": "x"}, "miss")]
)
def test_what_is_not_loaded_is_proven_too(
    pool: PoolThread, client: PoolClient, make_side: Callable[..., Side], more: dict[str, Any], reason: str
) -> None:
    side = make_side(pool.unix)
    client.open_ticket("ho-1", 60.0)
    if more:
        store(client, side)
    side.new(params=DECODE, **more)
    assert side.ask("r") == (0, False)
    side.allocated("r", TABLE, 0)
    side.step([("r", 0, 100)], (), lambda _: TABLE)
    proof = msgspec.json.decode(client.collect("ho-1", WAIT_S)[0], type=Proof)
    assert (proof.recomputed_tokens, proof.reason) == (100, reason)


def test_each_requests_proof_is_a_debug_line(
    pool: PoolThread, make_side: Callable[..., Side], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", "kvrelay.connector.scheduler_side")
    side = make_side(pool.unix)
    side.new(params=DECODE)
    side.ask("r")
    side.allocated("r", TABLE, 0)
    side.step([("r", 0, 100)], (), lambda _: TABLE)
    (line,) = [said for said in caplog.messages if "Proof(" in said]
    for part in ("handover='ho-1'", "request_id='r'", "worker='D1'", "prompt_tokens=100", "reasons={'miss': 100}"):
        assert part in line


def test_every_child_of_a_request_proves_for_itself(
    pool: PoolThread, client: PoolClient, make_side: Callable[..., Side]
) -> None:
    side = make_side(pool.unix)
    client.open_ticket("ho-1", 60.0)
    names = ["r-0", "r-1", "r-2"]
    for name in names:
        side.new(name, params=DECODE)
        side.ask(name)
        side.allocated(name, TABLE, 0)
    side.step([(name, 0, 100) for name in names], (), lambda _: TABLE)
    notes: list[bytes] = []
    while len(notes) < 3:
        more = client.collect("ho-1", WAIT_S)
        assert more
        notes += more
    assert {msgspec.json.decode(note, type=Proof).request_id for note in notes} == set(names)


def test_a_salted_prompt_meets_only_its_own_tenant(
    pool: PoolThread, client: PoolClient, make_side: Callable[..., Side]
) -> None:
    side = make_side(pool.unix)
    store(client, side, salt="tenant")
    for name, salt, expected in (("a", "tenant", 100), ("b", "other", 0), ("c", None, 0)):
        side.new(name, salt=salt)
        assert side.ask(name)[0] == expected


def test_an_aborted_request_leaves_no_lease_though_its_answer_is_on_its_way_and_no_step_follows(
    pool: PoolThread, client: PoolClient, make_side: Callable[..., Side]
) -> None:
    side = make_side(pool.unix)
    store(client, side)
    with hung(pool):
        side.new()
        assert side.finished("r") is False
    settled(lambda: client.stat()["hits"] == 2)
    settled(lambda: client.stat()["leases"] == 0)


def test_what_was_found_long_before_the_engine_had_room_is_asked_for_again(
    pool: PoolThread, client: PoolClient, make_side: Callable[..., Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. The lookup is answered. 2. The engine has no room until the lease is old. 3. The pool has less by then."""
    side = make_side(pool.unix)
    store(client, side)
    now = [100.0]
    monkeypatch.setattr(side._lookups, "_clock", lambda: now[0])
    side.new()
    settled(side.asked("r").poll)
    side._outbox.tell(m.Forget(0, side.asked("r").number))
    settled(lambda: client.stat()["leases"] == 0)
    assert client.purge() == 2
    now[0] += 3600.0
    assert side.ask("r") == (0, False)
    assert side.reason("r") is Reason.MISS
    assert client.stat()["leases"] == 0


def test_what_lay_unread_is_not_asked_for_again_while_the_pool_is_slow(
    pool: PoolThread, client: PoolClient, make_side: Callable[..., Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. A lookup is answered. 2. Another's is late. 3. The engine has room for the first's request."""
    side = make_side(pool.unix, lookup_timeout_s=1.0)
    store(client, side)
    now = [100.0]
    monkeypatch.setattr(side._lookups, "_clock", lambda: now[0])
    side.new("waits")
    settled(side.asked("waits").poll)
    now[0] += 3600.0
    with hung(pool):
        side.new("late", tokens=[7] * 100)
        assert side.num_matched("late", 0) == (None, False)
        now[0] += 1.0
        assert side.num_matched("late", 0) == (0, False)
        assert side.num_matched("waits", 0) == (0, False)
    assert side.reason("waits") is Reason.TIMEOUT
    settled(lambda: client.stat()["leases"] == 0)


def test_a_prompt_that_has_no_keys_is_left_to_the_engine(pool: PoolThread, make_side: Callable[..., Side]) -> None:
    side = make_side(pool.unix)
    for name, tokens, salt in (("negative", [1, -1], None), ("surrogate", [1, 2], "\ud800")):
        side.new(name, tokens, salt=salt)
        assert side.ask(name) == (0, False)
        assert side.step([(name, 0, 2)], (), lambda _: TABLE).saves == ()


@pytest.mark.parametrize(
    ("params", "stored", "reason"),
    [(None, 0, "new"), (None, 1, "new"), (DECODE, 0, "miss"), (DECODE, 1, "partial")],
)
def test_only_what_a_hand_over_promised_is_counted_as_missing(
    pool: PoolThread,
    client: PoolClient,
    make_side: Callable[..., Side],
    params: dict[str, Any] | None,
    stored: int,
    reason: str,
) -> None:
    side = make_side(pool.unix)
    store(client, side, chunks=stored)
    side.new(params=params)
    external, _ = side.ask("r")
    side.allocated("r", TABLE, external)
    side.step((), (), lambda _: TABLE)
    side.update(RankReport(saves_ended={}, loads={"r": LoadOutcome(external, 1, 0.1)}), (), ("r",))
    side.step([("r", external, 100 - external)], (), lambda _: TABLE)
    counted = side._counters.take()
    assert {name: value for name, value in counted.items() if name.startswith("recomputed_")} == {
        f"recomputed_{reason}": 100 - external
    }


def test_the_forward_pass_is_no_part_of_what_a_synchronous_load_was_waited_for(
    pool: PoolThread, client: PoolClient, make_side: Callable[..., Side]
) -> None:
    """The report of such a load comes with the end of its step."""
    side = make_side(pool.unix, sync_loads=True)
    store(client, side, chunks=2)
    side.new()
    external, later = side.ask("r")
    assert (external, later) == (99, False)
    side.allocated("r", TABLE, external)
    side.step([("r", external, 1)], (), lambda _: TABLE)
    side.update(RankReport(saves_ended={}, loads={"r": LoadOutcome(99, 1, 0.1, took_s=1e-9)}), (), ())
    assert side._counters.take()["load_wait_seconds"] == 1e-9


def test_what_is_saved_is_ordered_in_the_step_that_computes_it_under_the_ticket(
    pool: PoolThread, make_side: Callable[..., Side]
) -> None:
    side = make_side(pool.unix)
    side.new(params={"kvrelay": {"handover": "ho-1", "leg": "prefill", "worker": "P0"}})
    side.ask("r")
    side.allocated("r", TABLE, 0)
    (save,) = side.step([("r", 0, 70)], (), lambda _: TABLE).saves
    assert ([(c.start, c.end) for c in save.chunks], save.ticket) == ([(0, 64)], "ho-1")
    (save,) = side.step([("r", 70, 30)], (), lambda _: TABLE).saves
    assert [(c.start, c.end) for c in save.chunks] == [(64, 100)]
    assert side.finished("r") is True
    assert side.step((), (), lambda _: TABLE).held == ("r",)
    side.update(RankReport(saves_ended={"r": 2}, loads={}), ("r",), ())


def test_what_another_connector_loads_in_the_step_is_saved_when_it_is_known_to_be_there(
    pool: PoolThread, make_side: Callable[..., Side]
) -> None:
    """Inside a `MultiConnector`: 1. Another claims 64 tokens. 2. They fail to come. 3. All are computed."""
    side = make_side(pool.unix)
    side.new()
    side.ask("r")
    side.allocated("r", TABLE, 0)
    assert side.step([("r", 64, 30)], (), lambda _: TABLE).saves == ()
    assert side.step([("r", 0, 40)], (), lambda _: TABLE).saves == ()
    (save,) = side.step([("r", 40, 60)], (), lambda _: TABLE).saves
    assert [(c.start, c.end) for c in save.chunks] == [(0, 64), (64, 100)]


def test_what_another_connector_loads_is_not_saved_while_its_step_is_in_flight(
    pool: PoolThread, make_side: Callable[..., Side]
) -> None:
    """1. Another claims 64 tokens. 2. Before that step has ended, a second request finds them in the prefix cache."""
    side = make_side(pool.unix, in_flight=2)
    for name, local in (("loads", 0), ("shares", 64)):
        side.new(name)
        side.ask(name, local)
    side.give("loads", 0)
    assert side.step([("loads", 64, 30)], (), lambda _: TABLE).saves == ()
    side.give("shares", 64)
    assert side.step([("loads", 94, 6), ("shares", 64, 30)], (), lambda _: TABLE).saves == ()
    saves = side.step([("loads", 100, 1), ("shares", 94, 6)], (), lambda _: TABLE).saves
    assert [[(c.start, c.end) for c in save.chunks] for save in saves] == [[(0, 64), (64, 100)]] * 2


def test_what_another_connector_loads_is_not_saved_into_the_pools_of_others_either(
    pool: PoolThread, make_side: Callable[..., Side]
) -> None:
    """1. Another claims 64 tokens of P0's. 2. One of P1's finds them in the prefix cache, in the same step."""
    sides = {name: make_side(pool.unix) for name in ("P0", "P1")}
    several = SeveralSchedulers(sides)
    for name, side in sides.items():
        leg = {"handover": name, "leg": "decode", "prefill": name, "worker": "D1"}
        several.on_new_request(name, PROMPT, 100, params={"kvrelay": leg}, salt=None)
        side.ask(name, 0 if name == "P0" else 64)
    for name, side in sides.items():
        assert side.num_matched(name, 0 if name == "P0" else 64) == (0, False)
        several.allocated(name, TABLE, 0)
    step = [("P0", 64, 36), ("P1", 64, 36)]
    assert [part.saves for part in several.step(step, (), lambda _: TABLE).parts] == [(), ()]
    after = several.step([("P0", 100, 1), ("P1", 100, 1)], (), lambda _: TABLE)
    assert [len(part.saves) for part in after.parts] == [1, 1]


@pytest.mark.parametrize("save_decode", [True, False])
@pytest.mark.parametrize("worked", [True, False])
def test_what_was_computed_from_another_connectors_load_is_saved_at_the_requests_end(
    pool: PoolThread, make_side: Callable[..., Side], worked: bool, save_decode: bool
) -> None:
    """1. Another claims 64 tokens; the step computes the rest of two prompts. 2. Both end with their first token."""
    side = make_side(pool.unix, save_decode=save_decode)
    tokens = list(PROMPT)
    cached = {"loads": 0, "shares": 64}
    for name, local in cached.items():
        side.new(name, tokens)
        side.ask(name, local)
    for name, local in cached.items():
        side.give(name, local)
    assert side.step([("loads", 64, 36), ("shares", 64, 36)], (), lambda _: TABLE).saves == ()
    tokens.append(7)
    computed = 100 if worked else 40  # the engine says how far it got, after what failed
    assert side.finished("loads", computed, TABLE) is worked
    assert side.finished("shares", 100, TABLE) is True
    late = side.step((), (), lambda _: TABLE).saves
    assert [save.request_id for save in late] == (["loads", "shares"] if worked else ["shares"])
    assert all([(c.start, c.end) for c in save.chunks] == [(0, 64), (64, 100)] for save in late)
    assert all(save.complete for save in late)
    ended = {save.request_id: save.number and 1 for save in late}
    side.update(RankReport(saves_ended=ended, loads={}), set(ended), ())


def test_an_abort_while_another_connector_loads_saves_nothing(pool: PoolThread, make_side: Callable[..., Side]) -> None:
    side = make_side(pool.unix)
    side.new()
    side.ask("r")
    side.allocated("r", TABLE, 0)
    side.step([("r", 64, 36)], (), lambda _: TABLE)
    assert side.finished("r", 100, TABLE) is False
    assert side.step((), (), lambda _: TABLE).saves == ()


def test_an_abort_while_another_connector_loads_for_a_request_that_comes_back_saves_nothing(
    pool: PoolThread, make_side: Callable[..., Side]
) -> None:
    """1. A request generates. 2. It is preempted. 3. Another loads its beginning. 4. It is aborted in that step."""
    side = make_side(pool.unix)
    tokens = list(PROMPT)
    side.new("r", tokens)
    side.ask("r")
    side.allocated("r", TABLE, 0)
    (save,) = side.step([("r", 0, 100)], (), lambda _: TABLE).saves
    tokens.append(7)
    side.update(RankReport(saves_ended={"r": 1}, loads={}, orders_ended={save.number: 1}), (), ())
    side.step((), ("r",), lambda _: TABLE)
    side.ask("r")
    side.allocated("r", TABLE, 0)
    assert side.step([("r", 64, 37)], (), lambda _: TABLE).saves == ()
    assert side.finished("r", 101, TABLE) is False
    assert side.step((), (), lambda _: TABLE).saves == ()


def test_a_prompt_that_is_not_token_ids_alone_is_left_alone(pool: PoolThread, make_side: Callable[..., Side]) -> None:
    side = make_side(pool.unix)
    side.on_new_request("r", None, 100, salt=None, params=None)
    assert side.ask("r") == (0, False)
    assert side.step([("r", 0, 100)], (), lambda _: TABLE).saves == ()


def test_a_request_of_before_the_connector_is_not_known(pool: PoolThread, make_side: Callable[..., Side]) -> None:
    side = make_side(pool.unix)
    assert side.num_matched("unknown", 0) == (0, False)
    assert side.finished("unknown") is False


class TestPoolTrouble:
    def test_a_pool_that_is_down_at_the_start_delays_nothing(
        self, tmp_path: Path, make_side: Callable[..., Side]
    ) -> None:
        side = make_side(f"unix:{tmp_path / 'pool.sock'}")
        side.new(params=DECODE)
        assert side.num_matched("r", 0) == (0, False)
        side.allocated("r", TABLE, 0)
        assert side.step([("r", 0, 100)], (), lambda _: TABLE).loads == ()
        assert side._counters.take()["recomputed_pool_down"] == 100

    def test_a_pool_that_comes_later_is_found_and_registered_with(
        self, tmp_path: Path, make_side: Callable[..., Side]
    ) -> None:
        side = make_side(f"unix:{tmp_path / 'pool.sock'}")
        with PoolThread(tmp_path) as pool, PoolClient.connect(pool.unix, name="other") as client:
            settled(lambda: bool(client.engines()))
            store(client, side)
            side.new()
            assert side.ask("r")[0] == 100
            side.close()

    def test_a_pool_that_went_away_is_a_miss_and_its_successor_is_used(
        self, tmp_path: Path, make_side: Callable[..., Side]
    ) -> None:
        with PoolThread(tmp_path) as pool:
            side = make_side(pool.unix)
        side.new("down")
        assert side.ask("down") == (0, False)
        with PoolThread(tmp_path) as pool, PoolClient.connect(pool.unix, name="other") as client:
            settled(lambda: bool(client.engines()))
            store(client, side)
            side.new("up")
            assert side.ask("up")[0] == 100
            side.close()

    def test_a_slow_pool_costs_one_request_its_time_and_nobody_else_anything(
        self, pool: PoolThread, client: PoolClient, make_side: Callable[..., Side]
    ) -> None:
        """1. A request holds a lease. 2. The pool stops answering. 3. A lookup times out. 4. The next is not begun.

        5. The pool answers again. 6. No lease is left of the lookup that timed out. 7. The next lookup is answered.
        """
        side = make_side(pool.unix, lookup_timeout_s=2.0)
        store(client, side)
        side.new("before")
        assert side.ask("before") == (100, True)
        with hung(pool):
            side.new("first", params=DECODE)
            assert side.ask("first") == (0, False)
            side.new("second", params=DECODE)
            assert side.num_matched("second", 0) == (0, False)
            side.allocated("second", TABLE, 0)
            side.step([("second", 0, 100)], (), lambda _: TABLE)
            counted = side._counters.take()
            assert (counted["lookups_timed_out"], counted["lookups_skipped"]) == (1, 1)
            assert counted["recomputed_timeout"] == 100
        settled(lambda: client.stat()["hits"] == 4)
        settled(lambda: client.stat()["leases"] == 1)
        side.new("third")
        assert side.ask("third") == (100, True)
        side.allocated("before", TABLE, 100)
        assert len(side.step((), (), lambda _: TABLE).loads) == 1, "its connection and its claim are still good"
        assert len(client.engines()) == 1

    def test_a_pool_that_stays_slow_costs_one_probe_after_ever_longer_pauses(
        self,
        pool: PoolThread,
        make_side: Callable[..., Side],
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """1. A lookup is answered too late. 2. So is the next, the probe. 3. Others are not begun for a while.

        4. After the pause a probe is aborted: the next request is the probe. 5. It is answered in time.
        """
        side = make_side(pool.unix, lookup_timeout_s=1.0)
        now = [100.0]
        monkeypatch.setattr(side._lookups, "_clock", lambda: now[0])

        def answered() -> None:
            settled(lambda: all(call.poll() for call in side._lookups._overdue))

        for name in ("first", "probe"):
            with hung(pool):
                side.new(name)
                assert side.num_matched(name, 0) == (None, False)
                now[0] += 1.0
                assert side.num_matched(name, 0) == (0, False)
            answered()
        side.new("rests")
        assert side.num_matched("rests", 0) == (0, False)
        assert side.reason("rests") is Reason.TIMEOUT
        now[0] += 1.0
        with hung(pool):
            side.new("aborted")
            side.finished("aborted")
        side.new("well")
        assert side.ask("well") == (0, False)
        assert side.reason("well") is Reason.MISS
        counted = side._counters.take()
        assert (counted["lookups_timed_out"], counted["lookups_skipped"]) == (2, 1)
        assert (counted["circuit_opened"], counted["circuit_closed"]) == (1, 1)
        assert sum("the pool is slow" in record.message for record in caplog.records) == 1

    @pytest.mark.parametrize("answered", [True, False])
    def test_a_probe_tells_of_the_pool_though_the_engine_has_no_room_for_its_request(
        self, pool: PoolThread, make_side: Callable[..., Side], monkeypatch: pytest.MonkeyPatch, answered: bool
    ) -> None:
        """1. A lookup is late. 2. The probe's request waits in the engine's queue. 3. Others arrive."""
        side = make_side(pool.unix, lookup_timeout_s=1.0)
        now = [100.0]
        monkeypatch.setattr(side._lookups, "_clock", lambda: now[0])
        with hung(pool):
            side.new("late")
            assert side.num_matched("late", 0) == (None, False)
            now[0] += 1.0
            assert side.num_matched("late", 0) == (0, False)
        settled(lambda: all(call.poll() for call in side._lookups._overdue))
        with hung(pool):
            side.new("probe")
            if not answered:
                now[0] += 1.0
                side.new("meanwhile")
                assert side.reason("meanwhile") is Reason.TIMEOUT
        settled(side.asked("probe").poll)
        now[0] += 0.5
        side.new("next")
        assert side.ask("next") == (0, False)
        assert side.reason("next") is (Reason.MISS if answered else Reason.TIMEOUT)
        assert side._counters.take()["circuit_opened"] == 1
        now[0] += 1.0
        side.new("after")
        assert side.ask("after") == (0, False)
        assert side.reason("after") is Reason.MISS
        assert side.ask("probe") == (0, False)

    def test_a_preempted_request_does_not_ask_a_slow_pool_in_every_step(
        self, pool: PoolThread, make_side: Callable[..., Side]
    ) -> None:
        side = make_side(pool.unix, lookup_timeout_s=2.0)
        side.new("preempted")
        side.ask("preempted")
        side.allocated("preempted", TABLE, 0)
        side.step([("preempted", 0, 50)], (), lambda _: TABLE)
        side.step((), ("preempted",), lambda _: TABLE)
        with hung(pool):
            side.new("slow")
            side.ask("slow")
            for _ in range(3):
                assert side.num_matched("preempted", 0) == (0, False)
            assert side._counters.take()["lookups_skipped"] == 1

    def test_a_pool_that_answers_nothing_for_long_is_dropped_and_found_again(
        self, pool: PoolThread, make_side: Callable[..., Side], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        side = make_side(pool.unix, lookup_timeout_s=2.0)
        first = side._link.client()
        with hung(pool), monkeypatch.context() as patched:
            patched.setattr("kvrelay.connector.outbox.SILENCE_S", 0.1)
            side.new("first")
            assert side.ask("first") == (0, False)
            settled(lambda: side._link.client() is None, side)
            side.new("second")
            assert side.num_matched("second", 0) == (0, False)
            assert side.reason("second") is Reason.POOL_DOWN
        settled(lambda: side._link.client() is not None)
        assert side._link.client() is not first
        side.new("third")
        assert side.ask("third") == (0, False)
        assert side.reason("third") is Reason.MISS

    def test_a_pool_is_not_silent_while_nobody_asks_it_anything(
        self, pool: PoolThread, make_side: Callable[..., Side], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """1. A lookup is answered. 2. The engine is idle for longer than a pool may be silent. 3. It goes on."""
        now = [100.0]
        side = make_side(pool.unix)
        client = side._link.client()
        monkeypatch.setattr(side._outbox, "_clock", lambda: now[0])
        side.new("first")
        settled(side._outbox._sent[0].call.poll)
        now[0] += 3600.0
        side.new("second")
        assert side.ask("second") == (0, False)
        assert side._link.client() is client

    def test_a_proof_that_finds_no_connection_is_posted_when_there_is_one_again(
        self, pool: PoolThread, client: PoolClient, make_side: Callable[..., Side]
    ) -> None:
        """1. The engine's connection breaks. 2. A request is scheduled. 3. The engine connects anew. 4. It comes.

        Nor is a proof whose ticket has ended anybody's trouble.
        """
        side = make_side(pool.unix)
        client.open_ticket("ho-1", 60.0)
        connection = side._link.client()
        assert connection is not None
        connection._stream.sock.shutdown(socket.SHUT_RDWR)
        for name, ticket in (("late", "gone"), ("r", "ho-1")):
            side.new(name, params={"kvrelay": {**DECODE["kvrelay"], "handover": ticket}})
            side.allocated(name, TABLE, 0)
            side.step([(name, 0, 100)], (), lambda _: TABLE)
        settled(lambda: side._link.client() is not None)
        side.step((), (), lambda _: TABLE)
        (note,) = client.collect("ho-1", WAIT_S)
        assert msgspec.json.decode(note, type=Proof).request_id == "r"
        settled(lambda: not side._outbox._sent, side)

    def test_only_so_many_proofs_wait_for_a_connection(self, tmp_path: Path, make_side: Callable[..., Side]) -> None:
        side = make_side(f"unix:{tmp_path / 'pool.sock'}")
        for at in range(100):
            side.new(f"r{at}", params=DECODE)
            side.allocated(f"r{at}", TABLE, 0)
            side.step([(f"r{at}", 0, 100)], (), lambda _: TABLE)
        waiting = [msgspec.json.decode(post.note, type=Proof).request_id for post in side._outbox._posts]
        assert waiting == [f"r{at}" for at in range(36, 100)]

    def test_a_wrong_token_is_refused_at_the_start(self, tmp_path: Path, make_side: Callable[..., Side]) -> None:
        with PoolThread(tmp_path, token="right") as pool:
            for token in (None, "wrong"):
                side = make_side(pool.unix, token=token, start=False)
                with pytest.raises(ConfigError, match=r"refuses this engine: .*give the token this pool was started"):
                    side.start()
            make_side(pool.unix, token="right").close()

    def test_something_that_is_no_pool_only_costs_the_connection(
        self, tmp_path: Path, make_side: Callable[..., Side]
    ) -> None:
        path = tmp_path / "pool.sock"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            listener.listen()

            def garbage() -> None:
                peer, _ = listener.accept()
                with peer:
                    peer.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

            thread = threading.Thread(target=garbage)
            thread.start()
            side = make_side(f"unix:{path}")
            thread.join(WAIT_S)
            side.new()
            assert side.ask("r") == (0, False)


def test_after_a_reset_the_engine_has_a_namespace_of_its_own(
    pool: PoolThread, client: PoolClient, make_side: Callable[..., Side]
) -> None:
    side = make_side(pool.unix)
    store(client, side)
    before = side.namespace
    side.new("old")
    side.ask("old")
    assert side.reset() is True
    assert side.namespace != before
    settled(lambda: client.engines()[0].namespace == side.namespace)
    assert side.ask("old") == (0, False)
    side.new("new")
    assert side.ask("new") == (0, False)
    assert side.step([("old", 0, 100)], (), lambda _: TABLE).saves == ()


def test_a_reset_is_refused_while_a_load_is_under_way_and_then_succeeds(
    pool: PoolThread, client: PoolClient, make_side: Callable[..., Side]
) -> None:
    side = make_side(pool.unix)
    store(client, side)
    side.new()
    side.allocated("r", TABLE, side.ask("r")[0])
    for _ in range(2):
        assert side.reset() is False
    side.update(RankReport(saves_ended={}, loads={"r": LoadOutcome(100, 1, 0.1)}), (), ("r",))
    assert side.reset() is True
    side.step([("r", 99, 1)], (), lambda _: TABLE)
    assert side.finished("r") is False
    settled(lambda: client.stat()["leases"] == 0, side)


@pytest.mark.parametrize("save_decode", [True, False])
def test_what_is_generated_is_saved_where_that_is_asked_for(
    pool: PoolThread, make_side: Callable[..., Side], save_decode: bool
) -> None:
    side = make_side(pool.unix, save_decode=save_decode)
    tokens = list(range(64))
    side.on_new_request("r", tokens, 64, salt=None, params=None)
    side.ask("r")
    side.allocated("r", TABLE, 0)
    assert len(side.step([("r", 0, 64)], (), lambda _: TABLE).saves) == 1
    tokens += range(64, 128)
    saves = side.step([("r", 64, 64)], (), lambda _: TABLE).saves
    assert [(c.start, c.end) for save in saves for c in save.chunks] == [(64, 128)] * save_decode


@pytest.mark.parametrize(
    "params",
    [
        None,
        {},
        {"kvrelay": None},
        {"kvrelay": "ho-1"},
        {"kvrelay": {"leg": "decode", "worker": "D"}},
        {"kvrelay": {"handover": 7, "leg": "decode", "worker": "D"}},
        {"kvrelay": {"handover": "", "leg": "decode", "worker": "D"}},
        {"kvrelay": {"handover": "x" * 300, "leg": "decode", "worker": "D"}},
        {"kvrelay": {"handover": "ho-1", "leg": "other", "worker": "D"}},
        {"do_remote_prefill": True},
    ],
)
def test_parameters_that_make_no_sense_are_no_hand_over(params: dict[str, Any] | None) -> None:
    assert read_hand_over(params) is None


def promised(policy: str, attempt: int = 1, prefill: str = "P0") -> dict[str, Any]:
    """What the router says of a decode leg that is not to recompute silently."""
    return {"kvrelay": {**DECODE["kvrelay"], "prefill": prefill, "policy": policy, "attempt": attempt}}


class TestPromises:
    @pytest.fixture
    def side(self, pool: PoolThread, client: PoolClient, make_side: Callable[..., Side]) -> Side:
        client.open_ticket("ho-1", 60.0)
        return make_side(pool.unix)

    def staged(self, side: Side, outcome: LoadOutcome, number: int = 1) -> None:
        """The workers have ended staging."""
        side.update(RankReport({}, {}, stages={number: outcome}), (), ())

    def until_lost(self, client: PoolClient, side: Side) -> Lost:
        """Ask and step until the engine, which has heard from the pool by then, tells of a loss."""
        notes: list[bytes] = []

        def told(_: StepOrders) -> bool:
            notes.extend(client.collect("ho-1", 0.0))
            return bool(notes)

        self.until(side, told)
        (note,) = notes
        return msgspec.json.decode(note, type=Lost)

    def lost(self, client: PoolClient) -> Lost:
        (note,) = client.collect("ho-1", WAIT_S)
        return msgspec.json.decode(note, type=Lost)

    def until(self, side: Side, ordered: Callable[[StepOrders], object]) -> StepOrders:
        """Ask and step as the engine does while it may not go on."""
        deadline = time.monotonic() + WAIT_S
        while True:
            assert side.num_matched("r", 0) == (None, False)
            orders = side.step((), (), lambda _: TABLE)
            if ordered(orders):
                return orders
            assert time.monotonic() < deadline

    def test_what_is_promised_is_staged_before_it_is_claimed_and_loaded_from_there(
        self, client: PoolClient, side: Side
    ) -> None:
        """Even if the pool goes away between the two."""
        store(client, side, ticket="ho-1")
        side.new(params=promised("fail"))
        (order,) = self.until(side, lambda orders: orders.stages).stages
        assert (order.start, order.end, len(order.chunks), order.tables) == (0, 100, 2, ())
        assert side.num_matched("r", 0) == (None, False)
        self.staged(side, LoadOutcome(100, 1, 0.1))
        side._link.drop(PoolUnavailableError("gone"))
        assert side.num_matched("r", 0) == (100, True)
        side.allocated("r", TABLE, 100)
        (load,) = side.step((), (), lambda _: TABLE).loads
        assert (load.staged, load.start, load.end) == (order.staged, 0, 100)
        assert not len(side._promises)

    @pytest.mark.parametrize("policy", ["reprefill", "fail", "strict"])
    def test_what_the_pool_has_not_is_told_and_nothing_is_computed_until_the_patience_ends(
        self, client: PoolClient, side: Side, policy: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        now = [100.0]
        monkeypatch.setattr(side, "_clock", lambda: now[0])
        store(client, side, chunks=1)
        side.new(params=promised(policy, attempt=3))
        lost = self.until_lost(client, side)
        assert (lost.lost, lost.attempt, lost.prompt_tokens, lost.missing_tokens) == ("partial", 3, 100, 36)
        assert side.num_matched("r", 0) == (None, False)
        assert side._counters.take()["kv_lost_partial"] == 1
        now[0] += 5.0
        assert side.num_matched("r", 0) == (64, True), "what there is is taken then"
        assert client.collect("ho-1", 0.0) == []

    def test_what_cannot_be_staged_is_lost_and_what_there_is_no_memory_for_is_claimed_without(
        self, client: PoolClient, side: Side
    ) -> None:
        store(client, side)
        for outcome in (LoadOutcome(0, 0, 0.0, Reason.CORRUPT), LoadOutcome(0, 0, 0.0, Reason.STAGING_FULL)):
            side.new(params=promised("fail"))
            (order,) = self.until(side, lambda orders: orders.stages).stages
            self.staged(side, outcome, order.staged)
            if outcome.reason is Reason.CORRUPT:
                assert side.num_matched("r", 0) == (None, False)
                assert self.lost(client).lost == "corrupt"
            else:
                assert side.num_matched("r", 0) == (100, True)
            assert side.step((), (), lambda _: TABLE).unstaged == (order.staged,)
            side.finished("r")

    def test_without_anybody_to_tell_it_is_computed_at_once(self, side: Side) -> None:
        side.new("other")
        side.ask("other")
        side._link.close()
        side.new(params=promised("strict"))
        assert side.ask("r") == (0, False)
        assert side.reason("r") is Reason.POOL_DOWN

    def test_an_abort_while_it_is_staged_leaves_nothing(self, client: PoolClient, side: Side) -> None:
        store(client, side)
        side.new(params=promised("fail"))
        self.until(side, lambda orders: orders.stages)
        side.finished("r")
        assert side.step((), (), lambda _: TABLE).unstaged == (1,)
        self.staged(side, LoadOutcome(100, 1, 0.1))
        settled(lambda: client.stat()["leases"] == 0)
        assert not len(side._promises)

    def test_what_was_staged_for_an_earlier_request_of_the_name_is_not_taken_for_the_new_ones(
        self, client: PoolClient, side: Side
    ) -> None:
        """1. Staging of a request is ended, but not told yet. 2. It is aborted. 3. Another gets its name."""
        store(client, side)
        side.new(params=promised("fail"))
        self.until(side, lambda orders: orders.stages)
        side.finished("r")
        side.new(params=promised("fail"))
        (order,) = self.until(side, lambda orders: orders.stages).stages
        self.staged(side, LoadOutcome(100, 1, 0.1), number=1)
        assert side.num_matched("r", 0) == (None, False)
        self.staged(side, LoadOutcome(100, 1, 0.1), number=order.staged)
        assert side.num_matched("r", 0) == (100, True)

    def test_a_cache_of_its_own_that_shrinks_meanwhile_is_made_up_for(self, client: PoolClient, side: Side) -> None:
        store(client, side)
        side.new(params=promised("fail"))
        while side.num_matched("r", 64) == (None, False):
            (*stages,) = side.step((), (), lambda _: TABLE).stages
            if stages:
                assert (stages[0].start, len(stages[0].chunks)) == (64, 1)
                self.staged(side, LoadOutcome(100, 1, 0.1))
        assert side.num_matched("r", 64) == (36, True)
        assert side.num_matched("r", 32) == (None, False)
        orders = side.step((), (), lambda _: TABLE)
        assert (orders.unstaged, orders.stages[0].start) == ((1,), 32)

    def test_what_the_engine_has_itself_needs_no_pool(self, side: Side) -> None:
        side.new(params=promised("strict"))
        while (answer := side.num_matched("r", 99)) == (None, False):
            side.step((), (), lambda _: TABLE)
        assert answer == (0, False)

    @pytest.mark.parametrize(("policy", "prefill"), [("recompute", "P0"), ("fail", ""), ("nonsense", "P0")])
    def test_only_what_was_promised_is_waited_for(self, side: Side, policy: str, prefill: str) -> None:
        side.new(params=promised(policy, prefill=prefill))
        assert side.ask("r") == (0, False)
        assert not len(side._promises)

    def test_the_engines_own_policy_counts_where_the_router_says_nothing(
        self, pool: PoolThread, client: PoolClient, make_side: Callable[..., Side]
    ) -> None:
        client.open_ticket("ho-1", 60.0)
        side = make_side(pool.unix, on_lost_kv="strict", lost_kv_wait_s=0.0)
        side.new(params=DECODE)
        assert side.ask("r") == (0, False)
        assert self.lost(client).lost == "miss"
