"""One stream that is to begin with P's token: what its legs are asked, and what the client gets when."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvrelay.router.core.answers import Refusal
from kvrelay.router.core.continuation import Continuation
from kvrelay.router.core.first_events import read_opening
from kvrelay.router.core.first_token import (
    SkipReason,
    decode_leg,
    is_stream,
    limit_of,
    prefill_leg,
    reason_against,
)
from kvrelay.router.core.fleet import Role
from kvrelay.router.http.messages import end_to_end, find
from kvrelay.router.models import key_of
from kvrelay.router.pending_error import PendingError
from kvrelay.router.relay import is_events
from kvrelay.types import FirstToken, OnLostKv

if TYPE_CHECKING:
    from kvrelay.router.core.engine_defaults import Defaults
    from kvrelay.router.core.first_events import FirstEvents
    from kvrelay.router.core.fleet import Engine
    from kvrelay.router.handover import Handover
    from kvrelay.router.http.call import Call
    from kvrelay.router.http.messages import Headers


def begin_early(handover: Handover, *, prefills: bool) -> EarlyStream | None:
    """What begins a stream with P's token; None where that is not asked for, or cannot be.

    ``prefills``: whether a prefill engine is asked before any other.
    """
    if handover.options.first_token is not FirstToken.PREFILL or not is_stream(handover.body):
        return None
    early = EarlyStream(handover)
    against = early.stands_against() if prefills else SkipReason.ALONE
    if against is None:
        return early
    early.settle(against)
    return None


class EarlyStream:
    """The first token of one stream, from the prefill leg to its place before the decode leg's answer."""

    __slots__ = ("_handover", "_headers", "_key", "_limit", "_opening", "_prefill", "sent")

    def __init__(self, handover: Handover) -> None:
        """See `begin_early`."""
        self._handover = handover
        self._opening: FirstEvents | None = None
        self._headers: Headers = []
        self._key = key_of(handover.request)
        self._prefill: Defaults | None = None
        self._limit: int | None = None
        self.sent = False
        """Whether the client has the first token: from then on decode engines are asked to continue it."""

    def stands_against(self) -> SkipReason | None:
        """What stands against it before anybody is asked."""
        handover = self._handover
        router = handover.router
        if not router.profile.continues:
            return SkipReason.CONNECTOR
        if handover.options.policy is not OnLostKv.RECOMPUTE:
            return SkipReason.POLICY
        if (against := reason_against(handover.body)) is not None:
            return against
        decodes = [self._defaults(engine) for engine in router.engines.decodes]
        prefills = [self._defaults(engine) for engine in router.engines.prefills]
        known = next((defaults for defaults in decodes if defaults is not None), None)
        if known is None or not any(prefills):
            return SkipReason.UNKNOWN_MODEL
        limit = limit_of(handover.body, known)
        return limit if isinstance(limit, SkipReason) else None

    # --- the prefill leg ---

    def prefill_leg(self, params: bytes | None) -> bytes:
        """What the prefill engine is asked."""
        return prefill_leg(self._handover.body, params)

    def take(self, engine: Engine, headers: Headers, answer: bytes) -> None:
        """The prefill engine has answered, with 200."""
        opening = read_opening(self._handover.body.endpoint, answer) if is_events(headers) else SkipReason.ANSWER
        if isinstance(opening, SkipReason):
            self.settle(opening)
            self._opening = None
            return
        self._opening = opening
        self._prefill = self._defaults(engine)
        self._headers = headers

    # --- the decode leg ---

    def begin(self, engine: Engine) -> bool:
        """``engine`` is asked next: send the first token, unless that was done. Whether it is to continue from there.

        If it is not, and the token was sent, ``engine`` cannot be asked at all.
        """
        against = self._stands_against_on(engine)
        if self.sent or against is not None:
            if not self.sent:
                self.settle(against or SkipReason.NO_ANSWER)
                self._opening = None
            return against is None
        assert self._opening is not None
        handover = self._handover
        own = handover.own_headers()
        dropped = {name for name, _ in own} | {b"content-length"}
        handover.reply.events = True
        handover.reply.start(200, end_to_end(self._headers, dropped) + own)
        handover.reply.write(self._opening.events)
        self.sent = True
        self.settle(None)
        handover.answered_by(handover.record.prefill)
        return True

    def decode_leg(self, params: bytes | None) -> bytes:
        """What the decode engine is asked, once the token is sent."""
        assert self._opening is not None
        assert params is not None
        return decode_leg(self._handover.body, params, self._opening, self._limit)

    @staticmethod
    def goes_on(call: Call) -> bool:
        """Whether what a decode engine answers can follow the token."""
        return call.status == 200 and is_events(call.headers) and find(call.headers, b"content-length") is None

    def continuation(self) -> Continuation:
        """What makes a decode engine's stream the rest of the answer."""
        assert self._opening is not None
        return Continuation(self._handover.body.endpoint, self._opening)

    def break_off(self, last: PendingError | Refusal) -> str:
        """No decode engine goes on: end the stream with an error. The outcome."""
        if isinstance(last, PendingError):
            message = f"The decode engine answered {last.status} after the first token"
            last = Refusal(502, "decode_failed", message)
        self._handover.reply.break_off(last)
        return "error"

    def _stands_against_on(self, engine: Engine) -> SkipReason | None:
        opening, defaults = self._opening, self._defaults(engine)
        if opening is None or engine.role is Role.PREFILL:  # which answers alone, from the beginning
            return SkipReason.NO_ANSWER
        if defaults is None or self._prefill is None or not defaults.agrees(self._prefill):
            return SkipReason.UNKNOWN_MODEL
        limit = limit_of(self._handover.body, defaults)
        if isinstance(limit, SkipReason):
            return limit
        if opening.num_prompt_tokens + 1 >= defaults.max_model_len:
            return SkipReason.LENGTH
        if self.sent and limit != self._limit:
            return SkipReason.MODEL
        self._limit = limit
        return None

    # --- the rest ---

    def settle(self, against: SkipReason | None) -> None:
        """How it came out, for metrics and record; the first word counts. None: the client has P's token."""
        record = self._handover.record
        if not record.first_token:
            record.first_token = "prefill" if against is None else str(against)
            self._handover.router.metrics.first_token.labels(record.first_token).inc()

    def _defaults(self, engine: Engine) -> Defaults | None:
        return self._handover.router.defaults.known(engine, self._handover.body.model, self._key)
