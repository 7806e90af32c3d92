"""Which loads are synchronous, and what becomes of one that fails."""

from __future__ import annotations

import pytest

from kvrelay.connector.core.ledger import Ledger
from kvrelay.connector.core.orders import LoadKind, LoadOrder, LoadOutcome, Placed, RankReport
from kvrelay.connector.core.rank import RankLedger
from kvrelay.connector.core.requests import Entry, HandOver, Phase
from kvrelay.connector.core.sync_loads import REST_CLAIMS, Ended, SyncLoads
from kvrelay.connector.core.tables import Blocks, Table, Tables
from kvrelay.identity.core.chunks import Chunk
from kvrelay.types import Reason

BLOCK, CHUNK = 32, 64
TABLE = list(range(100, 200))
TOKEN_BYTES = 10


def ledger_of(sync_bytes: int = 10_000, idle_bytes: int = 0) -> Ledger:
    return Ledger(
        engine="D0", tables=Tables.one(BLOCK), ranks=2, saves=True, loads=True, sync_bytes=sync_bytes,
        sync_idle_bytes=idle_bytes,
    )  # fmt: skip


def places(count: int) -> Placed:
    """Of chunks with two segments each."""
    return Placed("pool", bytes(range(8 * count)), bytes(range(16 * count)))


def matched(
    ledger: Ledger,
    tokens: int,
    *,
    name: str = "r",
    sealed: int | None = None,
    leg: str = "decode",
    placed: Placed | None = None,
    far: bool = False,
) -> Entry:
    chunks = tuple(Chunk(bytes([at]), at, min(at + CHUNK, tokens)) for at in range(0, tokens, CHUNK))
    entry = ledger.add(name, tokens, chunks, HandOver("ho-1", leg, "D1"))
    ledger.look(entry)
    found = len(chunks) if sealed is None else sealed
    size = tokens * TOKEN_BYTES
    ledger.match(entry, len(chunks), 7, 10.0, range(len(chunks)), sealed=found, size_bytes=size, placed=placed, far=far)
    return entry


def claimed(ledger: Ledger, tokens: int, *, name: str = "r", local: int = 0) -> Entry:
    entry = matched(ledger, tokens, name=name)
    ledger.allocated(entry, ledger.claimable(entry, local), (TABLE,), now=1.0)
    return entry


def report(valid_end: int, reason: Reason = Reason.NONE, name: str = "r") -> RankReport:
    return RankReport({}, {name: LoadOutcome(valid_end, 1, 0.1, reason)})


