"""A connection to the pool that mends itself, in the background, so that its owner never waits for one.

One thread owns the connection and uses it; another, the link's own, makes it, watches its socket for the other end's
going away, and makes the next one. They share only what is handed over under the lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import select
import struct
import termios
import threading
import time
from typing import TYPE_CHECKING

from kvrelay.client.blocking import PoolClient
from kvrelay.connector.core.backoff import Backoff
from kvrelay.errors import (
    ConfigError,
    DeadlineError,
    KvRelayError,
    PoolUnavailableError,
    UnauthorizedError,
    VersionError,
)

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)

CONNECT_S = 2.0
WATCH_S = 1.0
LAST_WORDS_S = 1.0
LOOK_S = 0.02


class PoolLink:
    """One thread's connection: all methods are for that thread, but `start` and `settle`, which another may call."""

    def __init__(
        self,
        address: str,
        *,
        name: str,
        token: str | None,
        map_arena: bool,
        reconnect_s: float = 3.0,
        greet: Callable[[PoolClient], None] = lambda _: None,
    ) -> None:
        """``greet``: what to say on every new connection before it is used; called on the link's own thread."""
        self._address = address
        self._name = name
        self._token = token
        self._map_arena = map_arena
        self._reconnect_s = reconnect_s
        self._greet = greet
        self._client: PoolClient | None = None
        self._lock = threading.Lock()
        self._ready: PoolClient | None = None
        self._broken: PoolClient | None = None
        self._known = threading.Event()
        self._closing = threading.Event()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread: threading.Thread | None = None
        self.on_lost: Callable[[], None] = lambda: None
        """Called when the connection was lost, before `client` gives another."""

    def connect(self) -> None:
        """Connect before going on; if nobody answers, go on trying in the background.

        Raises:
            ConfigError: the pool answers, and will never have us: its protocol version or token is another.
        """
        try:
            self._client = self._connect()
        except (VersionError, UnauthorizedError) as error:
            raise ConfigError(f"the pool at {self._address} refuses this engine: {error}") from error
        except ConfigError:
            raise
        except KvRelayError as error:
            log.warning("kvrelay: %s; this engine starts without it and connects as soon as it answers", error)
        self._known.set()
        self.start()

    def start(self) -> None:
        """Connect, and stay connected, in the background."""
        self._thread = threading.Thread(target=self._mend, args=(self._client,), name=self._name, daemon=True)
        self._thread.start()

    def settle(self, timeout_s: float) -> None:
        """Wait until the first attempt has worked or failed, ``timeout_s`` at most."""
        self._known.wait(timeout_s)

    @property
    def hopeful(self) -> bool:
        """Whether it is not known yet if the pool can be reached: an attempt is under way and none failed before."""
        return not self._known.is_set()

    @property
    def connected(self) -> bool:
        """Whether the connection last given by `client` still is one."""
        return self._client is not None and not self._client.closed

    def client(self) -> PoolClient | None:
        """The connection, ``None`` while there is none. Never waits."""
        client = self._client
        if client is not None and (client.closed or client is self._broken):
            self.drop(PoolUnavailableError("the pool closed the connection"))
        if self._client is None and self._ready is not None:
            with self._lock:
                self._client, self._ready = self._ready, None
        return self._client

    def wait(self, timeout_s: float) -> PoolClient | None:
        """`client`, waiting up to ``timeout_s`` while `hopeful`."""
        client = self.client()
        if client is None and self._known.wait(timeout_s):
            client = self.client()
        return client

    def drop(self, why: KvRelayError) -> None:
        """The connection failed or is not to be trusted any more: another is made in the background."""
        client, self._client = self._client, None
        if client is None:
            return
        log.warning("kvrelay: lost the pool at %s: %s", self._address, why)
        with self._lock:
            if self._ready is None and not isinstance(why, DeadlineError):
                self._known.clear()  # it may be back at once; one that hangs is not waited for
        client.close()
        os.eventfd_write(self._wake, 1)
        self.on_lost()

    def drop_if_closed(self, why: KvRelayError) -> None:
        """`drop` the connection if it has ended."""
        if self._client is not None and self._client.closed:
            self.drop(why)

    def close(self) -> None:
        """Disconnect for good."""
        if self._closing.is_set():
            return
        self._closing.set()
        os.eventfd_write(self._wake, 1)
        if self._thread is not None:
            self._thread.join(CONNECT_S + 1.0)
        for client in (self._client, self._ready):
            if client is not None:
                client.close()
        self._client = self._ready = None
        if self._thread is None or not self._thread.is_alive():
            os.close(self._wake)

    # --- its own thread ---

    def _connect(self) -> PoolClient:
        client = PoolClient.connect(
            self._address, name=self._name, token=self._token, timeout_s=CONNECT_S, map_arena=self._map_arena
        )
        try:
            self._greet(client)
        except KvRelayError:
            client.close()
            raise
        return client

    def _mend(self, client: PoolClient | None) -> None:
        backoff = Backoff(most_s=self._reconnect_s)
        while not self._closing.is_set():
            if client is not None:
                self._watch(client)
                self._is_broken(client)
                client = None  # with it goes the mapping: two arenas at a time may be more than the machine has
            client = self._attempt(backoff)

    def _is_broken(self, client: PoolClient) -> None:
        """The owner is told, if the connection is its own; one that it has not taken yet it never sees.

        An owner may have nothing to do for hours: its connection is ended here, after it has read what the pool said
        last.
        """
        with self._lock:
            if self._ready is client:
                self._ready = None
            else:
                self._broken = client
        deadline = time.monotonic() + LAST_WORDS_S
        while _unread_bytes(client) and time.monotonic() < deadline and not self._closing.wait(LOOK_S):
            pass
        client.close()

    def _watch(self, client: PoolClient) -> None:
        """Return when the other end is gone, the owner dropped the connection, or it is time to close."""
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        try:
            # Only the owner may read from the socket; that its other end is gone can be seen without reading.
            poll.register(client.fileno(), select.POLLRDHUP)
        except ValueError:  # closed by now
            return
        while not self._closing.is_set() and not client.closed:
            for fd, _ in poll.poll(WATCH_S * 1000):
                if fd != self._wake:
                    return
                os.eventfd_read(self._wake)

    def _attempt(self, backoff: Backoff) -> PoolClient | None:
        try:
            client = self._connect()
        except KvRelayError as error:
            self._known.set()
            if backoff.failures == 0 and isinstance(error, VersionError | UnauthorizedError):
                log.error("kvrelay: the pool at %s refuses this engine: %s", self._address, error)  # noqa: TRY400
            self._closing.wait(backoff.failed())
            return None
        backoff.worked()
        with self._lock:
            old, self._ready = self._ready, client
            self._known.set()
        if old is not None:
            old.close()
        log.info("kvrelay: connected to the pool at %s", self._address)
        return client


def _unread_bytes(client: PoolClient) -> int:
    """What came and was not read, by the kernel's count; 0 if it is closed."""
    with contextlib.suppress(OSError, ValueError):
        count: int = struct.unpack("i", fcntl.ioctl(client.fileno(), termios.FIONREAD, bytes(4)))[0]
        return count
    return 0
