"""What is remembered of the last hand-overs."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct, field

from kvrelay.router.core.lifecycle import TIMESTAMPS, Lifecycle
from kvrelay.router.core.summary import Summary

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from kvrelay.router.core.conditional import Verdict
    from kvrelay.types import Lost, OnLostKv, Proof

MAX_RECORDS = 1_024
MAX_PROOFS = 128
"""Kept of one hand-over: a batch may have any number of prompts."""


class Detour(Struct, frozen=True):
    """A departure from the straight way, and why. ``worker``: the engine it happened on, if one."""

    reason: str
    worker: str = ""


class Record(Struct, eq=False):
    """One hand-over: who did it, how it went, what the decode side says it found."""

    life: Lifecycle
    prefill: str = ""
    """Empty if nobody prefilled: the decode engine did it all."""
    decode: str = ""
    policy: OnLostKv | None = None
    """What was to be done if KV was lost."""
    prefills: list[str] = field(default_factory=list)
    """Who answered each prefill leg, in turn."""
    detours: list[Detour] = field(default_factory=list)
    token_ids: str = ""
    """Where its token ids came from before it was routed, or why there were none; empty if nobody wanted them."""
    first_token: str = ""
    """Where it was to come from P: ``prefill``, or why it did not."""
    proofs: list[Proof] = field(default_factory=list)
    summary: Summary = field(default_factory=Summary)
    """Of all proofs there were."""
    worst: Proof | None = None
    """The proof of the most recomputed tokens."""
    losses: list[Lost] = field(default_factory=list)
    """What decode legs that were broken off could not have."""
    verdict: Verdict | None = None
    """What was decided about its prompt, where that was a question."""
    on_proof: Callable[[Proof], None] | None = None
    """Who wants to know what the decode side tells."""

    @property
    def num_proofs(self) -> int:
        """How many proofs there were, of the current decode leg."""
        return self.summary.proofs

    def begin_leg(self) -> None:
        """A decode leg is sent: what an earlier one proved concerns nobody any more."""
        self.proofs.clear()
        self.summary = Summary()
        self.worst = None

    def told(self, expected: int) -> bytes:
        """For a client: one line of JSON. ``expected``: how many proofs there should be."""
        said: dict[str, Any] = {
            "handover": self.life.name,
            "policy": self.policy,
            "prefills": self.prefills,
            "decode": self.decode or None,
            "expected": expected,
        }
        losses = [lost.lost for lost in self.losses]
        return msgspec.json.encode({**said, **msgspec.structs.asdict(self.summary), "losses": losses})

    def prove(self, proof: Proof) -> None:
        """The decode side tells what it found."""
        self.summary.add(proof)
        if self.on_proof is not None:
            self.on_proof(proof)
            self.on_proof = None
        if self.worst is None or proof.recomputed_tokens > self.worst.recomputed_tokens:
            self.worst = proof
        if len(self.proofs) < MAX_PROOFS:
            self.proofs.append(proof)

    def view(self) -> dict[str, Any]:
        """As ``GET /kvrelay/handovers/{id}`` shows it; timestamps are Unix seconds, null where nothing happened."""
        stamps = self.life.timestamps
        return {
            "handover": self.life.name,
            "state": self.life.state.name.lower(),
            "prefill": self.prefill or None,
            "decode": self.decode or None,
            "policy": self.policy,
            "prefills": self.prefills,
            "detours": self.detours,
            "verdict": self.verdict,
            "token_ids": self.token_ids or None,
            "first_token": self.first_token or None,
            "proofs": self.proofs,
            "num_proofs": self.num_proofs,
            "losses": self.losses,
            "timestamps": {name: stamps.get(name) for name in TIMESTAMPS},
        }


class RecordBook:
    """The last hand-overs by id; the oldest give way."""

    def __init__(self, capacity: int = MAX_RECORDS) -> None:
        """``capacity``: how many are kept."""
        self._capacity = capacity
        self._records: OrderedDict[str, Record] = OrderedDict()

    def add(self, record: Record) -> None:
        """Remember a new one."""
        self._records[record.life.name] = record
        if len(self._records) > self._capacity:
            self._records.popitem(last=False)

    def find(self, handover: str) -> Record | None:
        """The record, unless it is unknown or has given way."""
        return self._records.get(handover)
