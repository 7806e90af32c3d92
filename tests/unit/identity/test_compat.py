from __future__ import annotations

from kvrelay.identity.core.compat import difference, known_as, strangers
from kvrelay.wire.messages import Engine


def engine(name: str, namespace: str = "n", role: str = "", **facts: str) -> Engine:
    return Engine(name, role or ("kv_consumer" if name.startswith("D") else "kv_both"), namespace, facts)


def names(pairs: list[tuple[Engine, Engine]]) -> list[tuple[str, str]]:
    return [(one.engine, other.engine) for one, other in pairs]


def test_a_difference_names_every_differing_fact_and_both_values() -> None:
    one, other = engine("P0", "a", layers="4", kv_dtype="float32"), engine("D0", "b", layers="4", rope="r" * 50)
    assert difference(one, other) == (
        "P0 and D0 cannot exchange KV: kv dtype is float32 on P0 and not stated on D0; "
        "rope is not stated on P0 and rrrrrrrrrrrr… on D0"
    )


def test_engines_of_one_namespace_are_no_strangers() -> None:
    assert strangers([engine("P0"), engine("P1"), engine("D0"), engine("D1")]) == []


def test_both_sides_of_a_pair_that_cannot_meet_are_strangers() -> None:
    assert names(strangers([engine("P0", "a"), engine("D0", "b")])) == [("P0", "D0"), ("D0", "P0")]


def test_prefill_engines_that_agree_only_with_each_other_are_strangers() -> None:
    found = strangers([engine("P0", "a"), engine("P1", "b"), engine("P2", "b"), engine("D0", "a")])
    assert names(found) == [("P1", "D0"), ("P2", "D0")]


def test_a_decode_engine_alone_among_others_is_the_stranger() -> None:
    assert names(strangers([engine("P0", "a"), engine("D0", "a"), engine("D1", "b")])) == [("D1", "P0")]


def test_nobody_is_a_stranger_before_the_other_side_has_come() -> None:
    assert strangers([]) == []
    assert strangers([engine("P0", "a")]) == []
    assert strangers([engine("P0", "a", "kv_producer"), engine("P1", "b", "kv_producer")]) == []


def test_engines_that_do_both_are_strangers_where_no_two_agree() -> None:
    assert strangers([engine("A"), engine("B")]) == []
    assert names(strangers([engine("A", "a"), engine("B", "b")])) == [("A", "B"), ("B", "A")]


def test_engines_that_do_both_decode_for_those_that_only_write() -> None:
    assert names(strangers([engine("A", "a", "kv_producer"), engine("B", "a"), engine("C", "b")])) == [("C", "A")]


def test_data_parallel_ranks_are_known_by_their_engines_name() -> None:
    engines = [engine("P0-dp0"), engine("P0-dp1"), engine("D0"), engine("other"), engine("P0-dpx")]
    assert [e.engine for e in known_as(engines, {"P0", "D0"})] == ["P0-dp0", "P0-dp1", "D0"]
