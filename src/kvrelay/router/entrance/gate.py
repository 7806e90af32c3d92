"""Who comes in: keys, limits and slots before a request is served, and what it used afterwards."""

from __future__ import annotations

import asyncio
import math
import time
from typing import TYPE_CHECKING

from kvrelay.router.core.admission.queue import Entrant, Rejected
from kvrelay.router.core.admission.request_cost import RequestCost, read_asked, read_priority
from kvrelay.router.core.answers import Refusal
from kvrelay.router.core.observing.usage import count_silent, read_usage
from kvrelay.router.core.paths import Route
from kvrelay.router.core.request_options import PRIORITY
from kvrelay.router.entrance.cors import Cors
from kvrelay.router.entrance.keyring import Keyring
from kvrelay.router.entrance.slots import Slots

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from kvrelay.router.core.admission.accounts import Account
    from kvrelay.router.engines import Engines
    from kvrelay.router.entrance.settings import EntranceConfig
    from kvrelay.router.http.messages import Headers, Request
    from kvrelay.router.http.reply import Reply
    from kvrelay.router.metrics import RouterMetrics

NOBODY = ""
"""The flow of requests without keys."""
_OPEN = frozenset({Route.HEALTH, Route.METRICS, Route.UNKNOWN, Route.WRONG_METHOD})
"""Served whoever asks."""
_WORK = frozenset({Route.DISAGGREGATE, Route.PASS})
"""Takes an engine's time: needs a slot, and counts towards limits."""
_CREDENTIALS = frozenset({b"authorization", b"x-api-key"})
_OF_BROWSERS = frozenset({b"origin", b"access-control-request-method", b"access-control-request-headers"})
"""Engines would answer them in their own way."""
_OVERLOADED = {
    "queue_full": "Too many requests are waiting",
    "queue_timeout": "No engine was free in time",
}


