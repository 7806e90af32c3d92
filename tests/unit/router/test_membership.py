"""Who is in the fleet: rules of joining, leaving, draining and changing roles."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.errors import BadRequestError, ConflictError, KvRelayError, NotFoundError
from kvrelay.router.core.fleet import Address, Role, make_engines
from kvrelay.router.core.health import HealthSettings
from kvrelay.router.core.membership import Membership, wanted

P, D = Role.PREFILL, Role.DECODE
SETTINGS = HealthSettings()


def at(port: int) -> Address:
    return Address("h", port)


def membership(prefills: int = 1, decodes: int = 2, *, allowed: bool = True) -> Membership:
    """Prefill engines at ports 1, 2, ..., decode engines at 11, 12, ...."""
    some = make_engines(P, [at(1 + i) for i in range(prefills)], SETTINGS)
    others = make_engines(D, [at(11 + i) for i in range(decodes)], SETTINGS)
    return Membership(some + others, SETTINGS, prefills=allowed)


def test_new_engines_get_the_next_name_of_their_role_and_no_name_comes_back() -> None:
    fleet = membership()
    assert fleet.add(P, at(2)).name == "P1"
    fleet.remove(fleet.find("P1"))
    assert fleet.add(P, at(2)).name == "P2"
    assert fleet.add(D, at(20), "D3").name == "D3"
    assert [fleet.add(D, at(21 + i)).name for i in range(2)] == ["D2", "D4"]
    fleet.check_integrity()


@pytest.mark.parametrize(
    ("port", "name", "error", "says"),
    [
        (1, "", ConflictError, "P0 already, which takes requests"),
        (5, "D0", ConflictError, "choose another name"),
        (5, "no spaces", BadRequestError, "is not a name"),
        (5, "-x", BadRequestError, "is not a name"),
    ],
)
def test_what_cannot_join_is_told_why(port: int, name: str, error: type[KvRelayError], says: str) -> None:
    with pytest.raises(error, match=says):
        membership().add(P, at(port), name)


def test_where_nothing_is_handed_over_there_are_no_prefill_engines() -> None:
    fleet = membership(prefills=0, allowed=False)
    with pytest.raises(BadRequestError, match="decode engines only"):
        fleet.add(P, at(1))
    with pytest.raises(BadRequestError, match="decode engines only"):
        fleet.set_role(fleet.find("D0"), P)


def test_the_last_decode_engine_that_takes_requests_stays() -> None:
    fleet = membership()
    fleet.drain(fleet.find("D1"))
    last = fleet.find("D0")
    for change in (lambda: fleet.drain(last), lambda: fleet.leave(last), lambda: fleet.set_role(last, P)):
        with pytest.raises(ConflictError, match="D0 is the last decode engine"):
            change()
    fleet.resume(fleet.find("D1"))
    fleet.leave(last)
    assert (last.draining, last.leaving) == (True, True)


def test_an_engine_in_another_role_keeps_its_name_health_and_load() -> None:
    fleet = membership()
    old = fleet.find("D0")
    new = fleet.set_role(old, P)
    assert (new.name, new.role, new.address) == ("D0", P, old.address)
    assert new.health is old.health
    assert new.load is old.load
    assert fleet.set_role(new, P) is new
    assert [engine.name for engine in fleet.of(P)] == ["P0", "D0"]


def test_an_unknown_engine_is_told_with_those_there_are() -> None:
    with pytest.raises(NotFoundError, match="no engine 'X': there are P0, D0, D1"):
        membership().find("X")


def test_a_new_configuration_adds_removes_and_moves_and_leaves_alone_what_was_added_by_hand() -> None:
    fleet = membership(prefills=2, decodes=2)
    by_hand = fleet.add(D, at(30))
    plan = fleet.plan(wanted([at(1), at(11)], [at(12), at(13)]))
    assert plan.add == ((D, at(13)),)
    assert [(engine.name, role) for engine, role in plan.move] == [("D0", P)]
    assert [engine.name for engine in plan.remove] == ["P1"]
    assert plan.keep == ()
    assert fleet.plan(wanted([at(1)], [at(30)])).keep == (by_hand,)


def test_the_same_configuration_changes_nothing() -> None:
    plan = membership().plan(wanted([at(1)], [at(11), at(12)]))
    assert (plan.add, plan.keep, plan.move, plan.remove) == ((), (), (), ())


def test_an_engine_that_is_leaving_stays_if_it_is_configured_again() -> None:
    fleet = membership()
    leaving = fleet.find("D1")
    fleet.leave(leaving)
    assert fleet.plan(wanted([], [at(12)])).keep == (leaving,)
    assert fleet.plan(wanted([], [at(11)])).keep == ()


def test_a_configuration_that_leaves_nobody_to_answer_is_refused() -> None:
    fleet = membership()
    fleet.drain(fleet.find("D1"))
    with pytest.raises(ConflictError, match="no decode engine would take requests"):
        fleet.plan(wanted([at(11)], [at(12)]))


names = st.sampled_from(["P0", "P1", "P2", "D0", "D1", "D2", "D3"])
changes = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.sampled_from(Role), st.integers(1, 15)),
        st.tuples(st.sampled_from(["drain", "resume", "leave", "gone"]), names, st.just(0)),
        st.tuples(st.just("role"), names, st.sampled_from(Role)),
        st.tuples(
            st.just("plan"),
            st.lists(st.integers(1, 15), max_size=3, unique=True),
            st.lists(st.integers(1, 15), max_size=3, unique=True),
        ),
    ),
    max_size=40,
)


@given(changes)
def test_whatever_happens_names_are_unique_and_somebody_can_answer(events: list[tuple[object, ...]]) -> None:
    fleet = membership()
    for event in events:
        with contextlib.suppress(ConflictError, NotFoundError):
            change(fleet, event)
        fleet.check_integrity()


def change(fleet: Membership, event: tuple[object, ...]) -> None:
    match event:
        case ("add", Role() as role, int(port)):
            fleet.add(role, at(port))
        case ("drain", str(name), _):
            fleet.drain(fleet.find(name))
        case ("resume", str(name), _):
            fleet.resume(fleet.find(name))
        case ("leave", str(name), _):
            fleet.leave(fleet.find(name))
        case ("gone", str(name), _):
            if fleet.find(name).leaving:
                fleet.remove(fleet.find(name))
        case ("role", str(name), Role() as role):
            fleet.set_role(fleet.find(name), role)
        case ("plan", list(prefills), list(decodes)):
            carry_out(fleet, prefills, decodes)
        case _:
            raise AssertionError(event)


def carry_out(fleet: Membership, prefills: list[int], decodes: list[int]) -> None:
    """As the shell does it. Once a plan is made, every step of it works."""
    plan = fleet.plan(wanted([at(p) for p in prefills if p not in decodes], [at(p) for p in decodes]))
    try:
        for role, address in plan.add:
            fleet.add(role, address, configured=True)
        for engine in plan.keep:
            if engine.leaving:
                fleet.resume(engine)
            engine.configured = True
        for engine, role in sorted(plan.move, key=lambda move: move[1] is P):
            fleet.set_role(engine, role)
        for engine in plan.remove:
            fleet.leave(engine)
    except KvRelayError as error:
        raise AssertionError(f"half a plan: {error}") from error
