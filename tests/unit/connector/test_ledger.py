"""The scheduler's ledger by scenario. `tests/property/...` is for what no scenario thinks of."""

from __future__ import annotations

import pytest

from kvrelay.connector.core.growth import Growth
from kvrelay.connector.core.ledger import Ledger
from kvrelay.connector.core.orders import LoadOutcome, RankReport
from kvrelay.connector.core.requests import Entry, Event, HandOver, IllegalTransitionError, Phase
from kvrelay.connector.core.tables import Blocks, Tables
from kvrelay.identity.core.chunks import Chunk, ChunkChain, prompt_chunks
from kvrelay.types import Reason

BLOCK, CHUNK = 32, 64
TABLE = (list(range(100, 200)),)


def chunks_of(tokens: int) -> tuple[Chunk, ...]:
    return tuple(Chunk(bytes([at]), at, min(at + CHUNK, tokens)) for at in range(0, tokens, CHUNK))


def make_ledger(*, ranks: int = 1, saves: bool = True, loads: bool = True) -> Ledger:
    return Ledger(engine="D0", tables=Tables.one(BLOCK), ranks=ranks, saves=saves, loads=loads)


def add(ledger: Ledger, tokens: int, leg: str = "", name: str = "r") -> Entry:
    return ledger.add(name, tokens, chunks_of(tokens), HandOver("ho-1", leg, "D1") if leg else None)


def matched(ledger: Ledger, tokens: int, chunks: int, leg: str = "decode", fresh: tuple[int, ...] = ()) -> Entry:
    entry = add(ledger, tokens, leg)
    ledger.look(entry)
    ledger.match(entry, chunks, lease=7, look_again_at=10.0, fresh=fresh)
    return entry


def loading(ledger: Ledger, tokens: int, local: int = 0, fresh: tuple[int, ...] = ()) -> Entry:
    entry = matched(ledger, tokens, len(chunks_of(tokens)), fresh=fresh)
    ledger.allocated(entry, ledger.claimable(entry, local), TABLE, now=1.0)
    return entry


def ended(request_id: str = "r", *, saves: int = 0, outcome: LoadOutcome | None = None) -> RankReport:
    return RankReport(saves_ended={request_id: saves} if saves else {}, loads={request_id: outcome} if outcome else {})


