from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvrelay.connector.core.orders import LoadOrder, LoadOutcome
from kvrelay.connector.core.rank import RankLedger
from kvrelay.connector.core.tables import Blocks, Tables
from kvrelay.types import Reason

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def ledger() -> Iterator[RankLedger]:
    books = RankLedger(tables=Tables.one(32), hold_s=5.0)
    yield books
    books.check_integrity()


BLOCKS = Blocks((11, 12, 13, 14), 2)
ORDER = LoadOrder(request_id="r", chunks=(), tables=(BLOCKS,), starts=(64,), start=64, end=180)


def test_a_finished_request_is_reported_when_its_last_save_ends_and_once(ledger: RankLedger) -> None:
    ledger.save_ordered("r")
    ledger.save_ordered("r")
    ledger.hold("r", now=0.0)
    ledger.save_ended("r")
    assert not ledger.has_results
    assert ledger.take().finished_sending == set()
    ledger.save_ended("r")
    results = ledger.take()
    assert results.finished_sending == {"r"}
    assert results.report.saves_ended == {"r": 1}
    assert ledger.take().finished_sending == set()


def test_a_request_whose_saves_ended_before_it_was_held_is_reported_at_once(ledger: RankLedger) -> None:
    ledger.save_ordered("r")
    ledger.save_ended("r")
    assert ledger.take().finished_sending == set()
    ledger.hold("r", now=0.0)
    assert ledger.waited_for
    assert ledger.take().finished_sending == {"r"}
    assert not ledger.waited_for


def test_saves_of_a_request_that_runs_on_are_reported_without_naming_it_finished(ledger: RankLedger) -> None:
    ledger.save_ordered("r")
    ledger.save_ended("r")
    results = ledger.take()
    assert (results.finished_sending, results.report.saves_ended) == (set(), {"r": 1})


def test_a_held_request_is_overdue_only_while_it_is_saving(ledger: RankLedger) -> None:
    ledger.save_ordered("r")
    ledger.hold("r", now=1.0)
    assert ledger.overdue(5.9) == set()
    assert ledger.overdue(6.0) == {"r"}
    ledger.save_ended("r")
    assert ledger.overdue(6.0) == set()
    ledger.take()


@pytest.mark.parametrize(
    ("valid_end", "invalid"),
    [
        (180, set()),
        (179, {14}),
        (160, {14}),
        (159, {13, 14}),
        (128, {13, 14}),
        (96, {12, 13, 14}),
        (64, {11, 12, 13, 14}),
        (0, {11, 12, 13, 14}),
    ],
)
def test_every_block_with_a_token_that_is_missing_is_named_and_no_other(
    ledger: RankLedger, valid_end: int, invalid: set[int]
) -> None:
    ledger.load_ordered(ORDER)
    ledger.load_ended("r", LoadOutcome(valid_end, 9, 0.1, Reason.MISS))
    results = ledger.take()
    assert (results.finished_recving, results.invalid_block_ids) == ({"r"}, invalid)
    assert ledger.take().finished_recving == set()


def test_the_engine_waits_for_a_load_until_it_ended(ledger: RankLedger) -> None:
    seen = [ledger.waited_for]
    ledger.load_ordered(ORDER)
    seen.append(ledger.waited_for)
    ledger.load_ended("r", LoadOutcome(180, 9, 0.1))
    seen += [ledger.waited_for, ledger.has_results]
    ledger.take()
    assert seen == [False, True, False, True]


def test_a_cancelled_load_is_still_reported(ledger: RankLedger) -> None:
    ledger.load_ordered(ORDER)
    ledger.cancel("r")
    ledger.cancel("another")
    assert ledger.cancelled("r")
    assert not ledger.cancelled("another")
    ledger.load_ended("r", LoadOutcome(64, 0, 0.0, Reason.FAILED_LOAD))
    assert ledger.take().finished_recving == {"r"}
    assert not ledger.cancelled("r")
