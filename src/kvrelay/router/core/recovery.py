"""What the router does when the decode side cannot have the KV it was promised.

The decode side tells through the hand-over's mailbox, and computes nothing until its leg is broken off (or its patience
ends). That is possible only as long as nothing was sent to the client. Where the promise is that nothing is recomputed
unseen, the answer is held back until the decode side has proven it.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import TYPE_CHECKING

from kvrelay.router.core.answers import Refusal
from kvrelay.types import OnLostKv, Reason

if TYPE_CHECKING:
    from kvrelay.router.core.records import Record
    from kvrelay.types import Lost

LOST_CODE, UNPROVABLE_CODE = "kv_lost", "kv_unprovable"

HOPELESS = frozenset({Reason.POOL_DOWN, Reason.TIMEOUT, Reason.PROMPT_LOGPROBS})
"""What another prefill would change nothing about: it would go the same way."""


class Action(Enum):
    """What to do about lost KV."""

    PREFILL = auto()
    """The decode side was asked first, and does not have it all: have it prefilled."""
    REPREFILL = auto()
    RECOMPUTE = auto()
    """Send the decode leg again: this time it is to compute what is missing."""
    REFUSE = auto()


class Recovery:
    """One request's policy, and what is left of its budget."""

    __slots__ = ("_reprefills", "asks_first", "policy")

    def __init__(self, policy: OnLostKv, *, max_reprefills: int) -> None:
        """``max_reprefills``: how often the prompt may be prefilled again."""
        self.policy = policy
        self.asks_first = False
        """Whether nothing was prefilled yet, and the decode side is to say whether that is needed."""
        self._reprefills = max_reprefills

    @property
    def proves(self) -> bool:
        """Whether nothing may reach the client before the decode side has proven what it took."""
        return self.policy in (OnLostKv.FAIL, OnLostKv.STRICT)

    def promise(self, prefill: str) -> OnLostKv:
        """What the next decode leg's engine is told. ``prefill``: who prefilled, empty if nobody did."""
        if self.policy is OnLostKv.STRICT or self.asks_first:
            return OnLostKv.STRICT
        if not prefill or (self.policy is OnLostKv.REPREFILL and not self._reprefills):
            return OnLostKv.RECOMPUTE
        return self.policy

    def lost(self, lost: Lost, *, spare: int = 0) -> Action:
        """The decode leg's engine cannot have the KV. ``spare``: so many tokens are not worth a prefill engine."""
        if self.asks_first:
            self.asks_first = False
            if lost.lost not in HOPELESS and (self.proves or lost.missing_tokens > spare):
                return Action.PREFILL
            return Action.REFUSE if self.proves else Action.RECOMPUTE
        if self.proves:
            return Action.REFUSE
        if lost.lost in HOPELESS or not self._reprefills:
            self._reprefills = 0
            return Action.RECOMPUTE
        self._reprefills -= 1
        return Action.REPREFILL

    def refusal(self, lost: Lost) -> Refusal:
        """What the client is told of KV that was lost."""
        what = (
            f"{lost.worker} would compute {lost.missing_tokens} of {lost.prompt_tokens} prompt tokens again"
            f" (reason: {lost.lost})"
        )
        return Refusal(503, LOST_CODE, f"The prompt's KV cache was lost: {what}, and {self._because}")

    def unproven(self, record: Record, expected: int) -> Refusal | None:
        """Why an answer may not go to the client; None if it may. ``expected``: how many proofs there should be."""
        if not self.proves or (self.policy is OnLostKv.FAIL and not record.prefill):
            return None
        worst = record.worst
        if worst is not None and worst.recomputed_tokens > 1:
            what = f"{worst.worker} computed {worst.recomputed_tokens} of {worst.prompt_tokens} prompt tokens again"
            said = f"The prompt's KV cache was lost: {what} (reason: {worst.reason}), and {self._because}"
        elif record.num_proofs < expected:
            said = (
                "Nothing proves that the prompt's KV cache was handed over: "
                f"{record.num_proofs} of {expected} proofs came, and {self._because}"
            )
        else:
            return None
        return Refusal(503, LOST_CODE, said)

    def unprovable(self, why: str) -> Refusal:
        """A request that can prove nothing by its nature, because of ``why``."""
        return Refusal(400, UNPROVABLE_CODE, f"{why}: the prompt is computed again in any case, and {self._because}")

    def away(self) -> Refusal:
        """No ticket: nothing can be proven now."""
        return Refusal(503, LOST_CODE, f"The pool is away: nothing can be handed over, and {self._because}")

    @property
    def _because(self) -> str:
        if self.policy is OnLostKv.STRICT:
            return "on-lost-kv is strict, which fails a request that recomputed silently"
        return "on-lost-kv is fail"
