"""Which prompts a router can name as the connector names them."""

from __future__ import annotations

import pytest

from kvrelay.identity.core.chunks import chain_seed, prompt_chunks
from kvrelay.router.core.kv.pool_keys import MAX_TOKENS, Naming, names_of, naming_of
from kvrelay.wire.messages import Engine

FACTS = {"kv_groups": "full_attention", "chunk_tokens": "64"}


def engine(namespace: str = "ns", **facts: str) -> Engine:
    return Engine("D0", "kv_both", namespace, {**FACTS, **facts})


def test_engines_that_agree_have_one_naming() -> None:
    assert naming_of([engine(), engine()]) == Naming("ns", 64)


@pytest.mark.parametrize(
    "engines",
    [
        [],
        [engine(), engine("another")],
        [engine(kv_groups="sliding_window(512)")],
        [engine(kv_groups="full_attention:0-3;sliding_window(512):4-7")],
        [engine(kv_groups="")],
        [engine(chunk_tokens="")],
        [engine(chunk_tokens="1")],
        [engine(chunk_tokens="-64")],
    ],
)
def test_others_have_none(engines: list[Engine]) -> None:
    assert naming_of(engines) is None


def test_names_are_the_connectors() -> None:
    names = names_of(Naming("ns", 64), range(150), "tenant")
    assert names is not None
    chunks = prompt_chunks(chain_seed("ns", salt="tenant"), range(150), 64)
    assert names.keys == [chunk.key for chunk in chunks]
    assert [names.tokens(found) for found in range(4)] == [0, 64, 128, 150]


def test_the_empty_and_the_very_long_have_no_names() -> None:
    assert names_of(Naming("ns", 64), [], "") is None
    assert names_of(Naming("ns", 64), range(MAX_TOKENS + 1), "") is None
