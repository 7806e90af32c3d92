from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvrelay.identity.core.namespace import canonical, namespace

facts = st.dictionaries(st.text(max_size=6), st.text(max_size=6), max_size=4)


@given(facts)
def test_the_order_of_facts_does_not_matter(one: dict[str, str]) -> None:
    assert namespace(one) == namespace(dict(reversed(list(one.items()))))


@given(facts, facts)
def test_different_facts_never_share_a_namespace(one: dict[str, str], other: dict[str, str]) -> None:
    assert (namespace(one) == namespace(other)) == (one == other)


def test_a_name_cannot_borrow_from_its_value() -> None:
    assert canonical({"ab": "c"}) != canonical({"a": "bc"})


def test_a_namespace_is_the_same_in_every_process_and_version() -> None:
    expected = "c2c186c2f2ab57e312fa4b64b520701503ae310e50f32a4054372741e1b79532"
    assert namespace({"layers": "4", "dtype": "float32"}) == expected