class TestLoading:
    def test_a_whole_prompt_is_claimed_with_its_partial_tail(self) -> None:
        ledger = make_ledger()
        entry = matched(ledger, 100, 2)
        assert ledger.claimable(entry, 0) == 100
        assert ledger.claimable(entry, 0) == 100

    def test_a_load_may_begin_inside_a_chunk(self) -> None:
        ledger = make_ledger()
        loading(ledger, 200, local=96)
        (order,) = ledger.take_orders((), ()).loads
        assert (order.start, order.end) == (96, 200)
        assert [(chunk.start, chunk.end) for chunk in order.chunks] == [(64, 128), (128, 192), (192, 200)]
        assert order.tables == (Blocks((103, 104, 105, 106), 3),)
        assert ledger.take_orders((), ()).loads == ()

    @pytest.mark.parametrize(("tokens", "local"), [(1, 0), (33, 32), (64, 64), (65, 64)])
    def test_nothing_is_claimed_that_spares_no_computation(self, tokens: int, local: int) -> None:
        ledger = make_ledger()
        entry = matched(ledger, tokens, len(chunks_of(tokens)))
        assert ledger.claimable(entry, local) == 0

    def test_what_the_engine_does_not_take_is_let_go(self) -> None:
        ledger = make_ledger()
        entry = matched(ledger, 100, 1)
        assert ledger.claimable(entry, 64) == 0
        ledger.allocated(entry, 0, TABLE, now=1.0)
        assert entry.phase is Phase.SETTLED
        assert ledger.take_releases() == [7]

    def test_the_second_allocation_after_a_load_changes_nothing(self) -> None:
        ledger = make_ledger()
        entry = loading(ledger, 100)
        ledger.loaded("r", now=2.0)
        ledger.allocated(entry, 0, TABLE, now=3.0)
        assert entry.phase is Phase.SETTLED

    def test_a_lease_is_held_until_every_rank_has_loaded(self) -> None:
        ledger = make_ledger(ranks=2)
        loading(ledger, 100)
        ledger.report(ended(outcome=LoadOutcome(100, 10, 0.5)))
        assert ledger.take_releases() == []
        ledger.report(ended(outcome=LoadOutcome(100, 20, 0.25)))
        ledger.loaded("r", now=2.0)
        assert ledger.take_releases() == [7]

    def test_after_a_failed_load_nothing_is_claimed_again(self) -> None:
        ledger = make_ledger()
        entry = loading(ledger, 200)
        ledger.report(ended(outcome=LoadOutcome(64, 10, 0.5, Reason.WRITER_LOST)))
        ledger.loaded("r", now=2.0)
        assert ledger.claimable(entry, 0) == 0
        assert not ledger.wants_look(entry, now=2.0)
        assert ledger.prove(entry, computed=64).reason == "writer_lost"

    def test_a_lease_that_grew_old_is_replaced(self) -> None:
        ledger = make_ledger()
        entry = matched(ledger, 100, 2)
        assert not ledger.wants_look(entry, now=9.9)
        assert ledger.wants_look(entry, now=10.0)
        ledger.look(entry)
        assert ledger.take_releases() == [7]
        assert ledger.claimable(entry, 0) == 0

    def test_a_preempted_request_is_looked_up_again(self) -> None:
        ledger = make_ledger()
        entry = loading(ledger, 100)
        ledger.loaded("r", now=2.0)
        assert not ledger.wants_look(entry, now=2.0)
        ledger.runs(entry)
        assert ledger.preempted(["r", "unknown"]) == ("r",)
        assert ledger.wants_look(entry, now=2.0)
        ledger.look(entry)
        ledger.match(entry, 2, lease=8, look_again_at=99.0)
        assert ledger.claimable(entry, 0) == 100

    def test_a_request_reset_and_asked_about_before_the_step_tells_of_it_is_looked_up_once(self) -> None:
        """1. It runs. 2. `reset_prefix_cache` preempts it. 3. The next step's schedule asks about it. 4. Only then the
        step says that it was preempted.
        """
        ledger = make_ledger()
        entry = loading(ledger, 100)
        ledger.loaded("r", now=2.0)
        ledger.runs(entry)
        assert ledger.wants_look(entry, now=2.0)
        ledger.look(entry)
        ledger.preempted(["r"])
        ledger.match(entry, 0, lease=0, look_again_at=99.0)
        assert not ledger.wants_look(entry, now=2.0)

    def test_a_request_that_reads_no_external_kv_is_never_looked_up(self) -> None:
        ledger = make_ledger()
        entry = ledger.add("r", 100, chunks_of(100), None)
        ledger.leave_unread(entry, Reason.PROMPT_LOGPROBS)
        ledger.runs(entry)
        ledger.preempted(["r"])
        assert not ledger.may_look(entry)
        assert not ledger.wants_look(entry, now=2.0)
        assert ledger.has_unsaved(entry, 100)

    def test_a_lost_pool_settles_lookups_and_claims_but_not_loads(self) -> None:
        ledger = make_ledger()
        load = ledger.add("load", 64, chunks_of(64), None)
        look = ledger.add("look", 64, chunks_of(64), None)
        claim = ledger.add("claim", 64, chunks_of(64), None)
        for entry in (load, look, claim):
            ledger.look(entry)
        for lease, entry in enumerate((load, claim), 1):
            ledger.match(entry, 1, lease, 99.0)
        ledger.allocated(load, ledger.claimable(load, 0), TABLE, 0.0)
        ledger.pool_lost()
        assert (load.phase, look.phase, claim.phase) == (Phase.LOADING, Phase.SETTLED, Phase.SETTLED)
        assert (look.reason, claim.reason) == (Reason.POOL_DOWN, Reason.POOL_DOWN)
        assert ledger.take_releases() == []
        ledger.check_integrity()

    def test_a_consumer_only_engine_looks_and_a_producer_only_one_does_not(self) -> None:
        for loads in (True, False):
            ledger = make_ledger(loads=loads)
            assert ledger.may_look(add(ledger, 100)) is loads
            assert not ledger.may_look(ledger.add("no-keys", 100, (), None))


