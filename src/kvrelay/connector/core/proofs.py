"""The proof of a hand-over: what became of a prompt's tokens, from what the ledger knows of the request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvrelay.types import Proof, Reason

if TYPE_CHECKING:
    from kvrelay.connector.core.requests import Entry


def proof_of(entry: Entry, computed: int, engine: str) -> Proof:
    """For a request that is first scheduled on ``engine`` with ``computed`` tokens there.

    ``handover`` is empty unless this is the decode leg of one.
    """
    over = entry.hand_over if entry.hand_over and entry.hand_over.leg == "decode" else None
    computed = min(computed, entry.prompt_tokens)
    local = min(entry.local, computed)
    recomputed = entry.prompt_tokens - computed
    fresh = sum(max(0, min(chunk.end, computed) - max(chunk.start, local)) for chunk in entry.fresh)
    reasons = _reasons(entry, computed) if recomputed > 1 else {}
    return Proof(
        handover=over.id if over else "",
        request_id=entry.request_id,
        worker=over.worker if over else "",
        engine=engine,
        prompt_tokens=entry.prompt_tokens,
        handed_over_tokens=fresh,
        earlier_tokens=computed - local - fresh,
        local_tokens=local,
        recomputed_tokens=recomputed,
        bytes=entry.bytes,
        wait_ms=entry.wait_s * 1e3,
        transfer_ms=entry.transfer_s * 1e3,
        reason=max(reasons, key=reasons.__getitem__, default=""),
        reasons=reasons,
        attempt=over.attempt if over else 1,
    )


def _reasons(entry: Entry, computed: int) -> dict[str, int]:
    """Why the prompt's tokens from ``computed`` on were not loaded: how many, by reason."""
    found = max(computed, min(entry.found_end, entry.prompt_tokens))
    tokens = {
        str(entry.short or entry.reason or Reason.MISS): entry.prompt_tokens - found,
        # of what was found
        str(entry.reason or entry.short or Reason.MISS): found - computed,
    }
    if len(tokens) == 1:
        return dict.fromkeys(tokens, entry.prompt_tokens - computed)
    return {reason: count for reason, count in tokens.items() if count}
