"""Requests to engines: which one, on what connection, and what its conduct says about its health."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from typing import TYPE_CHECKING

from kvrelay.router.core.budget import BudgetSettings, RetryBudget
from kvrelay.router.core.fleet import Engine, Role
from kvrelay.router.core.health import is_engine_fault
from kvrelay.router.core.picker import Picker
from kvrelay.router.core.policy.base import NO_REQUEST
from kvrelay.router.core.policy.registry import DEFAULT, make_policy
from kvrelay.router.engine_tls import EngineTls
from kvrelay.router.errors import EngineError, EngineUnreachableError
from kvrelay.router.http.messages import render
from kvrelay.router.http.upstream import EngineClient

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from kvrelay.router.core.observing.forwarding import HeaderRules
    from kvrelay.router.core.observing.observation import Leg
    from kvrelay.router.core.policy.base import EngineView, Policy, RequestView
    from kvrelay.router.http.call import Call
    from kvrelay.router.http.messages import Headers
    from kvrelay.router.metrics import RouterMetrics

logger = logging.getLogger(__name__)

MAX_PROBE_BYTES = 1 << 20


class Asking:
    """One leg, sent and seen to its end by an ``async with``: a class, since a generator costs three times as much."""

    __slots__ = ("_client", "_engines", "_on_sent", "_timeout_s", "call", "engine", "leg", "num_tokens")

    def __init__(
        self,
        engines: Engines,
        client: EngineClient,
        engine: Engine,
        leg: Leg,
        *,
        timeout_s: float,
        on_sent: Callable[[], None],
        num_tokens: int,
    ) -> None:
        """``client``: of ``engine``; the rest as of `Engines.ask`."""
        self._engines = engines
        self._client = client
        self._timeout_s = timeout_s
        self._on_sent = on_sent
        self.engine = engine
        self.leg = leg
        self.num_tokens = num_tokens
        self.call: Call | None = None

    async def __aenter__(self) -> Call:
        self._engines.began(self)
        try:
            opening = self._client.open(self.leg.message, timeout_s=self._timeout_s, on_sent=self._on_sent)
            self.call = call = await opening
            self._engines.answered(self, call)
        except BaseException as error:
            self._engines.over(self, error)
            raise
        return call

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._engines.over(self, error)


class Engines:
    """All engines, in rotation by role."""

    def __init__(
        self,
        prefills: Sequence[Engine],
        decodes: Sequence[Engine],
        *,
        connect_timeout_s: float,
        metrics: RouterMetrics,
        policies: Mapping[Role, Policy] | None = None,
        header_rules: HeaderRules | None = None,
        budget: BudgetSettings | None = None,
        tls: EngineTls | None = None,
    ) -> None:
        """Connections are made when first needed. ``policies``: each role's own; the default's if not given.

        ``header_rules``: which of a client's headers reach engines; None for all that are about the request.
        ``budget``: how many requests may be sent to another engine. ``tls``: for those whose URL is https.
        """
        self.header_rules = header_rules
        self.prefills = tuple(prefills)
        self.decodes = tuple(decodes)
        self.max_per_decode = 0
        """Requests on one decode engine at once, while there is one with fewer; 0: any number."""
        self._metrics = metrics
        self.budget = RetryBudget(budget or BudgetSettings(), asyncio.get_running_loop().time())
        policies = policies or {role: make_policy(DEFAULT, role) for role in Role}
        self.pickers = {role: Picker(policy, random.Random()) for role, policy in policies.items()}  # noqa: S311
        self._connect_timeout_s = connect_timeout_s
        self.tls = tls or EngineTls()
        self._clients = {engine.address: self._make_client(engine) for engine in self.all}
        self._eased = asyncio.Event()
        """Set when an engine may have become idle."""

    @property
    def all(self) -> tuple[Engine, ...]:
        """Prefill engines, then decode engines."""
        return self.prefills + self.decodes

    @property
    def now(self) -> float:
        """On the clock that loads and rests are measured by, in seconds."""
        return asyncio.get_running_loop().time()

    def views(self, role: Role, without: Collection[Engine] = ()) -> tuple[EngineView, ...]:
        """Engines of a role as a policy sees them now."""
        engines = self.prefills if role is Role.PREFILL else self.decodes
        return self.pickers[role].views(engines, self.now, without)

    def pick(
        self,
        role: Role,
        tried: Collection[Engine] = (),
        request: RequestView = NO_REQUEST,
        prefer: str = "",
        *,
        again: bool = False,
    ) -> Engine | None:
        """Who is asked for ``request``, by its role's policy. ``prefer``: an engine to ask instead, if it is well.

        ``tried``: who is not to be asked. ``again``: another engine was asked before; if the budget does not afford
        that there is nobody to ask.
        """
        now = asyncio.get_running_loop().time()
        engines = self.prefills if role is Role.PREFILL else self._with_room(tried)
        picker = self.pickers[role]
        if again and not self.budget.affords(now):
            self._metrics.retries.labels(role.value, "denied").inc()
            return None
        engine = picker.pick(engines, now, tried, request, prefer)
        if engine is None:
            return None
        if again:
            self.budget.retry(now)
            self._metrics.retries.labels(role.value, "sent").inc()
        else:
            self.budget.request()
        self._metrics.picked(picker.policy.name, role, picker.why)
        return engine

    @property
    def num_decodes_well(self) -> int:
        """Decode engines that are not passed over; all, if all are."""
        now = asyncio.get_running_loop().time()
        well = sum(not engine.draining and not engine.health.is_resting(now) for engine in self.decodes)
        return well or len(self.decodes)

    def _with_room(self, tried: Collection[Engine]) -> Sequence[Engine]:
        """Decode engines below their bound; all, if none that is left is."""
        bound = self.max_per_decode
        if not bound:
            return self.decodes
        room = [engine for engine in self.decodes if engine.load.in_flight < bound and engine not in tried]
        return room or self.decodes

    def ask(
        self,
        engine: Engine,
        leg: Leg,
        *,
        timeout_s: float,
        on_sent: Callable[[], None] = lambda: None,
        num_tokens: int = 0,
    ) -> Asking:
        """Send ``leg``; inside the block the answer's head is there. The call is closed at its end, come what may.

        ``on_sent`` is called when the message has been written, perhaps twice. ``num_tokens``: the prompt's, estimated.

        Keeps the engine's health and the metrics: an `EngineError` inside the block is the engine's failure too.
        """
        client = self._client(engine)
        return Asking(self, client, engine, leg, timeout_s=timeout_s, on_sent=on_sent, num_tokens=num_tokens)

    def began(self, asking: Asking) -> None:
        """A leg is about to be sent."""
        engine, metrics = asking.engine, self._metrics
        asking.leg.began = time.perf_counter()  # the loop's clock counts whole milliseconds
        if (sent := metrics.sent.get(engine)) is not None:
            sent.inc()
        metrics.in_flight[engine.role].inc()
        engine.load.begin(asking.num_tokens)

    def answered(self, asking: Asking, call: Call) -> None:
        """The head of its answer is there."""
        asking.leg.message, asking.leg.status = (), call.status
        if is_engine_fault(call.status):
            self._failed(asking.engine, "status_5xx")

    def over(self, asking: Asking, error: BaseException | None) -> None:
        """It is over, whatever came of it."""
        engine, leg, call, metrics = asking.engine, asking.leg, asking.call, self._metrics
        if isinstance(error, EngineError):
            leg.problem = error.code
            self._failed(engine, error.code, str(error))
        metrics.in_flight[engine.role].dec()
        engine.load.end(asking.num_tokens)
        self._eased.set()
        leg.message, leg.ended = (), time.perf_counter()
        if call is None:
            return
        call.close()
        if call.ended:
            leg.whole = True
            metrics.leg_seconds[engine.role].observe(leg.ended - leg.began)
            if isinstance(error, EngineError):
                return
            if not is_engine_fault(call.status):
                engine.health.succeeded()
            elif leg.status != call.status:  # found out only by its body
                leg.status = call.status
                self._failed(engine, "error_in_200")

    async def probe(self, engine: Engine, path: str, *, timeout_s: float) -> int:
        """GET ``path`` and return the status. Counts neither for nor against the engine.

        Raises:
            EngineError: it did not answer in time.
        """
        return (await self.exchange(engine, path, [], timeout_s=timeout_s))[0]

    async def exchange(
        self,
        engine: Engine,
        path: str,
        headers: Headers,
        *,
        body: bytes = b"",
        limit_bytes: int = MAX_PROBE_BYTES,
        timeout_s: float,
    ) -> tuple[int, bytes]:
        """GET ``path``, or POST the JSON ``body`` there; the status and the answer's body.

        Counts neither for nor against the engine.

        Raises:
            EngineError: it did not answer in time, or with more than ``limit_bytes``.
        """
        address, rules = engine.address, self.header_rules
        headers = [header for header in headers if rules is None or rules.passes(header[0])]
        if body:
            headers += [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        method = "POST" if body else "GET"
        line = f"{method} {address.base}{path} HTTP/1.1\r\nhost: {address.authority}\r\n".encode()
        call = await self._client(engine).open((line + render(headers) + b"\r\n" + body,), timeout_s=timeout_s)
        try:
            answer = await call.read(limit_bytes=limit_bytes, timeout_s=timeout_s)
        finally:
            call.close()
        return call.status, answer

    # --- who is in the fleet ---

    def join(self, engine: Engine) -> None:
        """An engine that is asked from now on."""
        self._clients[engine.address] = self._make_client(engine)
        self._metrics.joined(engine)

    def change_role(self, engine: Engine, moved: Engine) -> None:
        """An engine in another role: its legs under way end as they began."""
        self._metrics.left(engine, role_only=True)
        self._metrics.joined(moved)

    def leave(self, engine: Engine) -> None:
        """An engine that is gone, and all that is remembered of it."""
        self._clients.pop(engine.address).cut_off()
        self._metrics.left(engine)

    def order(self, engines: Sequence[Engine]) -> None:
        """Who there is now."""
        self.prefills = tuple(engine for engine in engines if engine.role is Role.PREFILL)
        self.decodes = tuple(engine for engine in engines if engine.role is Role.DECODE)

    def cut_off(self, engine: Engine) -> None:
        """End what it still works on: while nothing was sent to a client another engine is asked."""
        self._client(engine).cut_off()

    def hold(self, engine: Engine) -> None:
        """It has prefilled a prompt that a decode engine is to take from it; until `release` it is needed."""
        engine.load.handovers += 1

    def release(self, engine: Engine) -> None:
        """The decode engine has what it needs, or never will."""
        engine.load.handovers -= 1
        self._eased.set()

    async def idle(self, engine: Engine, timeout_s: float) -> bool:
        """Wait until nobody needs the engine. Whether it came to that within ``timeout_s``."""
        try:
            async with asyncio.timeout(timeout_s):
                while not engine.load.idle:
                    self._eased.clear()
                    await self._eased.wait()
        except TimeoutError:
            return False
        return True

    def _client(self, engine: Engine) -> EngineClient:
        client = self._clients.get(engine.address)
        if client is None:  # it has left since it was picked
            client = self._make_client(engine)
            client.close()
        return client

    def _make_client(self, engine: Engine) -> EngineClient:
        return EngineClient(engine.address, connect_timeout_s=self._connect_timeout_s, tls=self.tls)

    def close(self) -> None:
        """Close all connections."""
        for client in self._clients.values():
            client.close()

    def _failed(self, engine: Engine, reason: str, told: str = "") -> None:
        self._metrics.engine_failed(engine, reason)
        now = asyncio.get_running_loop().time()
        if engine.health.failed(now):
            if reason == EngineUnreachableError.code:
                self.pickers[engine.role].forget(engine)
            rest_s = engine.health.resting_until - now
            last = told if engine.address.url in told else f"{engine.address.url}: {told or reason}"
            logger.warning("%s fails (last: %s): passed over for %g s", engine.name, last, rest_s)
        elif told and engine.health.failures == 1:
            logger.info("%s has failed: %s", engine.name, told)