class TestSaving:
    def save(self, ledger: Ledger, entry: Entry, computed: int) -> list[tuple[int, int]]:
        if not ledger.has_unsaved(entry, computed):
            return []
        return [(chunk.start, chunk.end) for chunk in ledger.order_save(entry, computed, TABLE).chunks]

    def test_a_chunk_is_saved_in_the_step_that_completes_it_and_once(self) -> None:
        ledger = make_ledger()
        entry = add(ledger, 200)
        assert self.save(ledger, entry, 63) == []
        assert self.save(ledger, entry, 130) == [(0, 64), (64, 128)]
        assert self.save(ledger, entry, 130) == []
        assert self.save(ledger, entry, 199) == [(128, 192)]
        assert self.save(ledger, entry, 200) == [(192, 200)]
        assert self.save(ledger, entry, 210) == []

    def test_what_the_engine_had_cached_itself_is_saved_too(self) -> None:
        ledger = make_ledger()
        assert self.save(ledger, add(ledger, 200), 192 + 8) == [(0, 64), (64, 128), (128, 192), (192, 200)]

    def test_an_order_names_the_blocks_its_chunks_lie_in(self) -> None:
        ledger = make_ledger()
        entry = add(ledger, 200, "prefill")
        self.save(ledger, entry, 64)
        order = ledger.order_save(entry, 200, TABLE)
        assert order.tables == (Blocks((102, 103, 104, 105, 106), 2),)
        assert order.ticket == "ho-1"

    def test_only_the_prefill_leg_saves_under_the_ticket(self) -> None:
        for leg in ("", "decode"):
            ledger = make_ledger()
            assert ledger.order_save(add(ledger, 64, leg), 64, TABLE).ticket is None

    def test_a_consumer_saves_nothing(self) -> None:
        ledger = make_ledger(saves=False)
        assert self.save(ledger, add(ledger, 200), 200) == []

    def test_a_preempted_request_is_saved_from_the_start_again(self) -> None:
        ledger = make_ledger()
        entry = add(ledger, 200)
        self.save(ledger, entry, 128)
        ledger.preempted(["r"])
        assert self.save(ledger, entry, 64) == [(0, 64)]


