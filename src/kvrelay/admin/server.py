"""The admin API's HTTP server, in a thread of its own."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from typing import TYPE_CHECKING

from kvrelay.errors import ConfigError
from kvrelay.hosts import in_address
from kvrelay.transport.address import parse_host_port

if TYPE_CHECKING:
    import uvicorn
    from fastapi import FastAPI

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 64
KEEP_ALIVE_S = 15
STOP_S = 2.0
"""What requests under way get at the end."""


class AdminServer:
    """Serves an app on ``HOST:PORT`` from `start` to `stop`."""

    def __init__(self, listen: str, *, who: str = "pool") -> None:
        """Bind. ``who``: whose it is, for messages.

        Raises:
            ConfigError: the address cannot be used.
        """
        address = parse_host_port(listen)
        self._sock, target = address.new_socket()
        try:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._sock.bind(target)
            self._sock.listen(128)
        except OSError as error:
            self._sock.close()
            raise ConfigError(f"--admin-listen {listen}: cannot listen there: {error.strerror or error}") from error
        self._host = address.host
        self._who = who
        self._thread: threading.Thread | None = None
        self._server: uvicorn.Server | None = None

    @property
    def url(self) -> str:
        """Where it is, with the port it was given."""
        return f"http://{in_address(self._host)}:{self._sock.getsockname()[1]}"

    def start(self, app: FastAPI) -> None:
        """Serve ``app`` from now on."""
        import uvicorn

        config = uvicorn.Config(
            app,
            lifespan="off",
            log_config=None,
            access_log=False,
            log_level="warning",
            server_header=False,
            limit_concurrency=MAX_CONNECTIONS,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=int(STOP_S),
        )
        self._server = server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=lambda: asyncio.run(server.serve(sockets=[self._sock])), name=f"{self._who} admin", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """End it; what does not end by itself is cut off."""
        if self._server is not None and self._thread is not None:
            self._server.should_exit = True
            self._thread.join(STOP_S)
            if self._thread.is_alive():
                self._server.force_exit = True
                self._thread.join(STOP_S)
            if self._thread.is_alive():
                log.warning("the admin API's thread does not end: it is left behind")
        self._sock.close()
