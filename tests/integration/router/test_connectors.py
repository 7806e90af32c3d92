"""The legs as each connector wants them, through a real router in front of fake engines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvrelay.testing.fake_engine import drop
from kvrelay.testing.raw_http import get, post

if TYPE_CHECKING:
    from kvrelay.router.service import RouterService

ASK = {"prompt": "a", "max_tokens": 4}
BLOCKS = {"do_remote_prefill": True, "remote_block_ids": [[1, 2]], "remote_engine_id": "e"}


async def test_push_engines_never_see_a_clients_own_request_id(engine: Any, router: Any) -> None:
    """Two clients that send one id at once would get each other's KV: the two sides match requests by it."""
    prefill, decode = await engine(), await engine()
    prefill.carried = BLOCKS
    service: RouterService = await router([prefill], [decode], connector="nixl-push")
    answers = [await post(service.port, "/v1/completions", ASK, headers="x-request-id: mine\r\n") for _ in range(2)]
    for answer, p_leg, d_leg in zip(answers, prefill.requests, decode.requests, strict=True):
        assert p_leg.headers["x-request-id"] == d_leg.headers["x-request-id"] == answer.headers["x-kvrelay-handover"]
        assert answer.headers["x-request-id"] == "mine"
        assert d_leg.json["kv_transfer_params"] == BLOCKS
    assert len({leg.headers["x-request-id"] for leg in decode.requests}) == 2


async def test_multi_carries_nixls_blocks_and_names_the_handover_to_both(engine: Any, router: Any) -> None:
    prefill, decode = await engine(), await engine()
    prefill.carried = BLOCKS
    service: RouterService = await router([prefill], [decode], connector="multi")
    handover = (await post(service.port, "/v1/completions", ASK)).headers["x-kvrelay-handover"]
    p_params, d_params = (leg.json["kv_transfer_params"] for leg in (prefill.requests[0], decode.requests[0]))
    assert p_params["do_remote_decode"] is True
    assert p_params["kvrelay"] == {"handover": handover, "leg": "prefill", "worker": "P0"}
    named = d_params.pop("kvrelay")
    assert d_params == BLOCKS
    assert named.items() >= {"handover": handover, "leg": "decode", "prefill": "P0", "worker": "D0"}.items()


async def test_multi_gives_a_second_d_the_pools_part_only(engine: Any, router: Any) -> None:
    prefill, bad, good = await engine(), await engine(), await engine()
    prefill.carried = BLOCKS
    bad.script(drop())
    service: RouterService = await router([prefill], [bad, good], connector="multi")
    answer = await post(service.port, "/v1/completions", ASK)
    assert answer.status == 200
    assert answer.headers["x-kvrelay-prefill"] == "p0"
    params = good.requests[0].json["kv_transfer_params"]
    assert params["do_remote_prefill"] is False
    assert "remote_block_ids" not in params
    assert params["kvrelay"]["prefill"] == "P0"


async def test_multi_hands_batches_over_by_the_pool(engine: Any, router: Any) -> None:
    prefill, decode = await engine(), await engine()
    service: RouterService = await router([prefill], [decode], connector="multi")
    answer = await post(service.port, "/v1/completions", {"prompt": ["a", "b"]})
    assert answer.headers["x-kvrelay-prefill"] == "p0"
    assert prefill.requests[0].json["kv_transfer_params"]["do_remote_decode"] is False
    assert decode.requests[0].json["kv_transfer_params"]["do_remote_prefill"] is False


async def test_shared_storage_gives_engines_no_parameters_and_a_clients_own_do_not_pass(
    engine: Any, router: Any
) -> None:
    prefill, decode = await engine(), await engine()
    service: RouterService = await router([prefill], [decode], connector="shared-storage")
    answer = await post(service.port, "/v1/completions", {**ASK, "kv_transfer_params": {"evil": 1}})
    assert answer.headers["x-kvrelay-prefill"] == "p0"
    for leg in prefill.requests + decode.requests:
        assert "kv_transfer_params" not in leg.json
    assert prefill.requests[0].json["max_tokens"] == 1
    assert decode.requests[0].json == ASK


async def test_what_hands_nothing_over_needs_no_prefill_engine_and_claims_none(engine: Any, router: Any) -> None:
    decode = await engine()
    service: RouterService = await router([], [decode], connector="offloading")
    answer = await post(service.port, "/v1/completions", ASK)
    assert answer.status == 200
    assert "x-kvrelay-prefill" not in answer.headers
    record = (await get(service.port, f"/kvrelay/handovers/{answer.headers['x-kvrelay-handover']}")).json
    assert record["prefill"] is None
    assert record["detours"] == [{"reason": "no_handover", "worker": ""}]
    assert decode.requests[0].json == ASK