class TestClaiming:
    @pytest.mark.parametrize("tokens", [64, 65, 100, 128])
    def test_the_last_token_is_left_to_the_step(self, tokens: int) -> None:
        ledger = ledger_of()
        entry = matched(ledger, tokens)
        assert (ledger.claimable(entry, 0), entry.near) == (tokens - 1, True)

    def test_a_chunk_of_the_last_token_alone_is_not_asked_for(self) -> None:
        ledger = ledger_of()
        claimed(ledger, 129, local=32)
        (order,) = ledger.take_orders((), ()).loads
        assert (order.kind, order.start, order.end) == (LoadKind.NOW, 32, 128)
        assert [chunk.end for chunk in order.chunks] == [64, 128]
        assert order.tables == (Blocks((101, 102, 103), 1),)

    def test_what_is_still_being_written_is_loaded_asynchronously(self) -> None:
        ledger = ledger_of()
        entry = matched(ledger, 128, sealed=1)
        assert (ledger.claimable(entry, 0), entry.near) == (128, False)

    def test_what_is_not_small_is_loaded_asynchronously_and_what_the_engine_has_does_not_count(self) -> None:
        ledger = ledger_of(sync_bytes=320)
        entry = matched(ledger, 128)
        assert (ledger.claimable(entry, 64), entry.near) == (64, False)
        assert (ledger.claimable(entry, 96), entry.near) == (31, True)

    def test_one_step_takes_no_more_than_the_budget_and_the_next_has_it_again(self) -> None:
        ledger = ledger_of(sync_bytes=1_500)
        claimed(ledger, 128, name="a")
        second = matched(ledger, 128, name="b")
        assert (ledger.claimable(second, 0), second.near) == (128, False)
        ledger.take_orders((), ())
        assert (ledger.claimable(second, 0), second.near) == (127, True)

    def test_an_engine_that_runs_nothing_else_takes_more_at_once_if_it_is_only_to_be_copied(self) -> None:
        ledger = ledger_of(sync_bytes=320, idle_bytes=1_280)
        asked = matched(ledger, 128, name="asked")
        assert (ledger.claimable(asked, 0), asked.near) == (128, False)
        entry = matched(ledger, 128, name="placed", placed=places(2))
        assert (ledger.claimable(entry, 0), entry.near) == (127, True)
        other = ledger.add("other", 10, (), None)
        assert (ledger.claimable(entry, 0), entry.near) == (127, True)
        ledger.settle(other, Reason.MISS)
        ledger.prove(other, 0)
        assert (ledger.claimable(entry, 0), entry.near) == (128, False)
        ledger.finish(other)
        assert (ledger.claimable(entry, 0), entry.near) == (127, True)

    def test_requests_of_another_pool_are_not_held_up_either(self) -> None:
        ledger = ledger_of(sync_bytes=320, idle_bytes=1_280)
        entry = matched(ledger, 128, placed=places(2))
        ledger.elsewhere = lambda: True
        assert (ledger.claimable(entry, 0), entry.near) == (128, False)
        ledger.elsewhere = lambda: False
        assert (ledger.claimable(entry, 0), entry.near) == (127, True)

    def test_what_comes_over_a_network_holds_up_nobody_but_the_request_itself(self) -> None:
        ledger = ledger_of(sync_bytes=1_280, idle_bytes=10_000)
        entry = matched(ledger, 128, far=True)
        assert (ledger.claimable(entry, 0), entry.near) == (127, True)
        large = matched(ledger, 200, name="large", far=True)
        assert (ledger.claimable(large, 0), large.near) == (200, False)
        ledger.prove(ledger.add("other", 10, (), None), 0)
        assert (ledger.claimable(entry, 0), entry.near) == (128, False)

    def test_what_idle_engines_may_load_is_no_way_around_loading_nothing_so(self) -> None:
        ledger = ledger_of(sync_bytes=0, idle_bytes=10_000)
        entry = matched(ledger, 128, placed=places(2))
        assert (ledger.claimable(entry, 0), entry.near) == (128, False)

    def test_a_rank_is_told_where_the_chunks_are_that_it_loads(self) -> None:
        ledger = ledger_of()
        entry = matched(ledger, 193, placed=places(4))
        ledger.allocated(entry, ledger.claimable(entry, 64), (TABLE,), now=1.0)
        (order,) = ledger.take_orders((), ()).loads
        assert [chunk.start for chunk in order.chunks] == [64, 128]
        assert order.placed == Placed("pool", bytes(range(8, 24)), bytes(range(16, 48)))

    def test_a_request_that_may_share_what_is_about_to_be_loaded_waits_for_the_next_step(self) -> None:
        """vLLM puts the blocks into its prefix cache when it gives them out: they hold nothing yet."""
        ledger = ledger_of()
        claimed(ledger, 128, local=64)
        assert not ledger.must_wait(64)
        assert ledger.must_wait(96)
        ledger.take_orders((), ())
        assert not ledger.must_wait(96)

    def test_a_prefill_leg_which_may_end_with_the_step_is_loaded_asynchronously(self) -> None:
        ledger = ledger_of()
        entry = matched(ledger, 128, leg="prefill")
        assert (ledger.claimable(entry, 0), entry.near) == (128, False)

    def test_an_engine_that_takes_no_reports_by_block_is_refused(self) -> None:
        windowed = Tables((Table(BLOCK, 0),), (64,))
        with pytest.raises(AssertionError):
            Ledger(engine="D", tables=windowed, ranks=1, saves=False, loads=True, sync_bytes=1)