class TestTheEnd:
    def test_blocks_are_kept_while_a_rank_still_saves(self) -> None:
        ledger = make_ledger(ranks=2)
        entry = add(ledger, 64)
        ledger.order_save(entry, 64, TABLE)
        ledger.report(ended(saves=1))
        assert ledger.finish(entry).hold
        assert ledger.take_orders((), ()).held == ("r",)
        ledger.report(ended(saves=1))
        ledger.sent("r")
        assert len(ledger) == 0

    def test_blocks_go_at_once_when_all_saves_are_done(self) -> None:
        ledger = make_ledger()
        entry = add(ledger, 64)
        ledger.order_save(entry, 64, TABLE)
        ledger.report(ended(saves=1))
        assert not ledger.finish(entry).hold
        assert len(ledger) == 0

    def test_an_aborted_load_is_cancelled_and_its_blocks_are_not_asked_for_twice(self) -> None:
        """1. Saves are open. 2. The request is preempted and loads. 3. It is aborted: the engine itself waits."""
        ledger = make_ledger()
        entry = add(ledger, 64)
        ledger.order_save(entry, 64, TABLE)
        ledger.look(entry)
        ledger.match(entry, 1, 7, 99.0)
        ledger.allocated(entry, ledger.claimable(entry, 0), TABLE, 1.0)
        ledger.take_orders((), ())
        assert not ledger.finish(entry).hold
        assert ledger.take_orders((), ()).cancelled == ("r",)
        assert ledger.take_releases() == [7]
        ledger.check_integrity()
        ledger.loaded("r", now=2.0)
        assert len(ledger) == 0

    def test_reports_of_forgotten_requests_are_ignored(self) -> None:
        ledger = make_ledger()
        ledger.report(ended(saves=1, outcome=LoadOutcome(1, 1, 1.0)))
        ledger.loaded("r", 1.0)
        ledger.sent("r")
        assert len(ledger) == 0

    def test_an_event_that_cannot_happen_tells_the_requests_story(self) -> None:
        entry = matched(make_ledger(), 100, 2)
        with pytest.raises(IllegalTransitionError, match=r"loaded while claimable; its story: look:looking > match"):
            entry.move(Event.LOADED)

    def test_after_a_reset_nothing_old_is_saved_or_claimed(self) -> None:
        ledger = make_ledger()
        entry = matched(ledger, 100, 2)
        ledger.forget_keys()
        assert ledger.claimable(entry, 0) == 0
        assert not ledger.has_unsaved(entry, 100)
        assert not ledger.may_look(entry)
        ledger.check_integrity()


class TestProof:
    def test_a_whole_hand_over_recomputes_the_last_token_only(self) -> None:
        ledger = make_ledger(ranks=2)
        entry = loading(ledger, 100, local=32, fresh=(0, 1))
        ledger.report(ended(outcome=LoadOutcome(100, 10, 0.5)).join(ended(outcome=LoadOutcome(100, 20, 0.25))))
        ledger.loaded("r", now=1.75)
        proof = ledger.prove(entry, computed=99)
        assert (proof.handover, proof.worker, proof.engine, proof.request_id) == ("ho-1", "D1", "D0", "r")
        assert (proof.prompt_tokens, proof.handed_over_tokens, proof.local_tokens) == (100, 67, 32)
        assert (proof.recomputed_tokens, proof.reason) == (1, "")
        assert (proof.bytes, proof.wait_ms, proof.transfer_ms) == (30, 750.0, 500.0)

    @pytest.mark.parametrize(
        ("chunks", "computed", "reason"), [(0, 0, "miss"), (1, 64, "partial"), (2, 127, ""), (2, 0, "miss")]
    )
    def test_what_was_recomputed_has_a_reason(self, chunks: int, computed: int, reason: str) -> None:
        ledger = make_ledger()
        entry = matched(ledger, 128, chunks)
        assert ledger.prove(entry, computed).reason == reason

    def test_what_the_pool_had_before_is_told_apart_from_what_this_hand_over_wrote(self) -> None:
        ledger = make_ledger()
        entry = loading(ledger, 100, local=32, fresh=(1,))
        ledger.report(ended(outcome=LoadOutcome(100, 10, 0.5)))
        ledger.loaded("r", now=1.75)
        proof = ledger.prove(entry, computed=99)
        assert (proof.handed_over_tokens, proof.earlier_tokens, proof.local_tokens) == (35, 32, 32)

    def test_several_reasons_have_their_tokens_each(self) -> None:
        """1. The pool has 64 of 100 tokens. 2. Only 32 of them could be loaded."""
        ledger = make_ledger()
        entry = matched(ledger, 100, 1)
        ledger.claimable(entry, 0)
        ledger.allocated(entry, 64, TABLE, now=1.0)
        ledger.report(ended(outcome=LoadOutcome(32, 10, 0.5, Reason.CORRUPT)))
        ledger.loaded("r", now=1.75)
        proof = ledger.prove(entry, computed=32)
        assert proof.reasons == {"partial": 36, "corrupt": 32}
        assert (proof.reason, proof.recomputed_tokens) == ("partial", 68)

    @pytest.mark.parametrize("leg", ["", "prefill"])
    def test_only_the_decode_leg_is_a_hand_over(self, leg: str) -> None:
        ledger = make_ledger()
        assert ledger.prove(add(ledger, 100, leg), 0).handover == ""

    @pytest.mark.parametrize("computed", [0, 32, 99, 100, 130])
    @pytest.mark.parametrize("local", [0, 32, 64])
    def test_the_parts_add_up_to_the_prompt(self, computed: int, local: int) -> None:
        ledger = make_ledger()
        entry = matched(ledger, 100, 2)
        ledger.claimable(entry, local)
        proof = ledger.prove(entry, computed)
        parts = (proof.handed_over_tokens, proof.earlier_tokens, proof.local_tokens, proof.recomputed_tokens)
        assert sum(proof.reasons.values()) == (proof.recomputed_tokens if proof.recomputed_tokens > 1 else 0)
        assert sum(parts) == 100
        assert min(parts) >= 0


