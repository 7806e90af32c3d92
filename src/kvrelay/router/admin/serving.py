"""The administration of a running router: its admin API, if there is one, and what SIGHUP does."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from kvrelay.errors import ConfigError, KvRelayError

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvrelay.admin.server import AdminServer
    from kvrelay.router.config import RouterConfig
    from kvrelay.router.core.admin import Admin
    from kvrelay.router.reloading import Applied
    from kvrelay.router.service import RouterService

logger = logging.getLogger(__name__)


class Serving:
    """Made, started and stopped in the router's process; `stop` blocks."""

    def __init__(
        self,
        admin: Admin | None,
        service: RouterService,
        read_config: Callable[[], RouterConfig] | None,
        server: AdminServer | None = None,
    ) -> None:
        """``server``: bound already, if there is to be an API; ``read_config``: reads flags and file again, if any."""
        self._admin = admin
        self._service = service
        self._read_config = read_config
        self._server = server
        self._reloads: set[asyncio.Task[None]] = set()
        self._turn = asyncio.Lock()
        """Whose it is reads and applies: what was read last is to be what counts."""

    def start(self) -> None:
        """Serve, and hand over to the running event loop."""
        if self._server is None or self._admin is None:
            return
        from kvrelay.admin.bridge import Bridge
        from kvrelay.router.admin.app import make_app

        bridge = Bridge(asyncio.get_running_loop(), who="the router")
        self._server.start(make_app(self._service, bridge, self.reload, self._admin.token))

    def stop(self) -> None:
        """End it."""
        if self._server is not None:
            self._server.stop()

    async def reload(self) -> Applied:
        """Go over to flags and configuration file as they are on disk now; what counts is what was read last.

        Raises:
            ConfigError: there is no file, or with every reason why not: then nothing changes.
        """
        async with self._turn:
            return await self._apply_again()

    def on_hangup(self) -> None:
        """SIGHUP: go on in new log files, with the keys, certificates and configuration as they are on disk now."""
        self._service.reopen_logs()
        task = asyncio.create_task(self._hang_up())
        self._reloads.add(task)
        task.add_done_callback(self._reloads.discard)

    async def _hang_up(self) -> None:
        async with self._turn:
            await self._read_again()

    async def _read_again(self) -> None:
        try:
            await self._service.reload_entrance()
        except ConfigError as error:
            for problem in error.problems:
                logger.error("SIGHUP: a file cannot be used, and what it held before stays in use: %s", problem)  # noqa: TRY400 - said in full
        else:
            logger.info("SIGHUP: keys and certificates have been read again")
        if self._read_config is None or not self._service.worker_sync.leads:
            return
        try:
            await self._apply_again()
        except ConfigError as error:
            for problem in error.problems:
                logger.error("the new configuration is refused, and nothing changes: %s", problem)  # noqa: TRY400
        except KvRelayError as error:
            logger.error("the new configuration is refused, and nothing changes: %s", error)  # noqa: TRY400

    async def _apply_again(self) -> Applied:
        if self._read_config is None:
            raise ConfigError("the router was started without --config: there is nothing to read again")
        return self._service.apply(await asyncio.to_thread(self._read_config))


def bind(admin: Admin) -> AdminServer:
    """Where the API will be served.

    Raises:
        ConfigError: the address cannot be used, or a package is missing.
    """
    try:
        import fastapi  # noqa: F401 - the app needs it
        import uvicorn  # noqa: F401

        from kvrelay.admin.server import AdminServer
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"--admin-listen needs the package {error.name}: pip install 'kvrelay[admin]', or leave it out"
        ) from None
    return AdminServer(admin.listen, who="router")


def told_of(server: AdminServer | None) -> str:
    """Where the API is, for people."""
    return "" if server is None else f", admin {server.url}"
