"""The running router: parts put together, a listening socket, an orderly end."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from kvrelay.errors import BadRequestError, ConfigError, ConflictError
from kvrelay.profiles.registry import PROFILES
from kvrelay.router.core.answers import Refusal, refusal
from kvrelay.router.core.fleet import Role, make_engines
from kvrelay.router.core.health import HealthSettings
from kvrelay.router.core.kv.settings import publishers_of
from kvrelay.router.core.membership import Membership, wanted
from kvrelay.router.core.observing.forwarding import rules_of
from kvrelay.router.core.paths import Route, route
from kvrelay.router.core.records import RecordBook
from kvrelay.router.core.request_options import read_time_limit
from kvrelay.router.core.router_state import EngineStatus, RouterState, status_of
from kvrelay.router.endpoints import RouterEndpoints
from kvrelay.router.engine_tls import EngineTls
from kvrelay.router.engines import Engines
from kvrelay.router.entrance.gate import Gate
from kvrelay.router.entrance.tls import make_context, renew
from kvrelay.router.fleet_manager import FleetManager
from kvrelay.router.http.messages import Request
from kvrelay.router.http.registry import Registry
from kvrelay.router.http.server import Connection, Limits
from kvrelay.router.kv.hub import make_hub
from kvrelay.router.kv.pool_index import PoolIndex
from kvrelay.router.kv.token_ids import make_finder
from kvrelay.router.kv_compatibility import KvCompatibility
from kvrelay.router.listen_errors import listening_problem
from kvrelay.router.metrics import RouterMetrics
from kvrelay.router.models import Catalogue
from kvrelay.router.observer import Observer
from kvrelay.router.passthrough import Passthrough
from kvrelay.router.probing import Prober
from kvrelay.router.proxy import Disaggregator, LostKv, Timeouts
from kvrelay.router.reloading import Applied, changed, fixed_problems, live_of, with_live
from kvrelay.router.request_ids import RequestIds
from kvrelay.router.routing import Routing
from kvrelay.router.tickets import TicketManager
from kvrelay.router.time_limit import within
from kvrelay.router.worker_peers import WorkerPeers
from kvrelay.router.worker_sync import WorkerSync

if TYPE_CHECKING:
    import ssl
    from collections.abc import Awaitable, Callable

    from kvrelay.router.config import RouterConfig
    from kvrelay.router.http.reply import Reply
    from kvrelay.router.pool_link import TicketClient
    from kvrelay.router.workers import Seat

logger = logging.getLogger(__name__)

BACKLOG = 1024
HANDSHAKE_TIMEOUT_S = 10.0
ABORT_TIMEOUT_S = 5.0
"""For cut-off requests to let go of engines and tickets."""


class RouterService:
    """A router. Made, started and stopped in one event loop."""

    def __init__(
        self,
        config: RouterConfig,
        connect_pool: Callable[[], Awaitable[TicketClient]] | None,
        *,
        limits: Limits | None = None,
        health: HealthSettings | None = None,
        seat: Seat | None = None,
    ) -> None:
        """``connect_pool``: None for no tickets. ``seat``: of a worker among several, whose sockets it listens on."""
        self._config = config
        self._limits = limits or Limits(max_body_bytes=config.max_body_bytes)
        settings = health or HealthSettings()
        policies = config.routing.make_policies()
        prefills = make_engines(Role.PREFILL, config.prefills, settings)
        decodes = make_engines(Role.DECODE, config.decodes, settings)
        self._metrics = metrics = RouterMetrics(prefills + decodes)
        self._resilience = resilience = config.resilience
        self.engines = engines = Engines(
            prefills, decodes, connect_timeout_s=config.connect_timeout_s, metrics=metrics, budget=resilience.budget,
            header_rules=rules_of(config.observing.headers, own=config.entrance.own_headers), policies=policies,
            tls=EngineTls(config.engine_tls),
        )  # fmt: skip
        self.kv = make_hub(policies.values(), metrics.kv)
        for engine in engines.all:
            engine.kv_events = config.kv_events.get(engine.address, ())
        self._prober = Prober(engines, resilience.probe_interval_s)
        hands_over = PROFILES[config.connector].hands_over
        membership = Membership(engines.all, settings, prefills=hands_over, listens=self.kv is not None)
        peers = None if seat is None else WorkerPeers(seat.group, seat.number, seat.count)
        saved = None if seat is None else seat.saved
        self.worker_sync = WorkerSync(peers, self._state, self._adopt, self._statuses, saved)
        self.fleet = FleetManager(membership, engines, self._fleet_changed, self.worker_sync.left)
        self._engine_names = {engine.name for engine in engines.all}
        self._tickets = None
        compatibility = KvCompatibility(self._engine_names, metrics)
        if connect_pool is not None:
            self._tickets = TicketManager(
                connect_pool,
                deadline_s=config.handover_timeout_s,
                patience_s=config.ticket_timeout_s,
                metrics=metrics,
                compatibility=compatibility,
            )
        offset = time.time() - time.monotonic()
        book = RecordBook()
        self._catalogue = Catalogue(engines)

        def now() -> float:
            return time.monotonic() + offset

        self._observer = Observer(config.observing, metrics, self._tickets, now)
        self._finder = finder = make_finder(config.kv, policies.values(), engines, metrics.kv)
        pool_index = None
        if config.kv.pool_index and self._tickets is not None:
            pool_index = PoolIndex(self._tickets.link, compatibility, engines)
        self._disaggregator = Disaggregator(
            engines,
            self._catalogue,
            PROFILES[config.connector],
            self._tickets,
            book,
            metrics,
            _timeouts(config),
            _lost_kv(config),
            Routing(config.routing, engines, metrics, finder, pool_index),
            now,
            dispatch=config.dispatch,
            first_token=config.first_token,
            tokenise=config.tokenise,
        )
        self._passthrough = Passthrough(engines, self._catalogue, silence_s=config.decode_timeout_s)
        self._endpoints = RouterEndpoints(
            engines, self._tickets, book, metrics, compatibility, colocated_fallback=config.routing.colocated_fallback,
            peers=peers, worker_sync=self.worker_sync,
        )  # fmt: skip
        self._connections = Registry()
        self._request_ids = RequestIds()
        self._sockets = [] if seat is None else seat.sockets
        self._servers: list[asyncio.Server] = []
        entrance = config.entrance if seat is None else config.entrance.share(seat.number, seat.count)
        self._gate = Gate(entrance, engines, metrics)
        engines.max_per_decode = entrance.max_per_decode
        self._context: ssl.SSLContext | None = None

    @property
    def port(self) -> int:
        """The port listened on."""
        port: int = self._servers[0].sockets[0].getsockname()[1]
        return port

    async def start(self) -> None:
        """Listen, and reach for the pool.

        Raises:
            ConfigError: the address cannot be listened on, the access log cannot be written, or there is no tokenizer.
            KvRelayError: the pool refuses us.
        """
        if self._finder is not None:
            await self._finder.start()
        await self._observer.start()
        loop = asyncio.get_running_loop()
        host, port, tls = self._config.host, self._config.port, self._config.entrance.tls
        if tls is not None:
            self._context = await asyncio.to_thread(make_context, tls)
        if self._sockets:
            await self._read_keys_anew()
        try:
            await self._endpoints.start()
            await self.worker_sync.begin()
            try:
                await self._listen(loop)
            except OSError as error:
                raise ConfigError(listening_problem(host, port, error)) from None
            if self._tickets is not None:
                await self._tickets.start()
        except BaseException:
            for server in self._servers:
                server.close()
            await self.worker_sync.close()
            await self._endpoints.close()
            await self._observer.close()
            raise
        self._prober.watch(self.engines.all)
        if self.kv is not None:
            self.kv.start(publishers_of(self.engines.all))

    @property
    def config(self) -> RouterConfig:
        """As it is now."""
        return self._config

    @property
    def draining(self) -> bool:
        """Whether the router is about to end."""
        return self._endpoints.draining

    @property
    def drain_timeout_s(self) -> float:
        """What requests in flight are given when an engine, or the router, goes."""
        return self._config.drain_timeout_s

    async def render_metrics(self) -> bytes:
        """Prometheus text, of all workers together."""
        return await self._endpoints.text()

    def apply(self, config: RouterConfig) -> Applied:
        """Go over to a new configuration: all of it, or nothing.

        Raises:
            ConfigError: with every reason why not.
        """
        problems = list(fixed_problems(self._config, config))
        try:
            plan = self.fleet.plan(wanted(config.prefills, config.decodes), config.kv_events)
        except ConflictError as error:
            problems.append(str(error))
        if problems:
            raise ConfigError(*problems)
        fleet = self.fleet.apply(plan, config.drain_timeout_s, config.kv_events)
        applied = Applied(fleet, changed(self._config, config))
        self._go_over(config)
        self.worker_sync.changed()
        logger.info("the new configuration is in use: %s", applied.told())
        return applied

    def _go_over(self, config: RouterConfig) -> None:
        """What may change, the fleet aside, is as in ``config`` from now on."""
        self._config, self._resilience = config, config.resilience
        self._disaggregator.timeouts, self._disaggregator.lost_kv = _timeouts(config), _lost_kv(config)
        self._passthrough.silence_s = config.decode_timeout_s
        if self._tickets is not None:
            self._tickets.deadline_s = config.handover_timeout_s
        self.engines.budget.change(config.resilience.budget, self.engines.now)
        self._prober.watch(self.engines.all, config.resilience.probe_interval_s)

    def _state(self, version: int) -> RouterState:
        return RouterState(
            version=version, members=self.fleet.members, numbers=self.fleet.numbers, live=live_of(self._config)
        )

    def _adopt(self, state: RouterState) -> None:
        config = with_live(self._config, state.live)
        self._go_over(config)
        self.fleet.adopt(state.members, state.numbers, config.kv_events, config.drain_timeout_s)

    def _statuses(self) -> dict[str, EngineStatus]:
        return {engine.name: status_of(engine, self.engines.now) for engine in self.engines.all}

    def _fleet_changed(self) -> None:
        everybody = self.engines.all
        self._engine_names.clear()
        self._engine_names.update(engine.name for engine in everybody)
        self._prober.watch(everybody)
        self._endpoints.forget_all_but(everybody)
        if self.kv is not None:
            self.kv.listen_to(publishers_of(everybody))
        self.worker_sync.changed()

    async def _listen(self, loop: asyncio.AbstractEventLoop) -> None:
        def connection() -> Connection:
            return Connection(self._handle, self._limits, self._connections, loop, self._refuse, self._gate.screen)

        tls = self._context
        limit_s = HANDSHAKE_TIMEOUT_S if tls is not None else None
        if not self._sockets:
            host, port = self._config.host, self._config.port
            server = await loop.create_server(
                connection, host, port, backlog=BACKLOG, ssl=tls, ssl_handshake_timeout=limit_s
            )
            self._servers.append(server)
        for sock in self._sockets:
            server = await loop.create_server(
                connection, sock=sock, backlog=BACKLOG, ssl=tls, ssl_handshake_timeout=limit_s
            )
            self._servers.append(server)

    async def _read_keys_anew(self) -> None:
        """A worker that comes in another's place was given what the file held when the router was started."""
        try:
            await self._gate.reload()
        except ConfigError as error:
            logger.error("the keys are those the router was started with: %s", error)  # noqa: TRY400 - said in full

    async def reload_entrance(self) -> None:
        """Read API keys and certificates again, for requests and connections from now on.

        Raises:
            ConfigError: files cannot be used; what was in use of these stays, the others count.
        """
        problems: list[str] = []
        for read in (self._gate.reload, self.engines.tls.renew, self._renew_certificate):
            try:
                await read()
            except ConfigError as error:
                problems += error.problems
        if problems:
            raise ConfigError(*problems)

    async def _renew_certificate(self) -> None:
        if self._context is not None and self._config.entrance.tls is not None:
            renew(self._context, self._config.entrance.tls)

    async def stop(self) -> int:
        """Give notice, then take no more requests, let those in flight end within the drain time, close everything.

        Returns how many requests had to be cut off.
        """
        self._endpoints.draining = True
        await asyncio.sleep(self._resilience.drain_notice_s)
        for server in self._servers:
            server.close()
        for connection in self._connections:
            connection.drain()
        await self._connections.emptied(timeout_s=self._config.drain_timeout_s)
        cut = sum(connection.busy for connection in self._connections)
        for connection in self._connections:
            connection.abort()
        await self._connections.emptied(timeout_s=ABORT_TIMEOUT_S)
        if self.kv is not None:
            await self.kv.close()
        if self._finder is not None:
            self._finder.close()
        if self._tickets is not None:
            await self._tickets.close()
        await self.worker_sync.close()
        await self._endpoints.close()
        self._catalogue.close()
        await self._prober.close()
        await self.fleet.close()
        await self._disaggregator.defaults.close()
        self.engines.close()
        await self._observer.close()
        return cut

    def reopen_logs(self) -> None:
        """Go on in new log files: the old ones have been renamed."""
        self._observer.reopen()

    async def _handle(self, request: Request, reply: Reply) -> None:
        known = route(request.method, request.path)
        name = self._request_ids.make()
        if known is Route.DISAGGREGATE:
            name = f"ho-{name}"
        self._observer.arrived(request, reply, name, traced=known in _ON_ENGINES)
        outcome = "cancelled"
        try:
            limit_s = 0.0
            if known in _ON_ENGINES:
                limit_s = read_time_limit(request.header, self._resilience.request_timeout_s)
            if known is Route.DISAGGREGATE and self._gate.idle and not limit_s:  # every coroutine between costs
                outcome = await self._disaggregator.handle(request, reply, name)
            else:
                served = self._gate.admit(known, request, reply, lambda: self._dispatch(known, request, reply, name))
                outcome = await within(limit_s, served, reply)
        except BadRequestError as error:
            reply.refuse(refusal(error))
            outcome = "client_error"
        finally:
            endpoint = "other" if known in _NAMELESS else request.path
            self._metrics.requests.labels(endpoint, outcome).inc()
            self._observer.over(request, reply, outcome, told=known not in _PROBES)
            logger.debug("%s %s: %s", request.method, request.path, outcome)

    def _refuse(self, refusal: Refusal, reply: Reply) -> None:
        """Answer what could not be read as a request."""
        nothing = Request(method="", target=b"", headers=[], body=b"", http_1_0=False, keep_alive=False)
        self._observer.arrived(nothing, reply, self._request_ids.make(), traced=False)
        reply.refuse(refusal)
        self._metrics.requests.labels("other", "client_error").inc()
        self._observer.over(nothing, reply, "client_error", told=True)

    async def _dispatch(self, known: Route, request: Request, reply: Reply, name: str) -> str:
        match known:
            case Route.DISAGGREGATE:
                return await self._disaggregator.handle(request, reply, name)
            case Route.ANY:
                return await self._passthrough.any_engine(request, reply)
            case Route.MODELS:
                return await self._passthrough.models(request, reply)
            case Route.STORED:
                return await self._passthrough.stored(request, reply)
            case Route.PASS:
                return await self._passthrough.decode_engine(request, reply)
            case Route.HEALTH:
                await self._endpoints.health(reply)
            case Route.METRICS:
                await self._endpoints.metrics(reply)
            case Route.HANDOVER:
                return await self._endpoints.handover(request, reply)
            case Route.WRONG_METHOD:
                reply.refuse(Refusal(405, "method", f"{request.method} is not a method of {request.path}"))
                return "client_error"
            case Route.UNKNOWN:
                reply.refuse(Refusal(404, "unknown_path", _UNKNOWN.format(request.path[:256])))
                return "client_error"
        return "ok"


def _timeouts(config: RouterConfig) -> Timeouts:
    return Timeouts(
        prefill_s=config.prefill_timeout_s,
        handover_s=config.handover_timeout_s,
        decode_s=config.decode_timeout_s,
        first_byte_s=config.resilience.first_byte_timeout_s or config.decode_timeout_s,
    )


def _lost_kv(config: RouterConfig) -> LostKv:
    return LostKv(policy=config.on_lost_kv, max_reprefills=config.max_reprefills)


_ON_ENGINES = frozenset({Route.DISAGGREGATE, Route.PASS, Route.ANY, Route.MODELS, Route.STORED})
_NAMELESS = frozenset({Route.UNKNOWN, Route.WRONG_METHOD, Route.STORED, Route.HANDOVER})
"""Their paths are any number: metrics do not tell them apart."""
_PROBES = frozenset({Route.HEALTH, Route.METRICS})
"""Asked every few seconds by machines: not worth a line in the access log."""
_UNKNOWN = "{} is not served here: administration and other paths of an engine are reached on the engine itself"
