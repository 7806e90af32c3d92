"""What each connector's legs are given."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvrelay.profiles.base import DecodeLeg
from kvrelay.profiles.multi import Multi
from kvrelay.profiles.nixl import Nixl
from kvrelay.profiles.pooled import KvRelay
from kvrelay.profiles.shared_storage import SharedStorage
from kvrelay.router.core.legs import ClientBody, Endpoint, parse_fields
from kvrelay.types import OnLostKv


def body(**fields: Any) -> ClientBody:
    return ClientBody(Endpoint.COMPLETIONS, parse_fields(json.dumps(fields).encode()))


def leg(prefill: str) -> DecodeLeg:
    return DecodeLeg(handover="ho-1", worker="D1", prefill=prefill, policy=OnLostKv.FAIL, attempt=2)


def test_kvrelay_names_the_handover_on_both_legs() -> None:
    profile = KvRelay()
    assert json.loads(profile.prefill_params("ho-1", "P0", body(prompt="a")) or b"") == {
        "do_remote_decode": True, "do_remote_prefill": False,
        "kvrelay": {"handover": "ho-1", "leg": "prefill", "worker": "P0"},
    }  # fmt: skip
    carried = profile.carry(b"whatever")
    assert json.loads(profile.decode_params(leg("P0"), carried) or b"") == {
        "do_remote_prefill": True, "do_remote_decode": False,
        "kvrelay": {"handover": "ho-1", "leg": "decode", "prefill": "P0", "worker": "D1",
                    "policy": "fail", "attempt": 2},
    }  # fmt: skip


def test_kvrelay_asks_for_a_proof_even_when_nobody_prefilled() -> None:
    params = json.loads(KvRelay().decode_params(leg(""), None) or b"")
    assert params["do_remote_prefill"] is False
    assert params["kvrelay"]["prefill"] == ""


def test_nixl_params_are_forwarded_byte_for_byte() -> None:
    params = b'{"remote_block_ids": [[1,  2]],"remote_port":5.0, "new": {"x":null}}'
    profile = Nixl()
    carried = profile.carry(b'{"id":"x","kv_transfer_params":' + params + b',"usage":{}}')
    assert carried == params
    assert profile.decode_params(leg("P0"), carried) == params


@pytest.mark.parametrize("answer", [b"{}", b'{"kv_transfer_params":null}', b"not json", b'{"kv_transfer_params":[]}'])
def test_an_answer_without_nixl_params_carries_nothing(answer: bytes) -> None:
    assert Nixl().carry(answer) is None


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"prompt": "a"}, ""),
        ({"prompt": "a", "n": 2}, "several_engine_requests"),
        ({"prompt": ["a", "b"]}, "several_engine_requests"),
        ({"prompt": "a", "use_beam_search": True}, "beam_search"),
        ({"prompt": "a", "prompt_logprobs": 1}, "prompt_logprobs"),
    ],
)
def test_nixl_disaggregates_only_what_one_reader_reads(fields: dict[str, Any], reason: str) -> None:
    assert Nixl().bypass(body(**fields)) == reason


def test_kvrelay_disaggregates_batches_and_several_continuations() -> None:
    assert KvRelay().bypass(body(prompt=["a", "b"], n=2)) == ""
    assert KvRelay().bypass(body(prompt="a", prompt_logprobs=1)) == "prompt_logprobs"


def test_what_an_engine_may_have_begun_to_read_is_void_where_it_is_read_once() -> None:
    assert KvRelay().spent(b"") == b""
    assert Nixl().spent(b'{"remote_block_ids":[1]}') is None
    assert Multi().spent(b'{"remote_block_ids":[1]}') == b""  # the pool still has it
    assert Multi().spent(None) is None


def test_multi_gives_both_connectors_their_parameters() -> None:
    profile = Multi()
    prefill = json.loads(profile.prefill_params("ho-1", "P0", body(prompt="a")) or b"")
    assert prefill["do_remote_decode"] is True
    assert prefill["kvrelay"] == {"handover": "ho-1", "leg": "prefill", "worker": "P0"}
    told = b'{"do_remote_prefill":true,"remote_block_ids":[[1,  2]]}'
    carried = profile.carry(b'{"kv_transfer_params":' + told + b"}")
    assert carried == told
    assert json.loads(profile.decode_params(leg("P0"), carried) or b"") == {
        "do_remote_prefill": True, "remote_block_ids": [[1, 2]],
        "kvrelay": {"handover": "ho-1", "leg": "decode", "prefill": "P0", "worker": "D1",
                    "policy": "fail", "attempt": 2},
    }  # fmt: skip


def test_multi_keeps_no_blocks_that_nobody_will_read_and_promises_none_it_cannot_describe() -> None:
    """NIXL told to load without a description kills its engine; blocks nobody asks for stay pinned."""
    profile = Multi()
    prefill = json.loads(profile.prefill_params("ho-1", "P0", body(prompt=["a", "b"])) or b"")
    assert prefill["do_remote_decode"] is False
    assert profile.carry(b'{"kv_transfer_params":null}') == b""
    for carried in (b"", None):
        decode = json.loads(profile.decode_params(leg("P0"), carried) or b"")
        assert decode["do_remote_prefill"] is False
        assert decode["kvrelay"]["handover"] == "ho-1"


def test_shared_storage_gives_the_legs_nothing() -> None:
    profile = SharedStorage()
    assert profile.prefill_params("ho-1", "P0", body(prompt="a")) is None
    assert profile.carry(b"{}") == b""
    assert profile.decode_params(leg("P0"), b"") is None
