"""Requests that are not disaggregated: one engine answers, unchanged."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvrelay.errors import BadRequestError
from kvrelay.router.answer_check import vet
from kvrelay.router.core.answers import Refusal, refusal
from kvrelay.router.core.fleet import Role
from kvrelay.router.core.health import Suspicion, is_busy, is_engine_fault
from kvrelay.router.core.legs import encode_fields, parse_fields, scrub, text_of
from kvrelay.router.core.models import model_of_form
from kvrelay.router.core.paths import stored_name
from kvrelay.router.core.stream_end import StreamEnd
from kvrelay.router.errors import EngineError, EngineSilentError
from kvrelay.router.outgoing import Outgoing
from kvrelay.router.pending_error import PendingError
from kvrelay.router.relay import Relay
from kvrelay.router.stored_responses import find_holder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvrelay.router.core.fleet import Engine
    from kvrelay.router.core.observing.observation import Leg
    from kvrelay.router.engines import Engines
    from kvrelay.router.http.messages import Headers, Request
    from kvrelay.router.http.reply import Reply
    from kvrelay.router.models import Catalogue

ANY_TIMEOUT_S = 5.0
"""For what any engine can answer, and answers at once if it lives: the next one is asked then."""


class Passthrough:
    """Sends a request to one engine after the other until one answers, and passes that answer on."""

    def __init__(self, engines: Engines, catalogue: Catalogue, *, silence_s: float) -> None:
        """``silence_s``: how long an engine may say nothing."""
        self._engines = engines
        self._catalogue = catalogue
        self.silence_s = silence_s

    async def any_engine(self, request: Request, reply: Reply) -> str:
        """Let the first engine that lives answer, decode engines first. The outcome, for the metrics."""
        outgoing = Outgoing(request, rules=self._engines.header_rules)
        asked: Engine | None = None
        last: PendingError | Refusal = _NOBODY
        for role in (Role.DECODE, Role.PREFILL):
            tried: list[Engine] = []
            while (engine := self._engines.pick(role, tried, again=bool(tried))) is not None:
                tried.append(engine)
                answered = await self._ask(engine, outgoing.to(engine, request.body), request, reply, ANY_TIMEOUT_S)
                if isinstance(answered, str):
                    return answered
                asked, last = engine, answered
        return _give_up(last, reply, asked)

    async def models(self, request: Request, reply: Reply) -> str:
        """The models of all engines; what one of them says where none tells its models."""
        listed = await self._catalogue.listed(request)
        if listed is None:
            return await self.any_engine(request, reply)
        reply.answer(200, listed)
        return "ok"

    async def stored(self, request: Request, reply: Reply) -> str:
        """Let the decode engine that holds a stored response answer; any, if none does."""
        holder = await find_holder(self._engines, stored_name(request.path), request)
        if isinstance(holder, Refusal):
            return _give_up(holder, reply, None)
        passed_over = [] if holder is None else [engine for engine in self._engines.decodes if engine is not holder]
        return await self.decode_engine(request, reply, passed_over)

    async def decode_engine(self, request: Request, reply: Reply, passed_over: Sequence[Engine] = ()) -> str:
        """Let one decode engine that is none of ``passed_over`` answer. The outcome, for the metrics."""
        body = request.body
        model = "" if request.is_json else model_of_form(body)
        if request.is_json and body:
            try:
                fields = parse_fields(body)
            except BadRequestError as error:
                reply.refuse(refusal(error))
                return "client_error"
            model = text_of(fields, "model")
            if scrub(fields):
                body = encode_fields(fields)
        request.seen.model = model
        outgoing = Outgoing(request, rules=self._engines.header_rules)
        strangers = await self._catalogue.strangers(model, request)
        tried: list[Engine] = [*passed_over, *strangers[Role.DECODE]]
        suspicion, again = Suspicion(), False
        asked: Engine | None = None
        last: PendingError | Refusal = _NOBODY
        while (engine := self._engines.pick(Role.DECODE, tried, again=again)) is not None:
            again = True
            tried.append(engine)
            answered = await self._ask(engine, outgoing.to(engine, body), request, reply, self.silence_s)
            if isinstance(answered, str):
                return answered
            asked, last = engine, answered
            if suspicion.confirmed(last.status) or (isinstance(last, Refusal) and last.code == EngineSilentError.code):
                break  # after a silence the client has waited long enough
        return _give_up(last, reply, asked)

    async def _ask(
        self, engine: Engine, leg: Leg, request: Request, reply: Reply, silence_s: float
    ) -> str | PendingError | Refusal:
        relay: Relay | None = None
        try:
            async with self._engines.ask(engine, leg, timeout_s=silence_s) as call:
                if is_engine_fault(call.status) or is_busy(call.status):
                    return await PendingError.take(call, timeout_s=silence_s)
                if request.method != "OPTIONS" and (said := await vet(call, timeout_s=silence_s)) is not None:
                    return said
                relay = Relay(call, reply, _own_headers(engine), end=StreamEnd.of(request.path))
                await relay.run(silence_s=silence_s)
                return "ok" if call.status < 400 else "client_error"
        except EngineError as error:
            if relay is not None:
                relay.break_off(error)
                return "error"
            return Refusal(error.http_status, error.code, f"{engine.name}: {error.told}")


_NOBODY = Refusal(503, "unreachable", "No engine is there to answer")


def _give_up(last: PendingError | Refusal, reply: Reply, asked: Engine | None) -> str:
    own = [] if asked is None else _own_headers(asked)
    if isinstance(last, Refusal):
        reply.refuse(last, own)
    else:
        last.give(reply, own)
    return "error" if last.status >= 500 else "client_error"


def _own_headers(engine: Engine) -> Headers:
    return [(b"x-kvrelay-" + engine.role.value.encode(), engine.name.encode())]
