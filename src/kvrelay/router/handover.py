"""One disaggregated request: the way it goes, and what its legs share.

What goes another way than P then D is a *detour*, counted by reason and kept in the hand-over's record.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import msgspec

from kvrelay.router.core.answers import Refusal
from kvrelay.router.core.fleet import Role
from kvrelay.router.core.lifecycle import Event, State
from kvrelay.router.core.models import NO_STRANGERS
from kvrelay.router.core.records import Detour
from kvrelay.router.core.recovery import Action, Recovery
from kvrelay.router.decoding import Decoding
from kvrelay.router.first_token import begin_early
from kvrelay.router.outgoing import Outgoing
from kvrelay.router.prefilling import Prefilling
from kvrelay.router.prompt_reuse import reuse_prompt
from kvrelay.router.stored_responses import find_holder
from kvrelay.types import Dispatch, OnLostKv

if TYPE_CHECKING:
    from collections.abc import Collection

    from kvrelay.router.core.fleet import Engine
    from kvrelay.router.core.legs import ClientBody
    from kvrelay.router.core.records import Record
    from kvrelay.router.core.request_options import RequestOptions
    from kvrelay.router.first_token import EarlyStream
    from kvrelay.router.http.messages import Headers, Request
    from kvrelay.router.http.reply import Reply
    from kvrelay.router.kv.pool_index import PoolIndex
    from kvrelay.router.kv.token_ids import TokenFinder
    from kvrelay.router.prompt_reuse import ReusedPrompt
    from kvrelay.router.proxy import Disaggregator
    from kvrelay.router.tickets import Ticket, TicketManager


class Handover:
    """One request."""

    __slots__ = (
        "_held", "_without_pool", "body", "carried", "described", "early", "in_pool", "options", "outgoing", "prompt",
        "record", "recovery", "reply", "request", "router", "strangers", "ticket",
    )  # fmt: skip

    def __init__(
        self,
        router: Disaggregator,
        request: Request,
        reply: Reply,
        body: ClientBody,
        record: Record,
        options: RequestOptions,
    ) -> None:
        """``record``: of this request, in the router's book."""
        self.router = router
        self.request = request
        self.reply = reply
        self.body = body
        self.record = record
        self.options = options
        own_name = record.life.name.encode() if router.profile.names_requests else b""
        self.outgoing = Outgoing(request, request_id=own_name, rules=router.engines.header_rules)
        self.recovery = Recovery(options.policy, max_reprefills=router.lost_kv.max_reprefills)
        self.carried: bytes | None = None
        """What the prefill leg gave for the decode leg, as the connector's profile has it."""
        self.ticket: Ticket | None = None
        self._without_pool = False
        """Whether a prefill engine would compute for nobody: the pool is away, and nothing else hands over."""
        self._held: Engine | None = None
        """Who may have to be there for the decode side to take the KV."""
        self.strangers = NO_STRANGERS
        """By role, the engines that are not asked, whatever becomes of the others."""
        self.in_pool = 0
        """Tokens of the prompt that the pool holds for any decode engine, as far as is known."""
        self.described = router.routing.describe(request, body)
        self.prompt: ReusedPrompt | None = None
        """Set if the decode side may be given the prefill side's token ids."""
        self.early: EarlyStream | None = None
        """Set if the stream is to begin with the prefill side's first token."""

    async def run(self) -> str:
        """Answer. The outcome, for the metrics."""
        life, router = self.record.life, self.router
        try:
            if router.tickets is not None:
                self.ticket = await router.tickets.open(self.record, self.body.num_engine_requests)
                if self.ticket is None:
                    self._goes_without_ticket(router.tickets)
            return await self._go()
        except asyncio.CancelledError:
            if life.state is State.DONE and self.reply.gone:  # a client that left with the last event
                return "ok" if self.reply.status < 400 else "client_error"
            if not life.ended and self.reply.gone:
                router.metrics.cancelled.labels(life.state.name.lower()).inc()
                self.step(Event.CANCELLED)
            elif not life.ended:
                self.detour("deadline")
            raise
        finally:
            if not life.ended:
                self.step(Event.FAILED)
            self.hold(None)
            self._leave_ticket()

    # --- the way it goes ---

    async def _go(self) -> str:
        if (nowhere := await self._look_around()) is not None:
            self.step(Event.FAILED)
            return self.refuse(nowhere)
        if self.router.routing.token_finder is not None:
            await self._find_token_ids(self.router.routing.token_finder)
        if self.router.routing.pool_index is not None:
            await self._ask_pool(self.router.routing.pool_index)
        bypass = self._bypass
        if not bypass and self.router.tickets is not None and (orphans := self.router.tickets.orphans):
            self._pass_over(orphans)
        if (refused := self._refused(bypass)) is not None:
            self.step(Event.FAILED)
            return self.refuse(refused)
        prefilling = Prefilling(self)
        if bypass:
            self.detour(bypass)
            return await self._answer(prefilling)
        decode_only = self._without_pool or self._goes_alone() or self._asks_first()
        self.early = begin_early(self, prefills=not decode_only)
        if self._overlaps and not decode_only:
            async with prefilling.beside():
                return await self._answer(prefilling)
        self.prompt = reuse_prompt(self)
        if not decode_only:
            await prefilling.run()
        return await self._answer(prefilling)

    async def _answer(self, prefilling: Prefilling) -> str:
        """Decode legs until one is the answer, with another prefill before it where that is called for."""
        decoding = Decoding(self, prefilling)
        while not isinstance(answered := await decoding.run(), str):
            if answered is Action.REPREFILL:
                self.detour("reprefill")
                self.carried, self.record.prefill = None, ""
            if answered is not Action.RECOMPUTE:
                await prefilling.run()
        return answered

    async def _find_token_ids(self, finder: TokenFinder) -> None:
        """Since a policy wants them."""
        described, record = self.described, self.record
        strangers = {engine for engines in self.strangers.values() for engine in engines}
        ids, record.token_ids = await finder.find(self.body, described.prompt, self.request, strangers)
        if ids is not None:
            view = msgspec.structs.replace(described.view, tokens=ids, num_tokens=len(ids))
            self.described = msgspec.structs.replace(described, view=view)

    async def _ask_pool(self, pool_index: PoolIndex) -> None:
        """How much of the prompt it holds, where that may decide whether a prefill engine is asked."""
        view = self.described.view
        if len(view.tokens) > self.router.routing.spare:
            self.in_pool = await pool_index.held(view, self.request)

    async def _look_around(self) -> Refusal | None:
        """Find out who cannot be asked: who does not serve the model, or does not hold what is continued."""
        engines = self.router.engines
        self.strangers = await self.router.catalogue.strangers(self.body.model, self.request)
        if not (previous := self.body.previous_response):
            return None
        holder = await find_holder(engines, previous, self.request)
        if isinstance(holder, Refusal):
            return holder
        if holder is not None:
            others = tuple(engine for engine in engines.decodes if engine is not holder)
            self.strangers = {Role.PREFILL: tuple(engines.prefills), Role.DECODE: others}
        return None

    @property
    def _bypass(self) -> str:
        """Why a decode engine is to have the request alone; empty if it is to be disaggregated."""
        if (alone := self.body.alone) or (alone := self.router.profile.bypass(self.body)):
            return alone
        prefills = self.router.engines.prefills
        return "other_model" if prefills and len(self.strangers[Role.PREFILL]) == len(prefills) else ""

    def _pass_over(self, orphans: Collection[str]) -> None:
        """Do not ask prefill engines whose pools are gone; if no other is there, a decode engine has it alone."""
        prefills, known = self.router.engines.prefills, self.strangers[Role.PREFILL]
        left = [engine for engine in prefills if engine not in known and engine.name not in orphans]
        self.strangers = {**self.strangers, Role.PREFILL: tuple(engine for engine in prefills if engine not in left)}
        if prefills and not left and not self._without_pool:
            self._without_pool = True
            self.detour("pool_away")

    def _goes_without_ticket(self, tickets: TicketManager) -> None:
        """What that means: KV may be handed over unprotected through a pool that is slow, through none not at all."""
        self._without_pool = not (tickets.link.up or self.router.profile.hands_over_without_pool)
        self.detour("pool_away" if self._without_pool else "no_ticket")

    def _goes_alone(self) -> bool:
        """Whether the prompt is not worth a prefill engine."""
        verdict = self.record.verdict = self.router.routing.judge(self)
        if verdict is None or not verdict.alone:
            return False
        self.detour(verdict.why)
        return True

    def _asks_first(self) -> bool:
        """Whether the decode side is to say whether there is anything to prefill."""
        asks = self.router.dispatch is Dispatch.DECODE_FIRST and self.ticket is not None
        self.recovery.asks_first = asks and not self.body.is_beam_search
        return self.recovery.asks_first

    @property
    def _overlaps(self) -> bool:
        """Whether the decode leg follows the prefill leg: not where more than its answer is waited for."""
        if self.router.dispatch is not Dispatch.OVERLAPPED or self.early is not None or self.listens:
            return False
        tickets = self.router.tickets
        return self.ticket is not None and tickets is not None and tickets.compatibility.can_follow

    def _refused(self, bypass: str) -> Refusal | None:
        """Why a request that must be proven cannot be, before anybody is asked."""
        if not self.recovery.proves:
            return None
        why = bypass or ("beam_search" if self.body.is_beam_search else "")
        if why:
            return self.recovery.unprovable(why)
        return self.recovery.away() if self.ticket is None or self._without_pool else None

    def _leave_ticket(self) -> None:
        ticket, tickets = self.ticket, self.router.tickets
        if ticket is None or tickets is None:
            return
        ticket.answer_ended = True
        if ticket.settling is None or not ticket.answer_begun or self.record.life.state is not State.DONE:
            tickets.end(ticket)

    def drop_ticket(self) -> None:
        """Nothing will be handed over any more."""
        if self.ticket is not None and self.router.tickets is not None:
            self.router.tickets.end(self.ticket)
        self.ticket = None

    # --- for the legs ---

    @property
    def listens(self) -> bool:
        """Whether anything depends on what the decode side tells before its answer is passed on."""
        return self.options.proof or self.options.policy is not OnLostKv.RECOMPUTE or self.recovery.asks_first

    def step(self, event: Event) -> None:
        """Something happened to the request."""
        self.record.life.handle(event, self.router.now())

    def answered_by(self, worker: str) -> None:
        """The client is getting the first of its answer now."""
        seen = self.request.seen
        if not seen.answered:
            seen.answered = time.perf_counter()
            self.router.metrics.timings.first_byte(worker, seen.answered - seen.arrived)

    def detour(self, reason: str, engine: Engine | None = None) -> None:
        """It goes another way than P then D. ``engine``: over which, if over one."""
        self.record.detours.append(Detour(reason, engine.name if engine is not None else ""))
        self.router.metrics.detours.labels(reason).inc()

    def hold(self, engine: Engine | None) -> None:
        """``engine`` has prefilled, and is needed until the decode side has begun: it may hold the KV. None: nobody."""
        held, self._held = self._held, engine
        if engine is not None:
            self.router.engines.hold(engine)
        if held is not None:
            self.router.engines.release(held)

    def spend(self) -> None:
        """An engine may have begun to read what was carried: where it can be read once only, it is void now."""
        left = self.router.profile.spent(self.carried)
        if left is None and self.carried is not None:
            self.record.prefill = ""
        self.carried = left

    def refuse(self, refused: Refusal) -> str:
        """The router answers itself. The outcome."""
        self.reply.refuse(refused, self.own_headers())
        return "error" if refused.status >= 500 else "client_error"

    def own_headers(self) -> Headers:
        """The router's headers of an answer."""
        record = self.record
        headers = [(b"x-kvrelay-handover", record.life.name.encode())]
        if record.decode:
            headers.append((b"x-kvrelay-decode", record.decode.encode()))
        if record.prefill:
            headers.append((b"x-kvrelay-prefill", record.prefill.encode()))
        return headers