class Gate:
    """In front of everything the router serves."""

    def __init__(self, config: EntranceConfig, engines: Engines, metrics: RouterMetrics) -> None:
        """``engines``: for how many there are."""
        self._config = config
        self._engines = engines
        self._metrics = metrics
        self._cors = Cors(config.cors_origins) if config.cors_origins else None
        self._slots = Slots(config.limits, self._num_slots, metrics) if config.admits else None
        self.keyring = None
        if config.keys_file is not None:
            assert config.keys is not None
            self.keyring = Keyring(config.keys_file, config.keys, worker=config.worker, num_workers=config.num_workers)
        self.idle = self._cors is None and self._slots is None and self.keyring is None and config.forward_authorization
        """Whether everybody may come in, as they are."""
        self._engine_headers: Headers = []
        if config.engine_api_key is not None:
            self._engine_headers = [(b"authorization", b"Bearer " + config.engine_api_key)]

    async def admit(self, known: Route, request: Request, reply: Reply, serve: Callable[[], Awaitable[str]]) -> str:
        """Let ``serve`` answer, when and if the request may come in. The outcome, for the metrics."""
        if self.idle:
            return await serve()
        if self._cors is not None:
            reply.extra += self._cors.headers(request)
            if answered := self._cors.preflight(request, reply):
                return answered
            request.headers = [header for header in request.headers if header[0] not in _OF_BROWSERS]
        account: Account | None = None
        if self.keyring is not None and known not in _OPEN:
            found = self._recognise(self.keyring, request.headers)
            if isinstance(found, Refusal):
                return self._refuse(reply, found, [(b"www-authenticate", b"Bearer")])
            account = found
            request.seen.key = account.key.name
        outcome = "cancelled"
        try:
            outcome = await self._admit_known(known, request, reply, serve, account)
        finally:
            if account is not None:
                self._metrics.key_requests.labels(account.key.name, outcome).inc()
        return outcome

    @property
    def screen(self) -> Callable[[Headers], Refusal | None] | None:
        """Looks at a request before its body comes: a large one of somebody unknown is not received."""
        return self._screen if self.keyring is not None else None

    async def reload(self) -> None:
        """Read the file of keys again.

        Raises:
            ConfigError: it cannot be used; the keys are as before.
        """
        if self.keyring is not None:
            await self.keyring.reload(asyncio.get_running_loop().time())

    def _screen(self, headers: Headers) -> Refusal | None:
        assert self.keyring is not None
        found = self._recognise(self.keyring, headers)
        if not isinstance(found, Refusal):
            return None
        self._metrics.refused.labels(found.code).inc()
        return found

    @staticmethod
    def _recognise(keyring: Keyring, headers: Headers) -> Account | Refusal:
        return keyring.recognise(headers, asyncio.get_running_loop().time(), time.time())

    async def _admit_known(
        self, known: Route, request: Request, reply: Reply, serve: Callable[[], Awaitable[str]], account: Account | None
    ) -> str:
        self._change_credentials(request)
        works = known in _WORK and request.method == "POST"
        if not works or (account is None and self._slots is None):
            return await serve()
        asked = read_asked(request.body, is_json=request.is_json, generates=known is Route.DISAGGREGATE)
        priority = _priority(request, asked, account)
        if isinstance(priority, Refusal):
            return self._refuse(reply, priority)
        if account is None:
            return await self._take_slot(asked, priority, reply, serve, None)
        if (refused := _model_refused(account, asked)) is not None:
            return self._refuse(reply, refused)
        now = asyncio.get_running_loop().time()
        if (denied := account.enter(asked.tokens, now)) is not None:
            refusal, retry_s = denied
            return self._refuse(reply, refusal, [*account.headers(now), (b"retry-after", b"%d" % retry_s)])
        reply.extra += account.headers(now)
        try:
            return await self._take_slot(asked, priority, reply, serve, account)
        finally:
            account.leave()

    async def _take_slot(
        self,
        asked: RequestCost,
        priority: int,
        reply: Reply,
        serve: Callable[[], Awaitable[str]],
        account: Account | None,
    ) -> str:
        if self._slots is None:
            return await self._serve_metered(asked, reply, serve, account)
        flow, weight = (account.key.name, account.key.weight) if account is not None else (NOBODY, 1.0)
        got: Entrant | Rejected | None = None
        try:
            got = await self._slots.take(flow, priority=priority, cost=float(asked.tokens), weight=weight)
        finally:
            if account is not None and not isinstance(got, Entrant):  # it has not been served: it does not count
                account.correct(-asked.tokens, asyncio.get_running_loop().time(), requests=-1.0)
        if isinstance(got, Rejected):
            message = f"{_OVERLOADED[got.reason]}. Please try again in {got.retry_after_s} s."
            headers = [(b"retry-after", b"%d" % got.retry_after_s)]
            return self._refuse(reply, Refusal(503, got.reason, message), headers)
        try:
            return await self._serve_metered(asked, reply, serve, account)
        finally:
            self._slots.give_back(got)

    async def _serve_metered(
        self, asked: RequestCost, reply: Reply, serve: Callable[[], Awaitable[str]], account: Account | None
    ) -> str:
        if account is None or not account.meters_tokens:
            return await serve()
        outcome = "cancelled"
        try:
            outcome = await serve()
        finally:
            prompt, completion = _used(asked, reply, outcome)
            now = asyncio.get_running_loop().time()
            account.correct(prompt + completion - asked.tokens, now)
            for kind, count in (("prompt", prompt), ("completion", completion)):
                self._metrics.key_tokens.labels(account.key.name, kind).inc(count)
        return outcome

    def _change_credentials(self, request: Request) -> None:
        """Engines get the client's own, ours, or none."""
        if not self._config.forward_authorization:
            request.headers = [header for header in request.headers if header[0] not in _CREDENTIALS]
            request.headers += self._engine_headers

    def _num_slots(self) -> float:
        config = self._config
        slots: float = config.max_concurrent or math.inf
        if config.max_per_decode:
            slots = min(slots, config.max_per_decode * self._engines.num_decodes_well)
        return slots

    def _refuse(self, reply: Reply, refusal: Refusal, headers: Headers | None = None) -> str:
        self._metrics.refused.labels(refusal.code).inc()
        headers = headers or []
        reply.refuse(refusal, headers)
        return "error" if refusal.status >= 500 else "client_error"


def _used(asked: RequestCost, reply: Reply, outcome: str) -> tuple[int, int]:
    """Tokens of prompt and completion: as the answer says, by its events, or as estimated; none for errors."""
    tail = reply.tail
    if (usage := read_usage(tail)) is not None:
        return usage.prompt_tokens, usage.completion_tokens
    if reply.num_events:
        return asked.prompt_tokens, max(0, reply.num_events - count_silent(tail, chat=False))
    if outcome == "cancelled":
        return asked.prompt_tokens, asked.completion_tokens
    return (asked.prompt_tokens if outcome == "ok" else 0), 0


def _priority(request: Request, asked: RequestCost, account: Account | None) -> int | Refusal:
    """The header's, the body's, or the most urgent ordinary one there is."""
    most_urgent = account.key.min_priority if account is not None else None
    priority = asked.priority
    if (said := request.header(PRIORITY)) is not None:
        priority = read_priority(said)
        if priority is None:
            return Refusal(400, "bad_request", f"{PRIORITY.decode()}: {said[:64]!r} is not a whole number of 32 bits")
    if priority is None:
        return max(0, most_urgent or 0)
    if most_urgent is not None and priority < most_urgent:
        message = f"This API key's requests may have a priority of {most_urgent} or more, not {priority}"
        return Refusal(403, "priority_not_allowed", message)
    return priority


def _model_refused(account: Account, asked: RequestCost) -> Refusal | None:
    models = account.key.models
    if not models or asked.model in models:
        return None
    legal = ", ".join(models)
    if asked.model is None:
        return Refusal(403, "model_not_allowed", f"This API key is for certain models only: name one of {legal}")
    return Refusal(403, "model_not_allowed", f"This API key is not for model {asked.model[:256]!r}, but for: {legal}")