def test_reports_of_ranks_are_joined_by_what_every_rank_has() -> None:
    one = LoadOutcome(100, 10, 0.5)
    other = LoadOutcome(64, 5, 0.75, Reason.CORRUPT)
    for joined in (one.join(other), other.join(one)):
        assert joined == LoadOutcome(64, 15, 0.75, Reason.CORRUPT, ranks=2)
    left, right = ended(saves=1, outcome=one), ended(saves=2)
    assert left.join(right) == ended(saves=3, outcome=one)
    assert left.join(ended("other", saves=1)).saves_ended == {"r": 1, "other": 1}


class TestSavingWhatIsGenerated:
    def grown(self, ledger: Ledger, prompt: int, leg: str = "") -> tuple[Entry, list[int]]:
        tokens = list(range(prompt))
        chain = ChunkChain(b"seed", CHUNK)
        chain.extend(tokens)
        over = HandOver("ho-1", leg, "D1") if leg else None
        return ledger.add("r", prompt, tuple(chain.all()), over, Growth(chain, tokens, prompt)), tokens

    def save(self, ledger: Ledger, entry: Entry, computed: int) -> list[tuple[int, int]]:
        if not ledger.has_unsaved(entry, computed):
            return []
        return [(chunk.start, chunk.end) for chunk in ledger.order_save(entry, computed, TABLE).chunks]

    def test_a_chunk_is_saved_in_the_step_that_completes_it_under_the_key_the_next_turn_will_ask_for(self) -> None:
        ledger = make_ledger()
        entry, tokens = self.grown(ledger, 100)
        assert self.save(ledger, entry, 100) == [(0, 64), (64, 100)]
        for count in range(100, 127):
            tokens.append(count)
            assert self.save(ledger, entry, len(tokens)) == []
        tokens.append(127)
        order = ledger.order_save(entry, 128, TABLE)
        assert order.chunks == (prompt_chunks(b"seed", [*range(128), 5], CHUNK)[1],)
        assert (order.tables, order.prompt) == ((Blocks((102, 103), 2),), False)

    def test_drafts_that_may_be_rejected_are_not_saved(self) -> None:
        """1. 126 tokens are known. 2. A step computes four more. 3. One was accepted, two tokens came of it."""
        ledger = make_ledger()
        entry, tokens = self.grown(ledger, 126)
        assert self.save(ledger, entry, 126) == [(0, 64), (64, 126)]
        assert self.save(ledger, entry, 130) == []
        tokens += [126, 127]
        assert self.save(ledger, entry, 131) == [(64, 128)]

    def test_what_the_last_step_accepted_is_saved_when_the_request_ends(self) -> None:
        """1. A step computes drafts. 2. All are accepted, which ends the request. 3. The next step saves them."""
        ledger = make_ledger()
        entry, tokens = self.grown(ledger, 120)
        self.save(ledger, entry, 120)
        ledger.report(ended(saves=1))
        tokens += range(120, 129)
        assert ledger.finish(entry, 128, TABLE).hold
        orders = ledger.take_orders((), ())
        (order,) = orders.saves
        assert (order.chunks[0].start, order.chunks[0].end, order.complete, orders.held) == (64, 128, True, ("r",))
        ledger.report(ended(saves=1))
        ledger.sent("r")
        assert len(ledger) == 0

    @pytest.mark.parametrize("computed", [0, 64, 127, 128])
    def test_a_request_that_ends_saves_nothing_that_is_not_computed(self, computed: int) -> None:
        """The last token's own KV was never computed; and one that lost its blocks has none."""
        ledger = make_ledger()
        entry, tokens = self.grown(ledger, 120)
        self.save(ledger, entry, 120)
        ledger.report(ended(saves=1))
        tokens += range(120, 128)
        assert not ledger.finish(entry, computed, TABLE).hold
        assert ledger.take_orders((), ()).saves == ()

    def test_tokens_the_scheduler_has_not_heard_of_are_saved_when_it_has(self) -> None:
        """Asynchronous scheduling: the step that computes a token is scheduled before its id is known."""
        ledger = make_ledger()
        entry, tokens = self.grown(ledger, 127)
        self.save(ledger, entry, 127)
        assert self.save(ledger, entry, 128) == []
        tokens.append(127)
        assert self.save(ledger, entry, 129) == [(64, 128)]

    def test_a_preempted_request_is_saved_again_with_what_it_had_generated(self) -> None:
        ledger = make_ledger()
        entry, tokens = self.grown(ledger, 100)
        self.save(ledger, entry, 100)
        tokens += range(100, 200)
        ledger.preempted(["r"])
        assert self.save(ledger, entry, 200) == [(0, 64), (64, 100), (64, 128), (128, 192)]
        ledger.check_integrity()

    @pytest.mark.parametrize(("leg", "saved"), [("decode", [(128, 192)]), ("", [(128, 192)]), ("prefill", None)])
    def test_what_the_pool_was_seen_to_hold_is_not_announced_again_but_under_a_ticket(
        self, leg: str, saved: list[tuple[int, int]] | None
    ) -> None:
        ledger = make_ledger()
        entry, tokens = self.grown(ledger, 128, leg)
        ledger.look(entry)
        ledger.match(entry, 2, lease=7, look_again_at=10.0)
        tokens += range(128, 192)
        assert self.save(ledger, entry, 192) == (saved or [(0, 64), (64, 128), (128, 192)])

    def test_after_a_load_that_failed_all_is_saved(self) -> None:
        ledger = make_ledger()
        entry, _ = self.grown(ledger, 200, "decode")
        ledger.look(entry)
        ledger.match(entry, 4, lease=7, look_again_at=10.0)
        ledger.allocated(entry, ledger.claimable(entry, 0), TABLE, 1.0)
        ledger.report(ended(outcome=LoadOutcome(64, 10, 0.5, Reason.CORRUPT)))
        ledger.loaded("r", now=2.0)
        assert self.save(ledger, entry, 200) == [(0, 64), (64, 128), (128, 192), (192, 200)]

    def test_what_a_lost_pool_held_is_saved_to_the_next(self) -> None:
        ledger = make_ledger()
        entry, _ = self.grown(ledger, 128)
        ledger.look(entry)
        ledger.match(entry, 2, lease=7, look_again_at=10.0)
        ledger.pool_lost()
        assert self.save(ledger, entry, 128) == [(0, 64), (64, 128)]

    def test_after_a_reset_nothing_generated_is_saved(self) -> None:
        ledger = make_ledger()
        entry, tokens = self.grown(ledger, 100)
        ledger.forget_keys()
        tokens += range(100, 200)
        assert not ledger.has_unsaved(entry, 200)
        ledger.check_integrity()
