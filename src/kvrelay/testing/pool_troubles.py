"""A pool in a thread of this process, and what can befall it: theft, silence, lost connections, another pool."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import TYPE_CHECKING

from kvrelay.client.blocking import PoolClient
from kvrelay.errors import KvRelayError
from kvrelay.testing.pool import PoolThread

if TYPE_CHECKING:
    import random
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from kvrelay.connector.link import PoolLink

SIZES = (128 << 10, 1 << 20)
"""Too small for what is saved, and large enough."""
PAUSES_S = (0.005, 0.03, 0.08)
WAIT_S = 30.0


class TroubledPool:
    """The pool. ``address`` stays the same, whatever happens."""

    def __init__(self, directory: Path, rng: random.Random) -> None:
        self._directory = directory
        self._rng = rng
        self._start()
        self.address = self.pool.unix

    def _start(self) -> None:
        self.pool = PoolThread(self._directory, size=self._rng.choice(SIZES))
        self.pool.__enter__()

    # --- what happens ---

    def rob(self, keys: Sequence[bytes]) -> None:
        """Somebody deletes objects, whatever their state."""
        with contextlib.suppress(KvRelayError), PoolClient.connect(self.address, name="thief") as thief:
            thief.delete(list(keys))

    def stall(self) -> None:
        """The pool does nothing for a while."""
        pause, never = self._rng.choice(PAUSES_S), threading.Event()
        self.pool._loop.call_soon_threadsafe(never.wait, pause)

    def cut(self, links: Sequence[PoolLink]) -> None:
        """A connection breaks in the middle of whatever it was doing."""
        client = self._rng.choice(links)._client
        if client is not None and not client.closed:
            with contextlib.suppress(OSError):
                client._stream.sock.shutdown(socket.SHUT_RDWR)

    def restart(self) -> None:
        """Another pool, with the same handles, takes the pool's place."""
        self.pool.__exit__()
        self._start()

    # --- what must be true ---

    def check(self, truth: Mapping[bytes, bytes]) -> int:
        """Every sealed object is what its key says; how many there are."""
        self.check_integrity()
        checked = 0
        with PoolClient.connect(self.address, name="auditor") as auditor:
            for key, expected in truth.items():
                found = auditor.get(key)
                assert found is None or found == expected, f"object {key.hex()} is wrong"
                checked += found is not None
        return checked

    def check_integrity(self) -> None:
        """The pool's books balance."""
        done, problems = threading.Event(), list[AssertionError]()

        def look() -> None:
            try:
                self.pool.server.core.check_integrity()
            except AssertionError as error:
                problems.append(error)
            done.set()

        self.pool._loop.call_soon_threadsafe(look)
        assert done.wait(WAIT_S), "the pool's loop is stuck"
        if problems:
            raise problems[0]

    def check_idle(self) -> None:
        """Nobody is connected any more: nothing is leased or half written."""
        with PoolClient.connect(self.address, name="auditor") as auditor:
            stats = auditor.stat()
        assert (stats["leases"], stats["unsealed"], stats["corrupt"]) == (0, 0, 0)
        self.check_integrity()

    def close(self) -> None:
        """Stop it."""
        self.pool.__exit__()
