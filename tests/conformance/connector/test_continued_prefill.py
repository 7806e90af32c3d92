"""A decode engine asked for a prompt and the token a prefill engine generated: it finds all that engine computed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from kvrelay.testing.contract_moves import said, until_idle
from kvrelay.types import Proof

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvrelay.client.blocking import PoolClient
    from kvrelay.testing.contract_world import ContractEngine

    Make = Callable[..., ContractEngine]

FIRST = 7


def hand_over(make_engine: Make, router: PoolClient, length: int, generated: int, **shape: Any) -> Proof:
    """Of a prompt of so many tokens; the decode engine is told of so many generated ones at its end."""
    p, d = make_engine("P", **shape), make_engine("D", **shape)
    prompt = list(range(100, 100 + length))
    p.add("p", prompt, 1, kv_transfer_params=said("prefill"))
    until_idle(p)
    params = said("decode", prefill="prefill", generated=generated)
    d.add("d", [*prompt, FIRST], 3, kv_transfer_params=params)
    until_idle(d)
    (note,) = router.collect("ho", 5.0)
    assert router.stat()["leases"] == 0
    return msgspec.json.decode(note, type=Proof)


@pytest.mark.parametrize("length", [1, 5, 15, 16, 17, 31, 32, 33, 47, 48, 49, 90])
def test_only_the_generated_token_is_computed(make_engine: Make, router: PoolClient, length: int) -> None:
    told = hand_over(make_engine, router, length, 1)
    assert (told.prompt_tokens, told.handed_over_tokens, told.recomputed_tokens) == (length + 1, length, 1), told
    assert told.reason == ""


def test_ranks_of_it_do_the_same(make_engine: Make, router: PoolClient) -> None:
    told = hand_over(make_engine, router, 90, 1, tp=2)
    assert (told.handed_over_tokens, told.recomputed_tokens) == (90, 1), told


def test_an_engine_that_is_not_told_finds_whole_chunks_only(make_engine: Make, router: PoolClient) -> None:
    told = hand_over(make_engine, router, 90, 0)
    assert told.recomputed_tokens > 1
    assert told.reason == "partial"


@pytest.mark.parametrize("generated", [-1, 91, 10_000])
def test_a_number_that_cannot_be_is_none(make_engine: Make, router: PoolClient, generated: int) -> None:
    told = hand_over(make_engine, router, 90, generated)
    assert told.recomputed_tokens > 1
