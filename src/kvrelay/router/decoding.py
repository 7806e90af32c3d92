"""The decode legs of one request: one decode engine after the other until one answers, or none will."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING

from kvrelay.profiles.base import DecodeLeg
from kvrelay.router.answer_check import vet
from kvrelay.router.core.answers import Refusal
from kvrelay.router.core.fleet import Role
from kvrelay.router.core.health import Suspicion, is_busy, is_engine_fault, status_reason
from kvrelay.router.core.legs import Endpoint
from kvrelay.router.core.lifecycle import Event
from kvrelay.router.core.preamble import Preamble
from kvrelay.router.core.recovery import LOST_CODE, Action
from kvrelay.router.core.stored_responses import name_response
from kvrelay.router.core.stream_end import StreamEnd
from kvrelay.router.errors import EngineError, EngineSilentError, EngineUnreachableError
from kvrelay.router.pending_error import PendingError
from kvrelay.router.proof_delivery import proof_comment, proof_header
from kvrelay.router.relay import Relay, is_events
from kvrelay.types import Lost

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence
    from typing import Any

    from kvrelay.router.core.fleet import Engine
    from kvrelay.router.core.observing.observation import Leg
    from kvrelay.router.first_token import EarlyStream
    from kvrelay.router.handover import Handover
    from kvrelay.router.http.call import Call
    from kvrelay.router.prefilling import Prefilling
    from kvrelay.router.tickets import Ticket, TicketManager

logger = logging.getLogger(__name__)

_FINAL = frozenset({EngineSilentError.code, LOST_CODE})
"""Ways for a decode leg to end after which no other is sent: the client has waited long enough, or is to be told."""


class Decoding:
    """Decode legs, and what they pass on to the client."""

    __slots__ = ("_attempt", "_handover", "_prefer", "_prefilling", "_relay")

    def __init__(self, handover: Handover, prefilling: Prefilling) -> None:
        """``prefilling``: done, or going on beside."""
        self._handover = handover
        self._prefilling = prefilling
        self._attempt = 0
        """Decode legs sent."""
        self._prefer = ""
        """Who was asked already, and has what it has."""
        self._relay: Relay | None = None
        """Set once the client has something of an answer."""

    async def run(self) -> str | Action:
        """The outcome; or what to do first, the decode side having lost the KV."""
        handover = self._handover
        early = handover.early
        tried: list[Engine] = [*handover.strangers[Role.DECODE]]
        suspicion, again = Suspicion(), False
        last: PendingError | Refusal = Refusal(503, "unreachable", "No decode engine is there to answer")
        while (engine := self._next(tried, last, again=again)) is not None:
            again = True
            tried.append(engine)
            handover.record.decode = engine.name
            if early is not None and not early.begin(engine) and early.sent:
                continue  # it would go on otherwise than it began
            handover.step(Event.DECODE_SENT)
            answered = await self._leg(engine)
            if isinstance(answered, str):
                return answered
            if isinstance(answered, Lost):
                action = self._on_lost(engine, answered)
                if action is not Action.REFUSE:
                    return action
                last = handover.recovery.refusal(answered)
                break
            last = answered
            handover.step(Event.DECODE_REPELLED)
            if suspicion.confirmed(last.status) or (isinstance(last, Refusal) and last.code in _FINAL):
                break
        handover.step(Event.FAILED)
        if early is not None and early.sent:
            return early.break_off(last)
        if isinstance(last, Refusal):
            return handover.refuse(last)
        last.give(handover.reply, handover.own_headers())
        return "error" if last.status >= 500 else "client_error"

    def _next(self, tried: Sequence[Engine], last: PendingError | Refusal, *, again: bool) -> Engine | None:
        """Who is asked next. When no decode engine lives, a prefill engine may answer alone, and proves nothing."""
        handover, record = self._handover, self._handover.record
        routing, engines, view = handover.router.routing, handover.router.engines, handover.described.view
        prefer = self._prefer or (record.verdict.decode if record.verdict is not None else "")
        engine = engines.pick(Role.DECODE, tried, view, prefer, again=again)
        if engine is not None or not routing.colocated_fallback or handover.recovery.proves or is_busy(last.status):
            return engine
        engine = engines.pick(Role.PREFILL, [*tried, *handover.strangers[Role.PREFILL]], view, record.prefill)
        if engine is not None:
            handover.detour("colocated", engine)
            handover.drop_ticket()
        return engine

    # --- one leg ---

    def _leg(self, engine: Engine) -> Coroutine[Any, Any, str | PendingError | Refusal | Lost]:
        """One decode leg."""
        handover = self._handover
        ticket, tickets = handover.ticket, handover.router.tickets
        self._attempt += 1
        handover.record.begin_leg()
        if ticket is not None:
            ticket.begin_attempt(self._attempt)
        if ticket is None or tickets is None or not handover.listens:
            return self._ask(engine)
        return self._watched(engine, ticket, tickets)

    async def _watched(
        self, engine: Engine, ticket: Ticket, tickets: TicketManager
    ) -> str | PendingError | Refusal | Lost:
        """One that is broken off when its engine tells that it cannot have the KV, while nothing was sent."""
        handover = self._handover
        tickets.watch(ticket)
        leg = asyncio.create_task(self._ask(engine))
        try:
            both: set[asyncio.Future[Any]] = {leg, ticket.lost}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if not leg.done() and not handover.reply.started:
                return ticket.lost.result()
            return await leg
        finally:
            if not leg.done():
                leg.cancel()
                await asyncio.wait({leg})

    async def _ask(self, engine: Engine) -> str | PendingError | Refusal:
        """The outcome, or what to tell the client if no other engine does better."""
        handover = self._handover
        timeouts = handover.router.timeouts
        begin_s = timeouts.first_byte_s if handover.body.streams else timeouts.decode_s
        deadline = handover.router.now() + begin_s
        try:
            message, num_tokens = self._message(engine), handover.described.view.num_tokens
            async with handover.router.engines.ask(engine, message, timeout_s=begin_s, num_tokens=num_tokens) as call:
                return await self._pass_on(engine, call, max(0.0, deadline - handover.router.now()), timeouts.decode_s)
        except EngineError as error:
            handover.detour(f"decode_{error.code}", engine)
            if self._relay is not None:
                handover.step(Event.FAILED)
                self._relay.break_off(error)
                return "error"
            if not isinstance(error, EngineUnreachableError):
                handover.spend()
            return Refusal(error.http_status, error.code, f"{engine.name}: {error.told}")

    def _message(self, engine: Engine) -> Leg:
        handover, record = self._handover, self._handover.record
        if engine.role is Role.PREFILL:
            return handover.outgoing.to(engine, handover.body.decode(None))
        leg = DecodeLeg(
            handover=record.life.name,
            worker=engine.name,
            prefill=record.prefill,
            policy=handover.recovery.promise(record.prefill),
            attempt=self._attempt,
            overlapped=self._prefilling.is_under_way,
            generated=int(self._continued is not None),
        )
        params = handover.router.profile.decode_params(leg, handover.carried)
        early, prompt = self._continued, handover.prompt
        body = None
        if early is not None:
            body = early.decode_leg(params)
        elif prompt is not None:
            body = prompt.decode_leg(engine, params)
        if body is None:
            is_response = handover.body.endpoint is Endpoint.RESPONSES
            body = handover.body.decode(params, name_response(record.life.name, engine) if is_response else "")
        return handover.outgoing.to(engine, body)

    @property
    def _continued(self) -> EarlyStream | None:
        """The stream that has begun, if it has."""
        early = self._handover.early
        return early if early is not None and early.sent else None

    async def _pass_on(
        self, engine: Engine, call: Call, begin_s: float, silence_s: float
    ) -> str | PendingError | Refusal:
        """What the engine answers, to the client. ``begin_s``: until it must begin.

        Raises:
            EngineError: it broke off.
        """
        handover = self._handover
        early = self._continued
        if is_engine_fault(call.status) or is_busy(call.status):
            said = await PendingError.take(call, timeout_s=silence_s)
            handover.detour(f"decode_{status_reason(call.status)}", engine)
            handover.spend()
            return said
        if (error := await vet(call, timeout_s=begin_s)) is not None:
            handover.detour("decode_error_in_200", engine)
            handover.spend()
            return error
        if early is not None and not early.goes_on(call):
            handover.detour("not_continued", engine)
            return await PendingError.take(call, timeout_s=silence_s)
        own = handover.own_headers()
        if call.status == 200 and handover.listens:
            await call.begun(silence_s, self._begins(call))
            own += await proof_header(handover, call)
            refused = handover.recovery.unproven(handover.record, handover.body.num_engine_requests)
            if refused is not None:
                handover.detour("unproven", engine)
                return refused
        trailer = partial(proof_comment, handover) if handover.options.proof else None
        on_first_byte = partial(self._on_first_byte, engine, call)
        end = StreamEnd.of(handover.body.endpoint)
        rewrite = early.continuation().feed if early is not None else None
        self._relay = Relay(call, handover.reply, own, on_first_byte, trailer, self._begins(call), end, rewrite)
        routing = handover.router.routing
        await self._relay.run(silence_s=silence_s)
        handover.step(Event.LAST_BYTE)
        if routing.measures:
            routing.streamed(handover.record, engine, handover.reply.num_events)
        return "ok" if call.status < 400 else "client_error"

    def _begins(self, call: Call) -> Callable[[bytes], bool]:
        """What tells of each piece of an answer whether it has begun by now."""
        if self._handover.body.endpoint is Endpoint.RESPONSES and is_events(call.headers):
            return Preamble().feed
        return bool

    def _on_first_byte(self, engine: Engine, call: Call) -> None:
        handover = self._handover
        handover.step(Event.FIRST_BYTE)
        handover.hold(None)
        if call.status == 200:
            handover.router.routing.answering(handover, engine, streamed=is_events(call.headers))
        self._prefilling.stop_soon()
        if call.status < 400:
            handover.answered_by(engine.name)
            tickets = handover.router.tickets
            if handover.ticket is not None and tickets is not None:
                tickets.settle(handover.ticket)

    def _on_lost(self, engine: Engine, lost: Lost) -> Action:
        handover = self._handover
        asked_first = handover.recovery.asks_first
        action = handover.recovery.lost(lost, spare=handover.router.routing.spare)
        if asked_first and handover.router.routing.asked(handover, engine, lost, action):
            self._prefer = engine.name
        else:
            handover.detour("kv_lost", engine)
        handover.router.metrics.kv_lost.labels(lost.lost, action.name.lower()).inc()
        logger.debug("%s: %s, so: %s", handover.record.life.name, lost, action.name.lower())
        handover.record.losses.append(lost)
        if action is not Action.REFUSE:
            handover.step(Event.KV_LOST)
        return action
