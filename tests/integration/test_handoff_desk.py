"""The benchmark's hand-overs on a real pool: tickets as a router has them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from handoff_bench.desk import Desk
from kvrelay.client.blocking import PoolClient
from kvrelay.errors import KvRelayError, NotFoundError
from kvrelay.profiles.registry import PROFILES
from kvrelay.types import Proof

if TYPE_CHECKING:
    from kvrelay.testing.pool import PoolThread


def proof(handover: str, tokens: int) -> bytes:
    """As D's connector leaves one."""
    return msgspec.json.encode(
        Proof(
            handover=handover,
            request_id="cmpl-1",
            worker="D0",
            engine="D0",
            prompt_tokens=tokens + 1,
            handed_over_tokens=tokens,
            local_tokens=0,
            recomputed_tokens=1,
            bytes=1,
            wait_ms=0.0,
            transfer_ms=0.0,
        )
    )


def test_a_hand_over_has_a_ticket_from_its_prefill_leg_to_its_proof(pool: PoolThread) -> None:
    desk = Desk(PROFILES["kvrelay"], pool.unix)
    with PoolClient.connect(pool.unix, name="D0") as decode, desk.handover() as handover:
        asked = handover.prefill_params()
        assert asked is not None
        assert asked["kvrelay"] == {"handover": handover.name, "leg": "prefill", "worker": "P0"}
        asked = handover.decode_params(b"{}")
        assert asked is not None
        assert (asked["do_remote_prefill"], asked["kvrelay"]["handover"]) == (True, handover.name)
        assert (asked["kvrelay"]["leg"], asked["kvrelay"]["prefill"]) == ("decode", "P0")
        decode.post(handover.name, proof(handover.name, 256))
        handover.prove(256)
        decode.post(handover.name, proof(handover.name, 192))
        with pytest.raises(KvRelayError, match="did not take 256"):
            handover.prove(256)
    with PoolClient.connect(pool.unix, name="D0") as decode, pytest.raises(NotFoundError):
        decode.post(handover.name, b"late")
    desk.close()


def test_each_hand_over_has_a_ticket_of_its_own_and_d_may_be_asked_early(pool: PoolThread) -> None:
    desk = Desk(PROFILES["kvrelay"], pool.unix)
    with desk.handover() as one, desk.handover() as other:
        assert one.name != other.name
        asked = other.decode_params(overlapped=True)
        assert asked is not None
        assert asked["kvrelay"]["overlapped"] is True
        other.seal()
    desk.close()


def test_other_connectors_have_no_tickets_and_carry_what_p_answered() -> None:
    desk = Desk(PROFILES["nixl"], "")
    with desk.handover() as handover:
        asked = handover.prefill_params()
        assert asked is not None
        assert asked["do_remote_decode"] is True
        carried = {"do_remote_prefill": True, "remote_block_ids": [1, 2]}
        assert handover.decode_params(msgspec.json.encode({"kv_transfer_params": carried})) == carried
        handover.prove(256)
    desk.close()
