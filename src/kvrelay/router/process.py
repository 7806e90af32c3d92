"""A router as a process, or as several behind one port: from its configuration to its end."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import logging
import signal
from functools import partial
from typing import TYPE_CHECKING

from kvrelay import openfiles
from kvrelay.errors import ConfigError
from kvrelay.hosts import in_address
from kvrelay.profiles.registry import PROFILES
from kvrelay.router.admin.serving import Serving, bind, told_of
from kvrelay.router.config import pool_addresses
from kvrelay.router.core.kv.settings import unprotected
from kvrelay.router.entrance.settings import exposed_without
from kvrelay.router.listen_errors import listening_problem
from kvrelay.router.reloading import as_it_is_now
from kvrelay.router.service import RouterService
from kvrelay.router.several_pools import SeveralPools
from kvrelay.router.workers import Workers

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from kvrelay.admin.server import AdminServer
    from kvrelay.router.config import RouterConfig
    from kvrelay.router.pool_link import TicketClient
    from kvrelay.router.workers import Seat

logger = logging.getLogger("kvrelay.router")
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Of `mallopt`, as in glibc's malloc.h."""


class RouterProcess:
    """Runs one router, until a signal stops it."""

    def __init__(
        self,
        config: RouterConfig,
        read_config: Callable[[], RouterConfig] | None,
        *,
        announce: Callable[[str], None],
        exit_status: Callable[[Callable[[], int]], int],
    ) -> None:
        """``read_config`` reads flags and configuration file once more; None where there is no file.

        ``announce`` is called with a line that says where the router is, once it is there. ``exit_status`` makes of a
        worker's work what its process ends with.
        """
        self._config = config
        self._read_config = read_config
        self._say = announce
        self._exit_status = exit_status
        self._admin: AdminServer | None = None

    def run(self) -> int:
        """Serve. Exit status: 0 after SIGTERM, 130 after Ctrl-C.

        Raises:
            ConfigError: the router cannot be what the configuration asks for.
        """
        openfiles.raise_limit(logger)
        config = self._config
        self._admin = None if config.admin is None else bind(config.admin)
        stopped_by = self._run(config, None, self._admin) if config.workers == 1 else self._run_workers()
        return 128 + signal.SIGINT if stopped_by == signal.SIGINT else 0

    def _run(self, config: RouterConfig, seat: Seat | None, admin: AdminServer | None) -> int:
        """Serve in this process. The signal that stopped it."""
        import uvloop

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(self._serve(config, seat, admin))

    def _run_workers(self) -> int:
        """Serve in several processes, the first of them the admin API too. The signal that stopped them."""
        config, admin = self._config, self._admin
        try:
            workers = Workers(config.workers, config.host, config.port, self._work)
        except OSError as error:
            raise ConfigError(listening_problem(config.host, config.port, error)) from None
        try:
            return workers.run(lambda: self._announce(workers.port))
        finally:
            if admin is not None:
                admin.stop()

    def _work(self, seat: Seat) -> int:
        """What a worker does, in its own process. Its exit status."""
        for handler in logging.getLogger().handlers:
            handler.setFormatter(logging.Formatter(LOG_FORMAT.replace(":", f" [worker {seat.number}]:", 1)))
        if self._admin is not None and seat.number:
            self._admin.stop()

        def serve() -> int:
            admin = None if seat.number else self._admin
            self._run(as_it_is_now(self._config, self._read_config), seat, admin)
            return 0

        return self._exit_status(serve)

    async def _serve(self, config: RouterConfig, seat: Seat | None, server: AdminServer | None) -> int:
        loop = asyncio.get_running_loop()
        stopped: asyncio.Future[int] = loop.create_future()
        _stop_on_signals(stopped)
        service = RouterService(config, _pool_connector(config, seat), seat=seat)
        admin = Serving(config.admin, service, self._read_config, server)
        await service.start()
        admin.start()
        _calm_collector()
        _keep_memory()
        loop.add_signal_handler(signal.SIGHUP, admin.on_hangup)
        if seat is None:
            self._announce(service.port)
        else:
            seat.ready()
        number = await stopped
        notice_s = config.resilience.drain_notice_s
        logger.info(
            "%s: %sno more requests are taken; those in flight have %g s",
            signal.Signals(number).name, f"in {notice_s:g} s " if notice_s else "", config.drain_timeout_s,
        )  # fmt: skip
        stopping = asyncio.create_task(service.stop())
        again: asyncio.Future[int] = loop.create_future()
        _stop_on_signals(again)
        await asyncio.wait({stopping, again}, return_when=asyncio.FIRST_COMPLETED)
        if stopping.done() and (cut := stopping.result()):
            logger.warning("%d requests were cut off", cut)
        stopping.cancel()
        await asyncio.to_thread(admin.stop)
        return number

    def _announce(self, port: int) -> None:
        """Say that requests are taken."""
        config = self._config
        addresses = [
            (f"{letter}{index}", address)
            for letter, of_role in (("P", config.prefills), ("D", config.decodes))
            for index, address in enumerate(of_role)
        ]
        engines = ", ".join(f"{name} {address.url}" for name, address in addresses)
        url = f"{'http' if config.entrance.tls is None else 'https'}://{in_address(config.host)}:{port}"
        self._say(f"kvrelay router ready: {url} for {engines}{told_of(self._admin)}")
        if problem := exposed_without(config.host, config.entrance):
            logger.warning("%s", problem)
        if problem := unprotected(where for ranks in config.kv_events.values() for where in ranks):
            logger.warning("%s", problem)
        if PROFILES[config.connector].uses_pool and config.pool is None:
            logger.info("no --pool: requests are handed over without tickets and proofs")


def _calm_collector() -> None:
    """Let Python look for cycles of garbage less often, and not among what is there for good.

    A request leaves none; its objects are freed as it ends. Looking for them after every 700 took a tenth of the time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 50)


def _keep_memory() -> None:
    """Let the allocator keep what long bodies took for the next ones: glibc gives it back and asks for it each time.

    A tenth of the time of requests with prompts of 512 KiB. Other allocators are left alone.
    """
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        libc.mallopt(_M_TRIM_THRESHOLD, 64 << 20)


def _stop_on_signals(told: asyncio.Future[int]) -> None:
    def tell(number: int) -> None:
        if not told.done():
            told.set_result(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, tell, number)


def _pool_connector(config: RouterConfig, seat: Seat | None) -> Callable[[], Awaitable[TicketClient]] | None:
    if config.pool is None:
        return None
    from kvrelay.client.aio import AsyncPoolClient

    token = config.pool_token
    name = f"router {config.host}:{config.port}{'' if seat is None else f' worker {seat.number}'}"
    pools = [
        (address, partial(AsyncPoolClient.connect, address, name=name, token=token, map_arena=False))
        for address in pool_addresses(config.pool)
    ]
    return pools[0][1] if len(pools) == 1 else SeveralPools(pools).reach
