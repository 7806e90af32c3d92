from __future__ import annotations

import pytest

from kvrelay.router.core.observing.forwarding import MAX_KNOWN, HeaderRules, HeaderSettings, problems_of, rules_of


def passing(settings: HeaderSettings, *names: str) -> set[str]:
    rules = rules_of(settings)
    assert rules is not None
    return {name for name in names if rules.passes(name.encode())}


def test_without_settings_there_are_no_rules() -> None:
    assert rules_of(HeaderSettings()) is None


def test_dropped_names_stay_behind_in_any_case_and_by_their_beginning() -> None:
    settings = HeaderSettings(drop=("Authorization", "X-Internal-*"))
    names = ("authorization", "x-internal-a", "x-internal", "accept", "content-type")
    assert passing(settings, *names) == {"x-internal", "accept", "content-type"}


def test_a_list_of_names_lets_only_them_and_the_bodys_own_through() -> None:
    settings = HeaderSettings(forward=("traceparent", "x-tenant*"))
    names = ("traceparent", "x-tenant", "x-tenant-id", "authorization", "content-type", "content-encoding")
    assert passing(settings, *names) == {"traceparent", "x-tenant", "x-tenant-id", "content-type", "content-encoding"}


def test_dropping_wins_over_forwarding() -> None:
    assert passing(HeaderSettings(forward=("x-*",), drop=("x-a",)), "x-a", "x-b") == {"x-b"}


def test_names_that_clients_make_up_are_not_all_remembered() -> None:
    rules = HeaderRules(HeaderSettings(drop=("a",)))
    for number in range(MAX_KNOWN + 100):
        assert rules.passes(b"x-%d" % number)
    assert len(rules._known) == MAX_KNOWN


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (HeaderSettings(drop=("a b",)), "--drop-header 'a b' is not the name of a header"),
        (HeaderSettings(drop=("",)), "is not the name of a header"),
        (HeaderSettings(drop=("x*y",)), "is not the name of a header"),
        (HeaderSettings(drop=("Content-Type",)), "engines cannot read a request without it"),
        (HeaderSettings(request_id=("x-*",)), "--request-id-header 'x-*' is not the name of a header"),
        (HeaderSettings(forward=("host",)), "the router writes it itself"),
    ],
)
def test_what_cannot_be_followed_is_refused(settings: HeaderSettings, said: str) -> None:
    (problem,) = problems_of(settings)
    assert said in problem


def test_sound_settings_have_no_problems() -> None:
    assert not list(problems_of(HeaderSettings(forward=("*",), drop=("x-a", "Baggage"))))
