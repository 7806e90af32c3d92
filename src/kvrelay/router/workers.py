"""Several worker processes behind one port: the process that starts them, and starts them again.

Every worker is forked with a listening socket of its own; the kernel spreads connections over them (SO_REUSEPORT). The
parent keeps the sockets open, so that what arrives while a crashed worker is being replaced waits for the new one.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from kvrelay.errors import ConfigError, KvRelayError
from kvrelay.launch.kernel import stop_with_parent
from kvrelay.router.core.supervision import Supervision
from kvrelay.router.saved_state import SavedState
from kvrelay.router.worker_peers import WorkerGroup

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvrelay.router.core.supervision import Slot

logger = logging.getLogger(__name__)

BACKLOG = 1024
HEEDED_S = 10.0
"""A worker that ends so soon after a SIGHUP may not have done what it says."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)
_UNUSABLE, _FAILED = 2, 1
"""Exit statuses, as of the command."""


class Seat:
    """What a worker is given: its number, its sockets, how it finds the others."""

    def __init__(
        self, number: int, count: int, sockets: list[socket.socket], group: WorkerGroup, saved: SavedState, told: int
    ) -> None:
        """``saved``: what the workers before may have left; ``told``: where the parent learns that it serves."""
        self.number = number
        self.count = count
        self.sockets = sockets
        self.group = group
        self.saved = saved
        self._told = told

    def ready(self) -> None:
        """It serves."""
        os.write(self._told, b"1")


