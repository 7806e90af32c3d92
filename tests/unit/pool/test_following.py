"""Waiting for objects that are to be announced under a ticket."""

from __future__ import annotations

import pytest

from kvrelay.testing.pool_core import NOTHING_HELD, Driver
from kvrelay.wire import messages as m

OWNER, P, D = 1, 2, 3


@pytest.fixture
def d() -> Driver:
    driver = Driver()
    driver.ask(OWNER, m.OpenTicket(0, "t", 100.0), m.Done)
    return driver


def followed(d: Driver, request: int) -> tuple[bool, bool] | None:
    answer = d.answer(request)
    assert answer is None or isinstance(answer, m.Followed), answer
    return None if answer is None else (answer.present, answer.open)


def test_a_follower_is_told_when_its_object_is_announced_and_not_for_others(d: Driver) -> None:
    waiting = d.send(D, m.Follow(0, "t", b"b", 5.0))
    d.announce(P, b"a", ticket="t")
    assert followed(d, waiting) is None
    d.announce(P, b"b", ticket="t")
    assert followed(d, waiting) == (True, True)
    assert d.held()["waiting"] == 0


def test_what_is_there_is_told_at_once_whatever_the_ticket(d: Driver) -> None:
    d.announce(P, b"a")
    assert followed(d, d.send(D, m.Follow(0, "t", b"a", 5.0))) == (True, True)
    assert followed(d, d.send(D, m.Follow(0, "none", b"a", 5.0))) == (True, False)


def test_a_ticket_that_never_was_or_is_sealed_promises_nothing(d: Driver) -> None:
    assert followed(d, d.send(D, m.Follow(0, "none", b"a", 5.0))) == (False, False)
    d.ask(OWNER, m.SealTicket(0, "t"), m.Done)
    assert followed(d, d.send(D, m.Follow(0, "t", b"a", 5.0))) == (False, False)


@pytest.mark.parametrize("how", ["sealed", "ended", "owner gone", "expired"])
def test_when_nothing_more_will_come_followers_are_told_at_once(d: Driver, how: str) -> None:
    waiting = d.send(D, m.Follow(0, "t", b"a", 200.0))
    if how == "sealed":
        d.ask(OWNER, m.SealTicket(0, "t"), m.Done)
    elif how == "ended":
        d.ask(OWNER, m.EndTicket(0, "t"), m.Done)
    elif how == "owner gone":
        d.die(OWNER)
    else:
        d.pass_time(100.0)
    assert followed(d, waiting) == (False, False)
    assert d.held()["waiting"] == 0


def test_a_follower_that_waited_long_enough_is_told_that_there_is_still_hope(d: Driver) -> None:
    waiting = d.send(D, m.Follow(0, "t", b"a", 5.0))
    d.pass_time(5.0)
    assert followed(d, waiting) == (False, True)


def test_an_object_that_its_writer_gave_up_is_waited_for_again(d: Driver) -> None:
    """1. P announces. 2. P dies. 3. D follows. 4. Another P announces it under the same ticket."""
    d.announce(P, b"a", ticket="t")
    d.die(P)
    waiting = d.send(D, m.Follow(0, "t", b"a", 5.0))
    assert followed(d, waiting) is None
    d.announce(OWNER, b"a", group="other", ticket="t")
    assert followed(d, waiting) == (True, True)


def test_a_follower_that_goes_away_leaves_nothing_behind(d: Driver) -> None:
    d.send(D, m.Follow(0, "t", b"a", 5.0))
    d.die(D)
    d.ask(OWNER, m.EndTicket(0, "t"), m.Done)
    assert d.held() == NOTHING_HELD


def test_only_its_owner_seals_a_ticket(d: Driver) -> None:
    d.fails(P, m.SealTicket(0, "t"), "conflict")
    d.fails(OWNER, m.SealTicket(0, "none"), "not_found")
    assert d.ask(D, m.Follow(0, "t", b"a", 0.0), m.Followed).open
