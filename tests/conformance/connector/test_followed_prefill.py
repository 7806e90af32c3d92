"""A decode engine asked while a prefill engine still computes: vLLM's contract holds, whatever becomes of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from kvrelay.testing.contract_moves import said, until, until_idle
from kvrelay.types import Proof

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvrelay.client.blocking import PoolClient
    from kvrelay.testing.contract_world import ContractEngine

    Make = Callable[..., ContractEngine]

PROMPT = list(range(100, 190))


FOLLOW = said("decode", prefill="prefill", overlapped=True)


def proof(router: PoolClient) -> Proof:
    (note,) = router.collect("ho", 5.0)
    return msgspec.json.decode(note, type=Proof)


@pytest.mark.parametrize("shape", [{}, {"tp": 2}])
def test_a_prompt_is_taken_while_another_engine_computes_it(
    make_engine: Make, router: PoolClient, shape: dict[str, Any]
) -> None:
    """1. D has its blocks and waits. 2. P computes in several steps. 3. D computes the last token."""
    p, d = make_engine("P", **shape), make_engine("D", **shape)
    d.add("d", PROMPT, 3, kv_transfer_params=FOLLOW)
    until(d, lambda: router.stat()["waiting"])
    p.add("p", PROMPT, 1, kv_transfer_params=said("prefill"))
    until_idle(p)
    router.seal_ticket("ho")
    until_idle(d)
    told = proof(router)
    assert (told.handed_over_tokens, told.recomputed_tokens) == (len(PROMPT) - 1, 1), told
    assert router.stat()["leases"] == 0


def test_a_prompt_that_nobody_computes_is_computed_here(make_engine: Make, router: PoolClient) -> None:
    d = make_engine("D")
    d.add("d", PROMPT, 3, kv_transfer_params=FOLLOW)
    until(d, lambda: router.stat()["waiting"])
    router.seal_ticket("ho")
    until_idle(d)
    told = proof(router)
    assert (told.handed_over_tokens, told.recomputed_tokens, told.reason) == (0, len(PROMPT), "miss"), told


def test_a_prefill_that_is_aborted_leaves_what_it_had_computed(make_engine: Make, router: PoolClient) -> None:
    """1. P computes part of the prompt. 2. Its request is aborted. 3. The ticket is sealed. 4. D computes the rest."""
    p, d = make_engine("P"), make_engine("D")
    d.add("d", PROMPT, 3, kv_transfer_params=FOLLOW)
    until(d, lambda: router.stat()["waiting"])
    p.add("p", PROMPT, 1, kv_transfer_params=said("prefill"))
    until(p, lambda: router.stat()["objects"])
    p.scheduler.abort("p")
    until_idle(p)
    router.seal_ticket("ho")
    until_idle(d)
    told = proof(router)
    assert told.handed_over_tokens + told.recomputed_tokens == len(PROMPT), told


def test_a_request_that_is_aborted_while_it_follows_leaves_nothing_behind(
    make_engine: Make, router: PoolClient
) -> None:
    d = make_engine("D")
    d.add("d", PROMPT, 3, kv_transfer_params=FOLLOW)
    until(d, lambda: router.stat()["waiting"])
    d.scheduler.abort("d")
    until_idle(d)
    assert (router.stat()["waiting"], router.stat()["leases"]) == (0, 0)