class Workers:
    """The parent."""

    def __init__(self, count: int, host: str, port: int, work: Callable[[Seat], int]) -> None:
        """``work``: what a worker does; its exit status.

        Raises:
            OSError: the address cannot be listened on.
        """
        _refuse_taken(host, port)
        self._sockets = [_listen(host, port)]
        self.port: int = self._sockets[0][0].getsockname()[1]
        self._sockets += [_listen(host, self.port) for _ in range(count - 1)]
        self._supervision = Supervision(count, time.monotonic())
        self._work = work
        self._group = WorkerGroup.new()
        self._saved = SavedState.new()
        self._pipes: dict[int, tuple[Slot, int]] = {}
        """Where each worker, by its process id, tells that it serves."""
        self._owed: set[int] = set()
        """Places of workers that are to be told SIGHUP once they serve: before, it would end them."""
        self._hung_up: dict[int, float] = {}
        """When each worker, by its process id, was last told."""
        self._status = 0
        self._stopped_by = 0

    def run(self, on_ready: Callable[[], None]) -> int:
        """Until told to stop. The signal that did it; raises what a worker could not begin for.

        ``on_ready``: called once all serve.

        Raises:
            ConfigError: a worker could not begin, and said why.
        """
        woken, wake = os.pipe()
        os.set_blocking(woken, False)
        os.set_blocking(wake, False)
        before = {number: signal.signal(number, lambda *_: None) for number in _SIGNALS}
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        announced = False
        try:
            while not self._supervision.over:
                for slot in list(self._supervision.due(time.monotonic())):
                    self._start(slot, (woken, wake))
                wait_s = self._supervision.wait_s(time.monotonic())
                readable, _, _ = select.select([woken, *self._pipes], [], [], wait_s)
                self._hear(readable)
                told = os.read(woken, 4096) if woken in readable else b""
                self._stop_if_told(told)
                self._reap()
                if signal.SIGHUP in told:  # after that: whoever has just ended does not hear it
                    self._pass_hangup_on()
                if not announced and self._supervision.all_ready:
                    announced = True
                    on_ready()
        finally:
            signal.set_wakeup_fd(-1)
            for number, handler in before.items():
                signal.signal(number, handler)
            for descriptor in (woken, wake, *self._pipes):
                os.close(descriptor)
            self._close_sockets()
            self._saved.close()
        if self._supervision.failed and not self._supervision.stopping:
            kind = ConfigError if self._status == _UNUSABLE else KvRelayError
            raise kind(f"a worker could not begin (exit status {self._status}): it says above why")
        return self._stopped_by

    # --- workers ---

    def _start(self, slot: Slot, ours: tuple[int, int]) -> None:
        heard, told = os.pipe()
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # none is lost while the child still has our handlers
        pid = os.fork()
        if pid == 0:
            status = _FAILED
            try:
                signal.set_wakeup_fd(-1)
                for number in _SIGNALS:
                    signal.signal(number, signal.SIG_DFL)
                signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
                os.setpgid(0, 0)  # Ctrl-C is for the parent, which tells us
                stop_with_parent()
                for descriptor in (*ours, heard, *self._pipes):
                    os.close(descriptor)
                for place, sockets in enumerate(self._sockets):
                    if place != slot.number:
                        for sock in sockets:
                            sock.close()
                count, sockets = len(self._sockets), self._sockets[slot.number]
                status = self._work(Seat(slot.number, count, sockets, self._group, self._saved, told))
            except BaseException:
                logging.getLogger(__name__).exception("worker %d fails", slot.number)
            finally:
                os._exit(status)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        os.close(told)
        self._pipes[heard] = (slot, pid)
        self._supervision.started(slot, pid, time.monotonic())

    def _hear(self, readable: list[int]) -> None:
        for descriptor in readable:
            if descriptor not in self._pipes:
                continue
            slot, pid = self._pipes[descriptor]
            if os.read(descriptor, 1):
                if slot.pid == pid:
                    self._supervision.came_up(slot)
                    if slot.number in self._owed:
                        self._owed.discard(slot.number)
                        self._tell(signal.SIGHUP, [pid])
            else:
                os.close(descriptor)
                del self._pipes[descriptor]

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            now = time.monotonic()
            slot = self._supervision.ended(pid, now)
            if slot is None or self._supervision.stopping:
                continue
            if now - self._hung_up.pop(pid, -HEEDED_S) < HEEDED_S:
                self._owed.add(slot.number)
            if self._supervision.failed:
                self._status = self._status or os.waitstatus_to_exitcode(status)
                self._tell(signal.SIGTERM)
            else:
                logger.error(
                    "worker %d has ended (status %d): it is started again in %.1f s",
                    slot.number, os.waitstatus_to_exitcode(status), max(0.0, slot.due_at - time.monotonic()),
                )  # fmt: skip

    def _pass_hangup_on(self) -> None:
        slots = self._supervision.slots
        self._owed |= {slot.number for slot in slots if not slot.ready}
        pids = [slot.pid for slot in slots if slot.ready]
        self._hung_up = dict.fromkeys(pids, time.monotonic())
        self._tell(signal.SIGHUP, pids)

    def _stop_if_told(self, numbers: bytes) -> None:
        for number in numbers:
            if number in {signal.SIGTERM, signal.SIGINT}:
                self._stopped_by = self._stopped_by or number
                self._supervision.stop()
                self._close_sockets()  # what a worker no longer listens on, nobody does
                self._tell(signal.SIGTERM)

    def _tell(self, number: int, pids: Iterable[int] | None = None) -> None:
        """All workers, or those."""
        for pid in self._supervision.pids if pids is None else pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def _close_sockets(self) -> None:
        for sockets in self._sockets:
            for sock in sockets:
                sock.close()


def _refuse_taken(host: str, port: int) -> None:
    """Raise OSError if somebody listens there who would share the port with us, such as another router."""
    if port:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
            sock.listen(1)


def _listen(host: str, port: int) -> list[socket.socket]:
    """Sockets for one worker, one for each address the host has."""
    found: list[socket.socket] = []
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            sock = socket.socket(family, kind, protocol)
            found.append(sock)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            sock.bind((address[0], port or found[0].getsockname()[1], *address[2:]))
            sock.listen(BACKLOG)
            sock.setblocking(False)
    except OSError:
        for sock in found:
            sock.close()
        raise
    return found
