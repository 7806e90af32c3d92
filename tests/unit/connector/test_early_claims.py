"""Claims of what is still being computed: how much, how many at a time, and what becomes of them."""

from __future__ import annotations

import pytest

from kvrelay.connector.core.ledger import Ledger
from kvrelay.connector.core.orders import LoadKind, LoadOutcome, RankReport
from kvrelay.connector.core.requests import Entry, HandOver, Phase
from kvrelay.connector.core.tables import Table, Tables
from kvrelay.identity.core.chunks import Chunk
from kvrelay.types import Reason

BLOCK, CHUNK = 32, 64
TABLE = list(range(100, 200))


def ledger_of(max_early: int = 2, tables: Tables | None = None) -> Ledger:
    return Ledger(
        engine="D0", tables=tables or Tables.one(BLOCK), ranks=1, saves=True, loads=True, sync_bytes=1 << 20,
        max_early=max_early,
    )  # fmt: skip


def matched(
    ledger: Ledger, tokens: int, found: int, *, name: str = "r", overlapped: bool = True, leg: str = "decode"
) -> Entry:
    chunks = tuple(Chunk(bytes([at]), at, min(at + CHUNK, tokens)) for at in range(0, tokens, CHUNK))
    entry = ledger.add(name, tokens, chunks, HandOver("ho-1", leg, "D1", overlapped=overlapped))
    ledger.look(entry)
    ledger.match(entry, found, 7 if found else 0, 10.0, range(found), sealed=found, size_bytes=found * 640)
    return entry


def claimed(ledger: Ledger, tokens: int, *, name: str = "r", local: int = 0) -> Entry:
    entry = matched(ledger, tokens, 0, name=name)
    ledger.allocated(entry, ledger.claimable(entry, local), (TABLE,), now=1.0)
    return entry


@pytest.mark.parametrize("found", [0, 1, 2])
def test_a_promised_prompt_is_claimed_whole_whatever_the_pool_has_of_it(found: int) -> None:
    ledger = ledger_of()
    entry = matched(ledger, 150, found)
    assert (ledger.claimable(entry, 32), entry.near) == (118, False)
    ledger.allocated(entry, 118, (TABLE,), now=1.0)
    (order,) = ledger.take_orders((), ()).loads
    assert (order.kind, order.ticket, order.start, order.end) == (LoadKind.EARLY, "ho-1", 32, 150)
    assert [chunk.end for chunk in order.chunks] == [64, 128, 150]
    assert not ledger.has_unsaved(entry, 150), "the prefill engine saves it"


def test_a_prompt_that_is_all_there_does_not_wait_for_anybody() -> None:
    ledger = ledger_of()
    entry = matched(ledger, 150, 3)
    assert (ledger.claimable(entry, 0), entry.near, entry.early) == (149, True, False)


def test_a_prompt_that_the_engine_has_itself_does_not_wait_either() -> None:
    ledger = ledger_of(max_early=1)
    claimed(ledger, 150, name="other")
    entry = matched(ledger, 129, 0)
    assert not ledger.must_queue(entry, 128)
    assert ledger.claimable(entry, 128) == 0


@pytest.mark.parametrize(
    ("leg", "overlapped", "max_early"), [("decode", False, 2), ("prefill", True, 2), ("decode", True, 0)]
)
def test_without_a_promise_only_what_is_there_is_claimed(leg: str, overlapped: bool, max_early: int) -> None:
    ledger = ledger_of(max_early)
    assert ledger.claimable(matched(ledger, 150, 1, leg=leg, overlapped=overlapped, name="some"), 0) == 64
    assert matched(ledger, 150, 0, leg=leg, overlapped=overlapped).phase is Phase.SETTLED


def test_a_prompt_that_ends_with_what_was_generated_is_not_waited_for() -> None:
    """Its prefill is over, whatever a client says; its keys end where the prefill engine's prompt did."""
    ledger = ledger_of()
    chunks = (Chunk(b"a", 0, 64), Chunk(b"b", 64, 110))
    entry = ledger.add("r", 150, chunks, HandOver("ho-1", "decode", "D1", overlapped=True, generated=40))
    ledger.look(entry)
    ledger.match(entry, 2, 7, 10.0, range(2), sealed=2, size_bytes=1280)
    assert ledger.claimable(entry, 128) == 0
    assert ledger.claimable(entry, 32) == 78
    ledger.allocated(entry, 78, (TABLE,), now=1.0)
    (order,) = ledger.take_orders((), ()).loads
    assert [chunk.end for chunk in order.chunks] == [64, 110]


def test_an_engine_that_takes_no_prefix_of_a_load_claims_nothing_early() -> None:
    ledger = Ledger(
        engine="D0", tables=Tables((Table(BLOCK, 0),), (64,)), ranks=1, saves=True, loads=True, max_early=2
    )  # fmt: skip
    assert matched(ledger, 150, 0).phase is Phase.SETTLED


def test_over_the_cap_a_request_waits_for_a_place_and_gets_it_when_a_load_ends() -> None:
    ledger = ledger_of(max_early=2)
    for name in ("a", "b"):
        claimed(ledger, 150, name=name)
    third = matched(ledger, 150, 0, name="c")
    assert ledger.must_queue(third, 0)
    assert ledger.wants_look(third, 10.0), "by then it may be all there"
    ledger.report(RankReport({}, {"a": LoadOutcome(150, 1, 0.1)}))
    ledger.loaded("a", 2.0)
    assert not ledger.must_queue(third, 0)
    ledger.check_integrity()


def test_an_aborted_request_keeps_its_place_until_nothing_is_written_for_it() -> None:
    ledger = ledger_of(max_early=1)
    entry = claimed(ledger, 150, name="a")
    second = matched(ledger, 150, 0, name="b")
    ledger.take_orders((), ())
    ledger.finish(entry)
    assert ledger.take_orders((), ()).cancelled == ("a",)
    assert ledger.must_queue(second, 0)
    ledger.loaded("a", 2.0)
    assert not ledger.must_queue(second, 0)


def test_a_promise_that_was_not_kept_is_not_believed_again_and_what_is_computed_here_is_saved() -> None:
    ledger = ledger_of()
    entry = claimed(ledger, 150)
    ledger.take_orders((), ())
    ledger.report(RankReport({}, {"r": LoadOutcome(64, 1, 0.1, Reason.WRITER_LOST)}))
    ledger.loaded("r", 2.0)
    assert ledger.claimable(entry, 0) == 0
    proof = ledger.prove(entry, 64)
    assert (proof.handed_over_tokens, proof.recomputed_tokens, proof.reason) == (64, 86, "writer_lost")
    assert ledger.has_unsaved(entry, 150)
