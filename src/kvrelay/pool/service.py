"""A pool server as a process: its arena, its listeners, the admin API, and a graceful end."""

from __future__ import annotations

import asyncio
import gc
import logging
import secrets
import signal
import time
from typing import TYPE_CHECKING

from kvrelay import openfiles
from kvrelay.admin.bridge import Bridge
from kvrelay.errors import ConfigError
from kvrelay.pool.admin.core_control import CoreControl
from kvrelay.pool.core.pool import NixlOffer
from kvrelay.pool.metrics import PoolMetrics
from kvrelay.pool.server import PoolServer
from kvrelay.sizes import format_size, parse_size
from kvrelay.transport.certificates import reload, server_context
from kvrelay.transport.memory import Backing
from kvrelay.transport.shm import Arena

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable

    from kvrelay.admin.server import AdminServer
    from kvrelay.pool.config import PoolConfig
    from kvrelay.pool.tiers.service import TierService
    from kvrelay.transport.nixl import NixlArena

log = logging.getLogger("kvrelay.pool")

GC_OBJECTS = 100_000
"""New objects between two looks for garbage."""
DRAIN_LOOK_S = 0.05
"""How often a draining pool looks whether anything is still held."""
DRAIN_TELL_S = 2.0
"""How often it tells what."""


class PoolService:
    """Runs one pool, from its configuration to its end."""

    def __init__(self, config: PoolConfig, announce: Callable[[str], None]) -> None:
        """``announce``: called with a line that says where the pool is, once it is there."""
        self._config = config
        self._announce = announce
        self._signals: asyncio.Queue[signal.Signals] = asyncio.Queue()
        self._context: ssl.SSLContext | None = None

    async def run(self) -> int:
        """Serve until told to stop. Exit status: 0 after SIGTERM, 130 after Ctrl-C.

        Raises:
            ConfigError: the pool cannot be what the configuration asks for.
        """
        # What a pool holds is long-lived and free of cycles: looking for garbage after every 700 objects took a quarter
        # of its time under a load of small ones.
        gc.freeze()
        gc.set_threshold(GC_OBJECTS)
        openfiles.raise_limit(log)
        self._watch_signals()
        settings = self._config.settings
        tls = settings.tls
        if tls.cert is not None:
            self._context = server_context(tls.cert, tls.key, tls.client_ca)
        page = parse_size(settings.huge_pages) if settings.huge_pages else 0
        arena = Arena.create(settings.size, Backing(page, settings.numa_nodes, settings.mlock))
        try:
            return await self._serve(arena)
        finally:
            arena.close()

    async def _serve(self, arena: Arena) -> int:
        config = self._config
        server = PoolServer(arena, tenants=config.tenants, rules=config.rules, index=config.settings.index)
        nixl = self._nixl(server, arena)
        tiers: TierService | None = None
        try:
            tiers = self._tiers(server, arena)
            return await self._serve_on(server, arena, tiers)
        finally:
            if nixl is not None:
                nixl.close()
            if tiers is not None:
                await asyncio.to_thread(tiers.close)

    def _nixl(self, server: PoolServer, arena: Arena) -> NixlArena | None:
        """The arena's NIXL agent, if it is asked for. A thread of NIXL's own answers clients."""
        if not self._config.settings.nixl:
            return None
        from kvrelay.transport.nixl import NixlArena

        offered = NixlArena(arena.view, f"kvrelay-{secrets.token_hex(8)}")
        server.core.nixl = NixlOffer(offered.name, offered.metadata, offered.base)
        return offered

    def _tiers(self, server: PoolServer, arena: Arena) -> TierService | None:
        """The lower tiers, if there are any, below ``server``."""
        configs = self._config.tiers
        if not configs:
            return None
        from kvrelay.pool.tiers.config import open_tiers
        from kvrelay.pool.tiers.service import TierService

        guards = open_tiers(configs)
        loop = asyncio.get_running_loop()
        tiers = TierService(
            configs,
            guards,
            server.core,
            arena.view,
            post=loop.call_soon_threadsafe,
            settle=server.settle,
            now=server.now,
        )
        server.dispatch = tiers.dispatch
        return tiers

    async def _serve_on(self, server: PoolServer, arena: Arena, tiers: TierService | None) -> int:
        control = CoreControl(server, tiers.states if tiers is not None else tuple)
        try:
            for address in self._config.addresses:
                server.listen(address, None if address.is_unix else self._context)
            admin = self._admin(control, server)
        except BaseException:
            server.stop()
            await server.run()  # which closes what listens already, and does no more
            raise
        serving = asyncio.create_task(server.run())
        where = ", ".join(map(str, server.addresses))
        auth = "token required" if self._config.needs_token else "no token"
        shown = f", admin {admin.url}" if admin is not None else ""
        self._announce(f"kvrelay pool ready: {where}, {format_size(arena.size)}, {auth}{shown}")
        try:
            number = await self._signals.get()
            if await self._drain(server, control, number) and tiers is not None:
                await self._keep(tiers)
        finally:
            server.stop()
            await serving
            if admin is not None:
                await asyncio.to_thread(admin.stop)
        return 128 + signal.SIGINT if number == signal.SIGINT else 0

    def _admin(self, control: CoreControl, server: PoolServer) -> AdminServer | None:
        """The admin API, if it is asked for."""
        listen = self._config.settings.admin.listen
        if listen is None:
            return None
        try:
            from kvrelay.admin.server import AdminServer
            from kvrelay.pool.admin.app import make_app
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"admin.listen needs the package {error.name}: pip install 'kvrelay[admin]', or leave it out"
            ) from None
        admin = AdminServer(listen)
        metrics = PoolMetrics(control, server.latencies, server.traffic)
        bridge = Bridge(asyncio.get_running_loop())
        admin.start(make_app(control, bridge, metrics.snapshot, self._config.admin_token))
        return admin

    async def _drain(self, server: PoolServer, control: CoreControl, number: signal.Signals) -> bool:
        """Serve what is held until nothing is, or the time is up; False: a second signal came."""
        control.drain(on=True)
        if held := _held(server):
            timeout_s = self._config.settings.drain_timeout_s
            log.info("%s: no new objects are taken; %s: up to %g s", number.name, held, timeout_s)
        return await self._wait_while(lambda: _held(server), self._config.settings.drain_timeout_s)

    async def _keep(self, tiers: TierService) -> None:
        """Copy down what is in memory only, if there is to be time for it."""
        timeout_s = self._config.settings.flush_timeout_s
        if timeout_s <= 0:
            return
        tiers.keep_all()
        if tiers.tiering.keeping:
            log.info("copying objects that are in memory only to the tiers: up to %g s", timeout_s)
        await self._wait_while(lambda: "objects in memory only" if tiers.tiering.keeping else "", timeout_s)

    async def _wait_while(self, held: Callable[[], str], timeout_s: float) -> bool:
        """Go on while ``held`` says what for, for so long; False: a signal came."""
        if not held():
            return True
        again = asyncio.create_task(self._signals.get())
        started = told = time.monotonic()
        try:
            while what := held():
                now = time.monotonic()
                if now - started >= timeout_s:
                    log.warning("cut off: %s", what)
                    return True
                if now - told >= DRAIN_TELL_S:
                    told = now
                    log.info("waiting for %s", what)
                await asyncio.wait({again}, timeout=DRAIN_LOOK_S)
                if again.done():
                    log.warning("%s again; cut off: %s", again.result().name, what)
                    return False
        finally:
            again.cancel()
        return True

    def _watch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signals.put_nowait, number)
        loop.add_signal_handler(signal.SIGHUP, self._reload)

    def _reload(self) -> None:
        """Read the certificates again: new connections get the new ones."""
        tls = self._config.settings.tls
        if self._context is None or tls.cert is None:
            log.info("SIGHUP: there are no certificates to read again")
            return
        try:
            reload(self._context, tls.cert, tls.key, tls.client_ca)
        except ConfigError as error:
            log.error("SIGHUP: the new certificates cannot be used, and the old ones stay: %s", error)  # noqa: TRY400 - said in full
        else:
            log.info("SIGHUP: certificates read again from %s", tls.cert)


def _held(server: PoolServer) -> str:
    """What a draining pool waits for, in words; nothing when it can end."""
    stats = server.core.stats()
    held = [
        (stats["leases"], "leases"),
        (stats["unsealed"], "objects being written"),
        (stats["tickets"], "tickets"),
        (stats["sending"], "answers on their way"),
    ]
    return ", ".join(f"{count} {what}" for count, what in held if count)
