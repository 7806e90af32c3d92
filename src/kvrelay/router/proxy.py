"""One request, disaggregated: prefill on P, then decode on D, whose answer is the client's.

The decode engine is the authority on what a request is worth: whatever the prefill leg comes to, the decode engine is
asked next, and answers as a single vLLM would. What goes another way than P then D is a *detour*, counted by reason and
kept in the hand-over's record.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING

from msgspec import Struct

from kvrelay.errors import BadRequestError
from kvrelay.profiles.base import DecodeLeg
from kvrelay.router.core.answers import Refusal, refusal
from kvrelay.router.core.fleet import Role
from kvrelay.router.core.health import Suspicion, is_busy, is_engine_fault
from kvrelay.router.core.legs import ClientBody, Endpoint, parse_fields
from kvrelay.router.core.lifecycle import Event, Lifecycle, State
from kvrelay.router.core.records import Detour, Record
from kvrelay.router.core.recovery import LOST_CODE, Action, Recovery
from kvrelay.router.core.wishes import PROOF, read_wishes
from kvrelay.router.engines import Outgoing
from kvrelay.router.errors import EngineError, EngineSilentError, EngineUnreachableError
from kvrelay.router.passthrough import Repelled
from kvrelay.router.relay import Relay, is_events
from kvrelay.router.tickets import PROOF_TIMEOUT_S
from kvrelay.types import Dispatch, Lost, OnLostKv

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from kvrelay.profiles.base import Profile
    from kvrelay.router.core.fleet import Engine
    from kvrelay.router.core.records import RecordBook
    from kvrelay.router.core.wishes import Wishes
    from kvrelay.router.engines import Engines
    from kvrelay.router.http.call import Call
    from kvrelay.router.http.messages import Headers, Request
    from kvrelay.router.http.reply import Reply
    from kvrelay.router.metrics import RouterMetrics
    from kvrelay.router.tickets import Ticket, TicketDesk

logger = logging.getLogger(__name__)

MAX_PREFILL_ANSWER_BYTES = 16 << 20
PREFILL_GRACE_S = 1.0
"""With overlapped dispatch: how long a prefill leg may go on when the decode side's answer has begun."""
_FINAL = frozenset({EngineSilentError.code, LOST_CODE})
"""Ways for a decode leg to end after which no other is sent: the client has waited long enough, or is to be told."""


class Timeouts(Struct, frozen=True):
    """How long a request waits for what. In seconds."""

    prefill_s: float
    """One prefill leg."""
    handover_s: float
    """From the beginning to the decode leg's first byte: so long KV is kept."""
    decode_s: float
    """The longest silence of a decode engine."""


class LostKv(Struct, frozen=True):
    """What becomes of requests whose decode side cannot have the KV, unless they say themselves."""

    policy: OnLostKv = OnLostKv.RECOMPUTE
    max_reprefills: int = 1
    """How often one request's prompt may be prefilled again."""


class Disaggregator:
    """Handles the disaggregated endpoints."""

    def __init__(
        self,
        engines: Engines,
        profile: Profile,
        desk: TicketDesk | None,
        book: RecordBook,
        metrics: RouterMetrics,
        timeouts: Timeouts,
        lost_kv: LostKv,
        now: Callable[[], float],
        *,
        dispatch: Dispatch = Dispatch.SEQUENTIAL,
    ) -> None:
        """``now``: Unix time, for the records."""
        self.dispatch = dispatch
        self.lost_kv = lost_kv
        self.engines = engines
        self.profile = profile
        self.desk = desk
        self.book = book
        self.metrics = metrics
        self.timeouts = timeouts
        self.now = now

    @property
    def _told(self) -> bool:
        return self.desk is not None and self.profile.tells_of_losses

    async def handle(self, request: Request, reply: Reply, handover: str) -> str:
        """Answer. The outcome, for the metrics."""
        try:
            body = ClientBody(Endpoint(request.path), parse_fields(request.body))
            wishes = read_wishes(request.header, self.lost_kv.policy, told=self._told)
        except BadRequestError as error:
            reply.refuse(refusal(error))
            return "client_error"
        record = Record(Lifecycle(handover, self.now()), policy=wishes.policy)
        self.book.add(record)
        return await _Handover(self, request, reply, body, record, wishes).run()


class _Loss(Struct, frozen=True):
    """Why an engine did not prefill: a reason, and the HTTP status it came to."""

    code: str
    status: int


def _status_code(status: int) -> str:
    return "busy" if is_busy(status) else "status_5xx"


