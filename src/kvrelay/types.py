"""Vocabulary shared by all parts."""

from __future__ import annotations

from enum import StrEnum

import msgspec
from msgspec import Struct, field


class Reason(StrEnum):
    """Why prompt tokens were computed instead of taken from the pool."""

    NONE = ""
    """Nothing was, but for the last token, which vLLM always computes."""
    NEW = "new"
    """Never in a proof: no hand-over was promised, and the pool did not have it."""
    MISS = "miss"
    PARTIAL = "partial"
    WRITER_LOST = "writer_lost"
    CORRUPT = "corrupt"
    POOL_DOWN = "pool_down"
    TIMEOUT = "timeout"
    LEASE_EXPIRED = "lease_expired"
    PROMPT_LOGPROBS = "prompt_logprobs"
    ADAPTER = "adapter"
    NO_KEYS = "no_keys"
    FAILED_LOAD = "failed_load"
    STAGING_FULL = "staging_full"
    """Never in a proof: the workers had no memory to stage it, so it was loaded without."""


class OnLostKv(StrEnum):
    """What becomes of a request whose decode side cannot have the KV it was promised."""

    RECOMPUTE = "recompute"
    """The decode side computes what is missing."""
    REPREFILL = "reprefill"
    """A prefill engine computes the prompt again; the decode side then takes it from there."""
    FAIL = "fail"
    """The request fails."""
    STRICT = "strict"
    """The request fails, and so does one that was promised nothing and would compute more than its last token."""


class Dispatch(StrEnum):
    """When a decode leg is sent."""

    SEQUENTIAL = "sequential"
    """When the prefill leg has been answered."""
    OVERLAPPED = "overlapped"
    """When the prefill leg has been sent: the decode side takes each layer as it is computed."""
    DECODE_FIRST = "decode-first"
    """At once; a prefill leg is sent if the decode side lacks any of the KV, and then the decode leg again."""


class FirstToken(StrEnum):
    """Whose first token a stream begins with, where that makes no other difference to it."""

    PREFILL = "prefill"
    """The prefill side's, as soon as it is there; the decode side continues."""
    DECODE = "decode"


class Tokenising(StrEnum):
    """How often a prompt becomes token ids."""

    ONCE = "once"
    """By the prefill side, where nothing else of the request needs its text; the decode side is given the ids."""
    TWICE = "twice"


class Lost(Struct, frozen=True, kw_only=True):
    """The decode side's connector cannot have what was promised to a request, and computes nothing for now."""

    lost: str
    """Why: a `Reason`."""
    handover: str
    attempt: int
    request_id: str
    worker: str
    prompt_tokens: int
    missing_tokens: int
    """How many of them it would have to compute, the last one included."""


class Proof(Struct, frozen=True, kw_only=True):
    """What the decode side's connector saw of one hand-over.

    ``prompt_tokens == handed_over_tokens + earlier_tokens + local_tokens + recomputed_tokens``.
    """

    handover: str
    request_id: str
    worker: str
    """The router's name for the decode engine."""
    engine: str
    """The engine's own name for itself."""
    prompt_tokens: int
    handed_over_tokens: int
    """Prompt tokens whose KV this hand-over's prefill put into the pool."""
    earlier_tokens: int = 0
    """Prompt tokens whose KV was in the pool before, or was put there by somebody else."""
    local_tokens: int
    """Prompt tokens found in the engine's own prefix cache."""
    recomputed_tokens: int
    bytes: int
    """Bytes loaded from the pool, on all ranks together."""
    wait_ms: float
    """From the decision to load until the KV was there."""
    transfer_ms: float
    """Of which: moving bytes, on the slowest rank."""
    reason: str = ""
    """The main reason, if more than the last token was recomputed."""
    reasons: dict[str, int] = field(default_factory=dict)
    """Every reason, and how many of the recomputed tokens are due to it."""
    attempt: int = 1
    """Which decode leg of the hand-over this was; the first is 1."""


_decode_proof = msgspec.json.Decoder(Proof).decode
_decode_lost = msgspec.json.Decoder(Lost).decode


def read_note(note: bytes) -> Proof | Lost:
    """What a connector left in a hand-over's mailbox. Raises `msgspec.MsgspecError` if it is neither."""
    try:
        return _decode_proof(note)
    except msgspec.ValidationError:
        return _decode_lost(note)
