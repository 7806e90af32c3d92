"""What a client asks of the router itself, in request headers that no engine sees."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from msgspec import Struct

from kvrelay.errors import BadRequestError
from kvrelay.types import FirstToken, OnLostKv
from kvrelay.wire.limits import MAX_LEASE_S

if TYPE_CHECKING:
    from collections.abc import Callable

ON_LOST_KV = b"x-kvrelay-on-lost-kv"
PROOF = b"x-kvrelay-proof"
TIMEOUT = b"x-kvrelay-timeout"
PRIORITY = b"x-kvrelay-priority"
FIRST_TOKEN = b"x-kvrelay-first-token"
HEADERS = frozenset({ON_LOST_KV, PROOF, TIMEOUT, PRIORITY, FIRST_TOKEN})
"""Not passed on."""
_T = TypeVar("_T")
_PROOF = {"yes": True, "no": False}


class RequestOptions(Struct, frozen=True):
    """Checked."""

    policy: OnLostKv
    proof: bool
    """Whether the answer is to carry the proof."""
    first_token: FirstToken = FirstToken.DECODE
    """Where a stream's is to come from, if it can."""


def read_options(
    header: Callable[[bytes], bytes | None],
    default: OnLostKv,
    *,
    told: bool,
    first_token: FirstToken = FirstToken.DECODE,
) -> RequestOptions:
    """Read a request's headers. ``default``: the deployment's policy; ``told``: whether decode sides tell of losses.

    ``first_token``: the deployment's too.

    Raises:
        BadRequestError: a value is not legal; the message names the legal ones.
    """
    said = header(ON_LOST_KV)
    policy = default if said is None else _one_of(ON_LOST_KV, said, {policy.value: policy for policy in OnLostKv})
    if policy is not OnLostKv.RECOMPUTE and not told:
        raise BadRequestError(
            f"{ON_LOST_KV.decode()}: {policy} needs a pool and kvrelay's own connector, which are not here; "
            "legal: recompute"
        )
    said = header(PROOF)
    proof = said is not None and _one_of(PROOF, said, _PROOF)
    if (said := header(FIRST_TOKEN)) is not None:
        first_token = _one_of(FIRST_TOKEN, said, {source.value: source for source in FirstToken})
    return RequestOptions(policy, proof, first_token)


def read_time_limit(header: Callable[[bytes], bytes | None], default_s: float) -> float:
    """How many seconds a request may take as a whole, 0 for any time: its header's, if the deployment's is no less.

    Raises:
        BadRequestError: the header's value is none.
    """
    said = header(TIMEOUT)
    if said is None:
        return default_s
    try:
        asked_s = float(said)
    except ValueError:
        asked_s = 0.0
    if not 0 < asked_s <= MAX_LEASE_S:
        shown = said[:64].decode("latin-1")
        raise BadRequestError(f"{TIMEOUT.decode()}: {shown!r} is not a time; legal: seconds up to {MAX_LEASE_S:g}")
    return min(asked_s, default_s) if default_s else asked_s


def _one_of(name: bytes, said: bytes, legal: dict[str, _T]) -> _T:
    text = said.decode("latin-1").strip().lower()
    if text not in legal:
        raise BadRequestError(f"{name.decode()}: {text[:64]!r} is not known; legal: {', '.join(legal)}")
    return legal[text]
