"""The prefill legs of one request: one prefill engine after the other until one has done it, or none will."""

from __future__ import annotations

import asyncio
import logging
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

from msgspec import Struct

from kvrelay.router.core.fleet import Role
from kvrelay.router.core.health import Suspicion, is_busy, is_engine_fault, status_reason
from kvrelay.router.core.lifecycle import Event
from kvrelay.router.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from kvrelay.router.core.fleet import Engine
    from kvrelay.router.handover import Handover

logger = logging.getLogger(__name__)

MAX_PREFILL_ANSWER_BYTES = 16 << 20
PREFILL_GRACE_S = 1.0
"""With overlapped dispatch: how long a prefill leg may go on when the decode side's answer has begun."""


class _Loss(Struct, frozen=True):
    """Why an engine did not prefill: a reason, and the HTTP status it came to."""

    code: str
    status: int


class Prefilling:
    """Prefill legs: before the decode leg, or beside it."""

    __slots__ = ("_handover", "_sent", "_task")

    def __init__(self, handover: Handover) -> None:
        """Nothing is sent yet."""
        self._handover = handover
        self._task: asyncio.Task[None] | None = None
        self._sent: asyncio.Event | None = None
        """Of a leg beside the decode leg: set when it has been sent."""

    @property
    def is_under_way(self) -> bool:
        """Whether a prefill leg goes on beside the decode leg."""
        return self._task is not None and not self._task.done()

    async def run(self) -> None:
        """Prefill legs until one is over; whatever comes of it, the decode side is asked next."""
        handover = self._handover
        router, record = handover.router, handover.record
        tried: list[Engine] = [*handover.strangers[Role.PREFILL]]
        suspicion, again = Suspicion(), False
        deadline = record.life.timestamps["issued"] + router.timeouts.handover_s
        while (left_s := min(router.timeouts.prefill_s, deadline - router.now())) > 0:
            engine = router.engines.pick(Role.PREFILL, tried, handover.described.view, again=again)
            if engine is None or handover.reply.started:
                if engine is None and len(tried) == len(handover.strangers[Role.PREFILL]):
                    handover.detour("no_prefill_engine")
                return
            again = True
            tried.append(engine)
            handover.step(Event.PREFILL_SENT)
            problem = await self._ask(engine, left_s)
            if problem is None:
                return
            self._step(Event.PREFILL_LOST)
            if self._task is not None:
                record.prefill = ""
            handover.detour(f"prefill_{problem.code}", engine)
            if suspicion.confirmed(problem.status):
                return

    # --- beside the decode leg ---

    @asynccontextmanager
    async def beside(self) -> AsyncIterator[None]:
        """Inside, a prefill leg is sent, and goes on; whatever becomes of it or of the body, the other goes on."""
        self._sent = asyncio.Event()
        self._task = prefill = asyncio.create_task(self._run_and_tell())
        sent = asyncio.create_task(self._sent.wait())
        try:
            await asyncio.wait({prefill, sent}, return_when=asyncio.FIRST_COMPLETED)
            yield
        finally:
            for task in (sent, prefill):
                task.cancel()
            await asyncio.wait({sent, prefill})
            if not prefill.cancelled() and (bug := prefill.exception()) is not None:
                name = self._handover.record.life.name
                logger.error("%s: a bug ended the prefill leg", name, exc_info=bug)

    def stop_soon(self) -> None:
        """The decode side had all it needed: after a moment for an answer that is on its way, break the leg off."""
        prefill = self._task
        if prefill is not None and not prefill.done():
            asyncio.get_running_loop().call_later(PREFILL_GRACE_S, prefill.cancel)

    async def _run_and_tell(self) -> None:
        """The prefill legs; then tell the decode side that no more will come."""
        ticket, tickets = self._handover.ticket, self._handover.router.tickets
        try:
            await self.run()
        finally:
            if ticket is not None and tickets is not None:
                tickets.seal(ticket)

    # --- one leg ---

    async def _ask(self, engine: Engine, timeout_s: float) -> _Loss | None:
        """Why another engine should be tried; None when the leg is over."""
        handover = self._handover
        router, record = handover.router, handover.record
        deadline = router.now() + timeout_s
        params = router.profile.prefill_params(record.life.name, engine.name, handover.body)
        early, prompt = handover.early, handover.prompt
        body = handover.body.prefill(params) if early is None else early.prefill_leg(params)
        if prompt is not None:
            body = prompt.asked(body)
        leg = handover.outgoing.to(engine, body)
        num_tokens = handover.described.view.num_tokens
        began = router.now()
        try:
            on_sent = partial(self._on_sent, engine)
            async with router.engines.ask(
                engine, leg, timeout_s=timeout_s, on_sent=on_sent, num_tokens=num_tokens
            ) as call:
                left_s = max(0.0, deadline - router.now())
                answer = await call.read(limit_bytes=MAX_PREFILL_ANSWER_BYTES, timeout_s=left_s)
                status, headers = call.status, call.headers
        except EngineError as error:
            return _Loss(error.code, error.http_status)
        if is_engine_fault(status) or is_busy(status):
            return _Loss(status_reason(status), status)
        self._step(Event.PREFILL_ANSWERED)
        if status != 200:
            record.prefill = ""
            handover.detour("prefill_refused", engine)
            return None
        router.routing.prefilled(handover.described, engine, answer, router.now() - began)
        handover.carried = router.profile.carry(answer)
        if handover.carried is None:
            handover.detour("nothing_to_carry", engine)
        else:
            handover.hold(engine)
            record.prefill = engine.name
            record.prefills.append(engine.name)
            if early is not None:
                early.take(engine, headers, answer)
            if prompt is not None:
                prompt.take(answer)
        return None

    def _on_sent(self, engine: Engine) -> None:
        if self._sent is not None:
            self._handover.hold(engine)
            self._handover.record.prefill = engine.name
            self._sent.set()

    def _step(self, event: Event) -> None:
        """What becomes of a prefill leg; once the request is over nothing does."""
        if not self._handover.record.life.ended:
            self._handover.step(event)
