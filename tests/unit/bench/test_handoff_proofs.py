"""What the benchmark of hand-overs takes for a proof, from notes as connectors leave them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from handoff_bench.desk import check_proof
from kvrelay.errors import KvRelayError
from kvrelay.types import Lost, Proof


def note(**more: Any) -> bytes:
    told: dict[str, Any] = {
        "handover": "bench-0", "request_id": "cmpl-1", "worker": "D0", "engine": "D0", "prompt_tokens": 257,
        "handed_over_tokens": 256, "local_tokens": 0, "recomputed_tokens": 1, "bytes": 1, "wait_ms": 0.0,
        "transfer_ms": 0.0,
    }  # fmt: skip
    return msgspec.json.encode(Proof(**told | more))


LOST = msgspec.json.encode(
    Lost(
        lost="evicted", handover="bench-0", attempt=1, request_id="cmpl-1", worker="D0",
        prompt_tokens=257, missing_tokens=257,
    )
)  # fmt: skip


def test_one_proof_of_all_but_the_last_token_is_enough() -> None:
    check_proof([note()], 256)


@pytest.mark.parametrize(
    "notes",
    [
        [note(handed_over_tokens=192, recomputed_tokens=65)],
        [note(handed_over_tokens=0, earlier_tokens=256)],
        [note(handed_over_tokens=0, local_tokens=256)],
        [note(), note()],
        [LOST],
        [b"no proof"],
        [],
    ],
    ids=["recomputed", "earlier", "local", "two", "lost", "garbage", "none"],
)
def test_what_was_not_handed_over_whole_is_not_timed(notes: list[bytes]) -> None:
    with pytest.raises(KvRelayError, match=r"D (did not take 256 prompt tokens|left what is no proof)"):
        check_proof(notes, 256)
