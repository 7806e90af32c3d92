"""The proofs of one hand-over, added up: what a client or a log line is told."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct, field

if TYPE_CHECKING:
    from kvrelay.types import Proof


class Summary(Struct):
    """Sums over a decode leg's engine requests; times are the longest."""

    proofs: int = 0
    prompt_tokens: int = 0
    handed_over_tokens: int = 0
    earlier_tokens: int = 0
    local_tokens: int = 0
    recomputed_tokens: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    """Recomputed tokens by reason; those every engine request computes in any case, its last, have none."""
    bytes: int = 0
    wait_ms: float = 0.0
    transfer_ms: float = 0.0

    def add(self, proof: Proof) -> None:
        """One more."""
        self.proofs += 1
        self.prompt_tokens += proof.prompt_tokens
        self.handed_over_tokens += proof.handed_over_tokens
        self.earlier_tokens += proof.earlier_tokens
        self.local_tokens += proof.local_tokens
        self.recomputed_tokens += proof.recomputed_tokens
        for reason, tokens in proof.reasons.items():
            self.reasons[reason] = self.reasons.get(reason, 0) + tokens
        self.bytes += proof.bytes
        self.wait_ms = max(self.wait_ms, round(proof.wait_ms, 3))
        self.transfer_ms = max(self.transfer_ms, round(proof.transfer_ms, 3))