class TestEnding:
    def test_a_load_that_worked_is_proven_with_all_it_claimed(self) -> None:
        ledger = ledger_of()
        entry = claimed(ledger, 100)
        ledger.take_orders((), ())
        assert ledger.loads_now(entry)
        assert ledger.report(report(99)) == [(entry, Ended(99, (), 0.0))]
        ledger.loaded_now(entry, 2.0)
        assert (entry.phase, entry.failed, ledger.take_releases()) == (Phase.SETTLED, False, [7])
        proof = ledger.prove(entry, 99)
        assert (proof.handed_over_tokens, proof.recomputed_tokens, proof.reason) == (99, 1, "")
        ledger.check_integrity()

    def test_what_the_step_completes_is_saved_when_every_rank_has_said_that_it_loaded(self) -> None:
        ledger = ledger_of()
        chunks = tuple(Chunk(bytes([at]), at, at + CHUNK) for at in (0, 64))
        entry = ledger.add("r", 128, chunks, None)
        ledger.look(entry)
        ledger.match(entry, 1, 7, 10.0, sealed=1, size_bytes=640)
        ledger.allocated(entry, ledger.claimable(entry, 0), (TABLE,), now=1.0)
        ledger.take_orders((), ())
        assert not ledger.has_unsaved(entry, 128)
        ((_, _),) = ledger.report(report(64))
        ledger.loaded_now(entry, 2.0)
        assert ledger.has_unsaved(entry, 128)

    @pytest.mark.parametrize(("valid", "computed"), [(0, 0), (31, 0), (32, 32), (80, 64)])
    def test_after_a_failed_one_the_engine_computes_from_the_first_block_that_lacks_a_token(
        self, valid: int, computed: int
    ) -> None:
        ledger = ledger_of()
        entry = claimed(ledger, 100)
        ledger.take_orders((), ())
        ((_, end),) = ledger.report(report(valid, Reason.CORRUPT))
        ledger.loaded_now(entry, 2.0)
        assert end == Ended(computed, tuple(TABLE[computed // BLOCK :]), 0.0)
        proof = ledger.prove(entry, end.computed)
        assert (proof.handed_over_tokens, proof.reason) == (computed, "corrupt")
        assert ledger.claimable(entry, 0) == 0

    def test_after_a_failed_one_the_next_loads_are_asynchronous_for_a_while(self) -> None:
        ledger = ledger_of()
        claimed(ledger, 100)
        ledger.take_orders((), ())
        ledger.report(report(0, Reason.TIMEOUT))
        for at in range(REST_CLAIMS):
            entry = claimed(ledger, 100, name=f"r{at}")
            assert not entry.near
        entry = matched(ledger, 100, name="again")
        assert (ledger.claimable(entry, 0), entry.near) == (99, True)

    def test_a_request_that_ends_in_the_step_is_proven_all_the_same_and_leaves_nothing_behind(self) -> None:
        """vLLM frees a request that has all its tokens, or was aborted, before it gives the step's reports."""
        ledger = ledger_of()
        entry = claimed(ledger, 100)
        ledger.take_orders((), ())
        assert ledger.finish(entry, 100, (TABLE,)).hold is False
        assert ledger.report(report(32, Reason.TIMEOUT)) == [(entry, Ended(32, tuple(TABLE[1:]), 0.0))]
        ledger.loaded_now(entry, 2.0)
        assert ledger.prove(entry, 32).handed_over_tokens == 32
        assert len(ledger) == 0
        assert ledger.take_orders((), ()).cancelled == ()
        assert ledger.take_releases() == [7]

    @pytest.mark.parametrize("valid", [64, 32])
    def test_what_the_step_completes_of_a_request_that_ends_in_it_is_saved_if_its_load_worked(self, valid: int) -> None:
        """1. A step loads, and computes the rest. 2. The request ends. 3. Every rank has told how the load ended.

        The engine keeps the blocks from 2 on, and hears that they are free only after what is ordered in 3.
        """
        ledger = ledger_of()
        chunks = tuple(Chunk(bytes([at]), at, min(at + CHUNK, 150)) for at in (0, 64, 128))
        entry = ledger.add("r", 150, chunks, None)
        ledger.look(entry)
        ledger.match(entry, 1, 7, 10.0, sealed=1, size_bytes=640)
        ledger.allocated(entry, ledger.claimable(entry, 0), (TABLE,), now=1.0)
        ledger.take_orders((), ())
        assert ledger.finish(entry, 150, (TABLE,)).hold is True
        ledger.check_integrity()
        orders = ledger.take_orders((), ())
        assert (orders.saves, orders.held) == ((), ())
        for ended, _ in ledger.report(report(valid, Reason.NONE if valid == 64 else Reason.TIMEOUT)):
            ledger.loaded_now(ended, 2.0)
        ledger.check_integrity()
        orders = ledger.take_orders((), ())
        assert orders.held == ("r",)
        if valid == 64:
            (save,) = orders.saves
            assert ([chunk.end for chunk in save.chunks], save.complete) == ([128, 150], True)
            assert save.tables == (Blocks(tuple(TABLE[2:5]), 2),)
        else:
            assert orders.saves == ()
        ledger.sent("r")
        assert len(ledger) == 0

    def test_a_request_aborted_in_the_step_is_held_for_saves_of_before_a_preemption(self) -> None:
        """1. A save is ordered. 2. The request is preempted, and loads synchronously. 3. It is aborted before the
        step's output is taken in, and only then the save and the load are reported.
        """
        ledger = ledger_of()
        entry = ledger.add("r", 100, (Chunk(b"0", 0, 64), Chunk(b"1", 64, 100)), None)
        ledger.look(entry)
        ledger.match(entry, 0, 0, 0.0)
        ledger.runs(entry)
        ledger.order_save(entry, 64, (TABLE,))
        ledger.preempted(["r"])
        ledger.look(entry)
        ledger.match(entry, 2, 7, 10.0, sealed=2, size_bytes=1_000)
        ledger.allocated(entry, ledger.claimable(entry, 0), (TABLE,), now=1.0)
        assert ledger.loads_now(entry)
        assert ledger.finish(entry, 100, (TABLE,)).hold is True
        ledger.check_integrity()
        both = RankReport({"r": 2}, {"r": LoadOutcome(99, 1, 0.1)})
        for ended, _ in ledger.report(both):
            ledger.loaded_now(ended, 2.0)
        ledger.check_integrity()
        ledger.sent("r")
        assert len(ledger) == 0

    def test_loads_of_other_kinds_are_none_of_its_business(self) -> None:
        assert SyncLoads(10, BLOCK).ended("r", LoadOutcome(0, 0, 0.0)) is None


def test_a_rank_names_the_blocks_of_a_failed_one_and_never_the_request() -> None:
    """Of a request that was not waiting for a load vLLM's scheduler asserts that it is finished."""
    books = RankLedger(tables=Tables.one(BLOCK), hold_s=5.0)
    order = LoadOrder(
        request_id="r", chunks=(), tables=(Blocks((11, 12, 13, 14), 2),), starts=(64,), start=64, end=180,
        kind=LoadKind.NOW,
    )  # fmt: skip
    books.load_ordered(order)
    assert not books.has_ended("r")
    books.load_ended("r", LoadOutcome(100, 1, 0.1, Reason.CORRUPT))
    assert books.has_ended("r")
    results = books.take()
    assert (results.finished_recving, results.failed_recving) == (set(), set())
    assert results.invalid_block_ids == {12, 13, 14}
    assert results.report.loads["r"].valid_end == 100
    books.check_integrity()
