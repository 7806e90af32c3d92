"""What is told of several proofs of one hand-over."""

from __future__ import annotations

from kvrelay.router.core.summary import Summary
from kvrelay.types import Proof


def proof(wait_ms: float, transfer_ms: float, **more: int) -> Proof:
    return Proof(
        handover="h", request_id="r", worker="D0", engine="e", prompt_tokens=10, handed_over_tokens=6, local_tokens=1,
        recomputed_tokens=3, bytes=100, wait_ms=wait_ms, transfer_ms=transfer_ms, reasons={"miss": 2, **more},
    )  # fmt: skip


def test_tokens_and_bytes_add_up_and_of_times_the_longest_counts() -> None:
    summary = Summary()
    for wait_ms, transfer_ms in ((4.0, 9.0), (8.00049, 2.0), (6.0, 3.0)):
        summary.add(proof(wait_ms, transfer_ms, partial=1))
    assert (summary.wait_ms, summary.transfer_ms) == (8.0, 9.0)
    assert (summary.proofs, summary.prompt_tokens, summary.recomputed_tokens) == (3, 30, 9)
    assert (summary.handed_over_tokens, summary.local_tokens, summary.bytes) == (18, 3, 300)
    assert summary.reasons == {"miss": 6, "partial": 3}
