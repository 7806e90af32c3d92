"""KV of windows and of several block tables is staged before it is claimed, on vLLM's own scheduler and block pool.

The engines' attention checks that all it reads is true, so what is staged must be what the claim's blocks are for.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from kvrelay.client.blocking import PoolClient
from kvrelay.testing.contract_moves import said, until, until_idle
from kvrelay.testing.paged_engine import chunks_of
from kvrelay.testing.true_models import MIXED, SLIDING
from kvrelay.types import Lost, Proof

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvrelay.testing.contract_world import ContractEngine
    from kvrelay.testing.pool import PoolThread
    from kvrelay.testing.true_models import TrueModel

    Make = Callable[..., ContractEngine]

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.filterwarnings("ignore"),  # of vLLM and what it imports
    pytest.mark.parametrize("model", [replace(one, blocks=200) for one in (MIXED, SLIDING)], ids=["mixed", "sliding"]),
]
"""With so many blocks P saves all chunks: it may hold a quarter of its blocks while windows move on."""
PROMPT = list(range(100, 190))
STRICT = said("decode", prefill="prefill", policy="strict")


@pytest.fixture
def kind() -> type[ContractEngine]:
    """Only vLLM's scheduler frees what windows have passed."""
    from kvrelay.testing.vllm_engine import VllmEngine

    return VllmEngine


def prefilled(make_engine: Make, prompt: list[int], **shape: Any) -> ContractEngine:
    """An engine that has computed and saved a prompt."""
    p = make_engine("P", **shape)
    p.add("p", prompt, 1, kv_transfer_params=said("prefill"))
    until_idle(p)
    return p


def is_staged(d: ContractEngine) -> bool:
    return bool(d.side._promises.staged("d"))


def clear(pool: PoolClient) -> None:
    """The pool loses everything."""
    pool.delete([info.key for info in pool.list_objects()])


def proof(router: PoolClient) -> Proof:
    (note,) = router.collect("ho", 5.0)
    return msgspec.json.decode(note, type=Proof)


@pytest.mark.parametrize("length", [2, 8, 9, 12, 13, 14, 17, 18, 24, 25, 30, 31, 48, 49, 60, 61, 89, 90])
def test_what_is_staged_is_all_that_the_claim_needs(
    make_engine: Make, router: PoolClient, model: TrueModel, length: int
) -> None:
    """1. D stages what P saved. 2. The pool loses it. 3. D loads all but the last token, whatever the length."""
    prefilled(make_engine, PROMPT[:length], model=model)
    d = make_engine("D", model=model)
    d.add("d", PROMPT[:length], 3, kv_transfer_params=STRICT)
    until(d, lambda: is_staged(d))
    clear(router)
    until_idle(d)
    told = proof(router)
    assert (told.handed_over_tokens, told.recomputed_tokens) == (length - 1, 1), told


@pytest.mark.parametrize("length", [1, 8, 16, 17, 24, 25, 48, 60, 89])
def test_behind_what_p_generated_all_it_computed_is_staged(
    make_engine: Make, router: PoolClient, model: TrueModel, length: int
) -> None:
    """D is asked with one token more than P saved, and claims all of that."""
    prefilled(make_engine, PROMPT[:length], model=model)
    d = make_engine("D", model=model)
    params = said("decode", prefill="prefill", policy="strict", generated=1)
    d.add("d", PROMPT[: length + 1], 3, kv_transfer_params=params)
    until(d, lambda: is_staged(d))
    clear(router)
    until_idle(d)
    told = proof(router)
    assert (told.handed_over_tokens, told.recomputed_tokens) == (length, 1), told


@pytest.mark.parametrize("shape", [(2, 1), (1, 2), (2, 2)])
def test_every_rank_stages_its_share_of_each_group(
    make_engine: Make, router: PoolClient, model: TrueModel, shape: tuple[int, int]
) -> None:
    prefilled(make_engine, PROMPT, model=model)
    d = make_engine("D", model=model, tp=shape[0], pp=shape[1])
    d.add("d", PROMPT, 3, kv_transfer_params=STRICT)
    until(d, lambda: is_staged(d))
    clear(router)
    until_idle(d)
    told = proof(router)
    assert (told.handed_over_tokens, told.recomputed_tokens) == (89, 1), told


@pytest.mark.parametrize("local", [16, 40, 72, 80])
def test_a_beginning_of_its_own_is_not_staged_and_staged_after_all_once_it_is_gone(
    make_engine: Make, router: PoolClient, model: TrueModel, local: int
) -> None:
    """1. D has a beginning in its prefix cache, and stages the rest. 2. The cache is reset. 3. D stages all of it."""
    prefilled(make_engine, PROMPT, model=model)
    d = make_engine("D", model=model)
    d.add("own", PROMPT[: local + 1], 1)
    until_idle(d)
    d.add("d", PROMPT, 3, kv_transfer_params=STRICT)
    until(d, lambda: is_staged(d))
    first = d.side._promises._promises["d"].start
    assert 0 < first <= local
    assert d.scheduler.reset_prefix_cache()
    until_idle(d)
    told = proof(router)
    assert (told.local_tokens, told.handed_over_tokens, told.recomputed_tokens) == (0, 89, 1), told


def test_damage_in_any_group_is_found_before_anything_is_claimed(
    make_engine: Make, pool: PoolThread, router: PoolClient, model: TrueModel
) -> None:
    """Nobody breaks the request off, so it is computed when the patience ends: with KV that is right."""
    p = prefilled(make_engine, PROMPT, model=model)
    last = chunks_of(p.side, PROMPT)[-1]
    with PoolClient.connect(pool.unix, name="vandal") as vandal:
        prefix = vandal.match_prefix([model.geometry.groups[-1].key(last.key)], lease_s=10.0)
        assert vandal.arena is not None
        vandal.arena[prefix.views[0].offset] ^= 1
        vandal.release(prefix)
    d = make_engine("D", model=model)
    d.add("d", PROMPT, 3, kv_transfer_params=STRICT)
    until(d, lambda: d.counters.take().get("kv_lost_corrupt"))
    (note,) = router.collect("ho", 5.0)
    assert msgspec.json.decode(note, type=Lost).lost == "corrupt"
    until_idle(d)
    assert proof(router).recomputed_tokens == len(PROMPT)