class _Handover:
    """The steps of one request."""

    __slots__ = (
        "_attempt", "_body", "_carried", "_outgoing", "_prefilling", "_record", "_recovery", "_reply", "_router",
        "_sent", "_ticket", "_wishes",
    )  # fmt: skip

    def __init__(
        self, router: Disaggregator, request: Request, reply: Reply, body: ClientBody, record: Record, wishes: Wishes
    ) -> None:
        self._router = router
        self._reply = reply
        self._body = body
        self._record = record
        self._outgoing = Outgoing(request, record.life.name.encode(), always=router.profile.names_requests)
        self._carried: bytes | None = None
        self._ticket: Ticket | None = None
        self._wishes = wishes
        self._recovery = Recovery(wishes.policy, max_reprefills=router.lost_kv.max_reprefills)
        self._attempt = 0
        """Decode legs sent."""
        self._prefilling: asyncio.Task[None] | None = None
        """The prefill leg, where it goes on beside the decode leg."""
        self._sent = asyncio.Event()
        """Set when a prefill leg has been sent."""

    async def run(self) -> str:
        life, router = self._record.life, self._router
        try:
            if router.desk is not None:
                self._ticket = await router.desk.open(self._record, self._body.num_engine_requests)
                if self._ticket is None:
                    self._detour("no_ticket")
            bypass = router.profile.bypass(self._body)
            if (refused := self._refused(bypass)) is not None:
                self._step(Event.FAILED)
                return self._refuse(refused)
            if bypass:
                self._detour(bypass)
            elif self._overlaps:
                return await self._overlapped()
            else:
                await self._prefill()
            return await self._answer()
        except asyncio.CancelledError:
            if not life.ended:
                router.metrics.cancelled.labels(life.state.name.lower()).inc()
                self._step(Event.CANCELLED)
            raise
        finally:
            if not life.ended:
                self._step(Event.FAILED)
            self._leave_ticket()

    async def _answer(self) -> str:
        """Decode legs until one is the answer, with another prefill before it where that is called for."""
        while not isinstance(answered := await self._decode(), str):
            if answered is Action.REPREFILL:
                self._detour("reprefill")
                self._carried, self._record.prefill = None, ""
                await self._prefill()
        return answered

    # --- both legs at once ---

    @property
    def _overlaps(self) -> bool:
        """Whether the decode leg follows the prefill leg: not where more than its answer is waited for."""
        return self._router.dispatch is Dispatch.OVERLAPPED and self._ticket is not None and not self._listens

    async def _overlapped(self) -> str:
        """Send the decode leg as soon as the prefill leg is sent; whatever becomes of the one, the other goes on."""
        self._prefilling = prefill = asyncio.create_task(self._prefill_and_tell())
        sent = asyncio.create_task(self._sent.wait())
        try:
            await asyncio.wait({prefill, sent}, return_when=asyncio.FIRST_COMPLETED)
            return await self._answer()
        finally:
            for task in (sent, prefill):
                task.cancel()
            await asyncio.wait({sent, prefill})
            if not prefill.cancelled() and (bug := prefill.exception()) is not None:
                logger.error("%s: the prefill leg failed over a bug", self._record.life.name, exc_info=bug)

    async def _prefill_and_tell(self) -> None:
        """The prefill legs; then tell the decode side that no more will come."""
        try:
            await self._prefill()
        finally:
            if self._ticket is not None and self._router.desk is not None:
                self._router.desk.seal(self._ticket)

    def _stop_prefilling(self) -> None:
        """The decode side had all it needed: after a moment for an answer that is on its way, break the leg off."""
        prefill = self._prefilling
        if prefill is not None and not prefill.done():
            asyncio.get_running_loop().call_later(PREFILL_GRACE_S, prefill.cancel)

    # --- the prefill leg ---

    async def _prefill(self) -> None:
        router = self._router
        tried: list[Engine] = []
        suspicion = Suspicion()
        deadline = self._record.life.timestamps["issued"] + router.timeouts.handover_s
        while (left_s := min(router.timeouts.prefill_s, deadline - router.now())) > 0:
            engine = router.engines.pick(Role.PREFILL, tried)
            if engine is None or self._reply.started:
                return
            tried.append(engine)
            self._step(Event.PREFILL_SENT)
            problem = await self._prefill_on(engine, left_s)
            if problem is None:
                return
            self._prefill_step(Event.PREFILL_LOST)
            if self._prefilling is not None:
                self._record.prefill = ""
            self._detour(f"prefill_{problem.code}", engine)
            if suspicion.confirmed(problem.status):
                return

    async def _prefill_on(self, engine: Engine, timeout_s: float) -> _Loss | None:
        """Why another engine should be tried; None when the leg is over."""
        router = self._router
        deadline = router.now() + timeout_s
        params = router.profile.prefill_params(self._record.life.name, engine.name, self._body)
        message = self._outgoing.to(engine, self._body.prefill(params))
        try:
            on_sent = partial(self._on_prefill_sent, engine)
            async with router.engines.ask(engine, message, timeout_s=timeout_s, on_sent=on_sent) as call:
                left_s = max(0.0, deadline - router.now())
                answer = await call.read(limit_bytes=MAX_PREFILL_ANSWER_BYTES, timeout_s=left_s)
                status = call.status
        except EngineError as error:
            return _Loss(error.code, error.http_status)
        if is_engine_fault(status) or is_busy(status):
            return _Loss(_status_code(status), status)
        self._prefill_step(Event.PREFILL_ANSWERED)
        if status != 200:
            self._record.prefill = ""
            self._detour("prefill_refused", engine)
            return None
        self._carried = router.profile.carry(answer)
        if self._carried is None:
            self._detour("nothing_to_carry", engine)
        else:
            self._record.prefill = engine.name
            self._record.prefills.append(engine.name)
        return None

    def _on_prefill_sent(self, engine: Engine) -> None:
        if self._prefilling is not None:
            self._record.prefill = engine.name
            self._sent.set()

    def _prefill_step(self, event: Event) -> None:
        """What becomes of a prefill leg; once the request is over nothing does."""
        if not self._record.life.ended:
            self._step(event)

    # --- the decode leg ---

    async def _decode(self) -> str | Action:
        """The outcome; or what to do first, the decode side having lost the KV."""
        router = self._router
        tried: list[Engine] = []
        suspicion = Suspicion()
        last: Repelled | Refusal = Refusal(503, "unreachable", "No decode engine is there to answer")
        while (engine := router.engines.pick(Role.DECODE, tried)) is not None:
            tried.append(engine)
            self._record.decode = engine.name
            self._step(Event.DECODE_SENT)
            answered = await self._leg(engine)
            if isinstance(answered, str):
                return answered
            if isinstance(answered, Lost):
                action = self._on_lost(engine, answered)
                if action is not Action.REFUSE:
                    return action
                last = self._recovery.refusal(answered)
                break
            last = answered
            self._step(Event.DECODE_REPELLED)
            if suspicion.confirmed(last.status) or (isinstance(last, Refusal) and last.code in _FINAL):
                break
        self._step(Event.FAILED)
        if isinstance(last, Refusal):
            return self._refuse(last)
        last.give(self._reply, self._own_headers())
        return "error" if last.status >= 500 else "client_error"

    async def _leg(self, engine: Engine) -> str | Repelled | Refusal | Lost:
        """One decode leg; broken off when its engine tells that it cannot have the KV, while nothing was sent."""
        ticket, desk = self._ticket, self._router.desk
        self._attempt += 1
        self._record.begin_leg()
        if ticket is not None:
            ticket.begin_attempt(self._attempt)
        if ticket is None or desk is None or not self._listens:
            return await self._decode_on(engine)
        desk.watch(ticket)
        leg = asyncio.create_task(self._decode_on(engine))
        try:
            both: set[asyncio.Future[Any]] = {leg, ticket.lost}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if not leg.done() and not self._reply.started:
                return ticket.lost.result()
            return await leg
        finally:
            if not leg.done():
                leg.cancel()
                await asyncio.wait({leg})

    async def _decode_on(self, engine: Engine) -> str | Repelled | Refusal:
        """The outcome, or what to tell the client if no other engine does better."""
        router, record = self._router, self._record
        leg = DecodeLeg(
            handover=record.life.name,
            worker=engine.name,
            prefill=record.prefill,
            policy=self._recovery.promise(record.prefill),
            attempt=self._attempt,
            overlapped=self._prefilling is not None and not self._prefilling.done(),
        )
        params = router.profile.decode_params(leg, self._carried)
        message = self._outgoing.to(engine, self._body.decode(params))
        relay: Relay | None = None
        try:
            async with router.engines.ask(engine, message, timeout_s=router.timeouts.decode_s) as call:
                if is_engine_fault(call.status) or is_busy(call.status):
                    said: Repelled | Refusal = await Repelled.take(call, timeout_s=router.timeouts.decode_s)
                    self._detour(f"decode_{_status_code(call.status)}", engine)
                    self._spend()
                    return said
                own = self._own_headers()
                if call.status == 200 and self._listens:
                    await call.begun(router.timeouts.decode_s)
                    own += await self._proof_header(call)
                    refused = self._recovery.unproven(record, self._expected)
                    if refused is not None:
                        self._detour("unproven", engine)
                        return refused
                trailer = self._proof_comment if self._wishes.proof else None
                relay = Relay(call, self._reply, own, lambda: self._on_first_byte(call), trailer)
                await relay.run(silence_s=router.timeouts.decode_s)
        except EngineError as error:
            self._detour(f"decode_{error.code}", engine)
            if relay is not None:
                self._step(Event.FAILED)
                relay.break_off(error)
                return "error"
            if not isinstance(error, EngineUnreachableError):
                self._spend()
            return Refusal(error.http_status, error.code, f"{engine.name}: {error}")
        self._step(Event.LAST_BYTE)
        return "ok" if call.status < 400 else "client_error"

    # --- lost KV, and proof that none was ---

    @property
    def _listens(self) -> bool:
        """Whether anything depends on what the decode side tells before its answer is passed on."""
        return self._wishes.proof or self._wishes.policy is not OnLostKv.RECOMPUTE

    @property
    def _expected(self) -> int:
        return self._body.num_engine_requests

    def _refused(self, bypass: str) -> Refusal | None:
        """Why a request that must be proven cannot be, before anybody is asked."""
        if not self._recovery.proves:
            return None
        why = bypass or ("beam_search" if self._body.is_beam_search else "")
        if why:
            return self._recovery.unprovable(why)
        return self._recovery.away() if self._ticket is None else None

    def _on_lost(self, engine: Engine, lost: Lost) -> Action:
        action = self._recovery.lost(lost)
        self._detour("kv_lost", engine)
        self._router.metrics.kv_lost.labels(lost.lost, action.name.lower()).inc()
        logger.debug("%s: %s, so: %s", self._record.life.name, lost, action.name.lower())
        self._record.losses.append(lost)
        if action is not Action.REFUSE:
            self._step(Event.KV_LOST)
        return action

    async def _proof_header(self, call: Call) -> Headers:
        """The proof for an answer that is no stream. Where an answer must be proven, waits for its proofs."""
        shown = self._wishes.proof and not is_events(call.headers)
        ticket, desk = self._ticket, self._router.desk
        if ticket is not None and desk is not None and (shown or self._recovery.proves):
            desk.settle(ticket)
            deadline = self._router.now() + self._router.timeouts.decode_s
            waiting = True
            while waiting and not ticket.proven.done():
                await asyncio.wait({ticket.proven}, timeout=PROOF_TIMEOUT_S)
                call.check()
                # Of several engine requests some may be scheduled only when others have ended.
                late = ticket.answer_ended or self._router.now() >= deadline
                waiting = self._recovery.proves and not late
                ticket.answer_ended = call.ended
        return [(PROOF, self._record.told(self._expected))] if shown else []

    async def _proof_comment(self) -> bytes:
        """The proof after a stream's last event, as a comment."""
        ticket = self._ticket
        if ticket is not None and not ticket.proven.done():
            ticket.answer_ended = True
            await asyncio.wait({ticket.proven}, timeout=PROOF_TIMEOUT_S)
        return b": kvrelay %b\n\n" % self._record.told(self._expected)

    def _refuse(self, refused: Refusal) -> str:
        self._reply.refuse(refused, self._own_headers())
        return "error" if refused.status >= 500 else "client_error"

    def _on_first_byte(self, call: Call) -> None:
        self._step(Event.FIRST_BYTE)
        self._stop_prefilling()
        router = self._router
        if call.status < 400:
            ttft_s = self._record.life.ttft_s
            assert ttft_s is not None
            router.metrics.ttft_seconds.observe(ttft_s)
            if self._ticket is not None and router.desk is not None:
                router.desk.settle(self._ticket)

    # --- the rest ---

    def _spend(self) -> None:
        """An engine may have begun to read what was carried: where it can be read once only, it is void now."""
        left = self._router.profile.spent(self._carried)
        if left is None and self._carried is not None:
            self._record.prefill = ""
        self._carried = left

    def _leave_ticket(self) -> None:
        ticket, desk = self._ticket, self._router.desk
        if ticket is None or desk is None:
            return
        ticket.answer_ended = True
        if ticket.settling is None or self._record.life.state is not State.DONE:
            desk.end(ticket)

    def _step(self, event: Event) -> None:
        self._record.life.handle(event, self._router.now())

    def _detour(self, reason: str, engine: Engine | None = None) -> None:
        self._record.detours.append(Detour(reason, engine.name if engine is not None else ""))
        self._router.metrics.detours.labels(reason).inc()

    def _own_headers(self) -> Headers:
        record = self._record
        headers = [(b"x-kvrelay-handover", record.life.name.encode())]
        if record.decode:
            headers.append((b"x-kvrelay-decode", record.decode.encode()))
        headers.append((b"x-request-id", self._outgoing.request_id))
        if record.prefill:
            headers.append((b"x-kvrelay-prefill", record.prefill.encode()))
        return headers
