"""The pool's shell: sockets, the arena and the clock around `kvrelay.pool.core`."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import stat
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from kvrelay import __version__
from kvrelay.errors import ConfigError, KvRelayError
from kvrelay.native import native
from kvrelay.pool.core.actions import Close, Send, SendArena, SendData, SendIndex
from kvrelay.pool.core.pool import PoolCore
from kvrelay.pool.handshakes import Handshakes
from kvrelay.pool.latency import Latencies
from kvrelay.pool.peer import TURN_BYTES, Peer
from kvrelay.pool.traffic import Traffic
from kvrelay.transport.index import IndexMemory, clock
from kvrelay.transport.stream import SCRATCH_BYTES
from kvrelay.transport.tls import TlsConfig

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Iterator, Sequence

    from kvrelay.pool.core.actions import Action
    from kvrelay.pool.core.tenants import Tenant
    from kvrelay.pool.core.upkeep import Rules
    from kvrelay.transport.address import Address
    from kvrelay.transport.shm import Arena
    from kvrelay.transport.tls import TlsSocket

log = logging.getLogger(__name__)

STALL_S = 60.0
"""A connection that stops for this long inside a message, or takes none of its answers, would hold bytes for ever."""
HELLO_S = 10.0
"""A connection that has not said hello by then is closed."""
SWEEP_S = 2.5
"""How often connections are looked at for these."""
NO_DESCRIPTOR_S = 1.0
"""How long nobody is let in after descriptors or memory have run out."""


class PoolServer:
    """A pool over ``arena``, listening where `listen` was told to. Use `run`; it serves until `stop` is called.

    ``token``, ``tenants``, ``rules``: as for `PoolCore`. ``index``: keep indexes for clients of the UNIX socket.
    """

    def __init__(
        self,
        arena: Arena,
        *,
        token: str | None = None,
        tenants: Sequence[Tenant] = (),
        rules: Rules | None = None,
        index: bool = True,
    ) -> None:
        self.arena = arena
        self.core = PoolCore(
            arena.size,
            pool=secrets.token_hex(8),
            server=f"kvrelay {__version__}",
            token=token,
            tenants=tenants,
            rules=rules,
        )
        self.latencies = Latencies()
        """From a request's arrival, payload included, until it was handled."""
        self.traffic = Traffic()
        self.scratch = memoryview(bytearray(SCRATCH_BYTES))
        """Where messages arrive; every connection's go on from there at once."""
        self._peers: dict[int, Peer] = {}
        self._listeners: list[tuple[socket.socket, Address]] = []
        self._contexts: dict[Address, ssl.SSLContext] = {}
        self._handshakes = Handshakes()
        self._index = index
        self._indexes: dict[int, IndexMemory] = {}
        self._last_number = 0
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._touched: set[Peer] = set()
        self._stopped = asyncio.Event()
        self.dispatch: Callable[[], None] = _nothing_below
        """Called when the core may have ordered something of lower tiers."""

    @staticmethod
    def now() -> float:
        """The pool's clock, in seconds."""
        return time.monotonic()

    @property
    def addresses(self) -> list[Address]:
        """Where the pool listens, with the ports it was given."""
        return [
            address if address.is_unix else address._replace(port=listener.getsockname()[1])
            for listener, address in self._listeners
        ]

    def listen(self, address: Address, tls: ssl.SSLContext | None = None) -> None:
        """Bind and listen. ``tls``: TLS is spoken there, which the address says too.

        Raises:
            ConfigError: the address cannot be used, such as a port that is taken.
        """
        listener, target = address.new_socket()
        try:
            if address.is_unix:
                _remove_dead_socket(address.path)
                mask = os.umask(0o077)  # the descriptor opens the whole arena: for this user only
                try:
                    listener.bind(target)
                finally:
                    os.umask(mask)
            else:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind(target)
            listener.listen(1_024)
        except OSError as error:
            listener.close()
            raise ConfigError(f"the pool cannot listen on {address}: {error.strerror or error}") from error
        except ConfigError:
            listener.close()
            raise
        listener.setblocking(False)
        if tls is not None:
            address = address._replace(tls=TlsConfig())
            self._contexts[address] = tls
        self._listeners.append((listener, address))

    def stop(self) -> None:
        """Make `run` return."""
        self._stopped.set()

    async def run(self) -> None:
        """Serve until stopped; then close every connection and listener."""
        loop = asyncio.get_running_loop()
        self._show_indexes()
        for listener, address in self._listeners:
            self._open(listener, address)
        sweeper = asyncio.create_task(self._sweep())
        try:
            await self._stopped.wait()
        finally:
            sweeper.cancel()
            self._handshakes.close()
            for listener, address in self._listeners:
                loop.remove_reader(listener)
                listener.close()
                if address.is_unix:
                    _remove_socket(address.path)
            for peer in list(self._peers.values()):
                self._close(peer, "the pool is stopping")
            if self._timer is not None:
                self._timer.cancel()
            for memory in self._indexes.values():
                memory.close()

    def _show_indexes(self) -> None:
        """Keep an index for each tenant that may share memory, if there is a socket to send descriptors over."""
        if native is None or not self._index or not any(address.is_unix for _, address in self._listeners):
            return
        for number, tenant in self.core.tenants:
            if not tenant.shm:
                continue
            try:
                memory = IndexMemory.create(self.arena.size)
            except OSError as error:
                log.warning("clients of this host will ask for every lookup: no memory for an index: %s", error)
                return
            if self.core.show_index(number, memory.table, memory.marks, clock()):
                self._indexes[number] = memory
            else:
                memory.close()

    async def _sweep(self) -> None:
        """Close connections that stall."""
        while True:
            await asyncio.sleep(SWEEP_S)
            now = self.now()
            for peer in list(self._peers.values()):
                quiet = now - peer.progressed_at
                if peer.writing and quiet > STALL_S:
                    self._close(peer, f"took none of its answers for {STALL_S:.0f} s")
                elif peer.reading and peer.stream.amid_message and now - peer.heard_at > STALL_S:
                    self._close(peer, f"sent half a message and nothing more for {STALL_S:.0f} s")
                elif peer.reading and peer.is_late(now, STALL_S):
                    self._close(peer, "sends a payload too slowly: what it is for would be held for ever")
                elif not peer.greeted and quiet > HELLO_S:
                    self._close(peer, f"said no hello within {HELLO_S:.0f} s")

    def _accept(self, listener: socket.socket, address: Address) -> None:
        loop = asyncio.get_running_loop()
        try:
            sock, _ = listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return  # whoever knocked has left
        except OSError as error:
            log.warning("no connections are accepted for %g s: %s", NO_DESCRIPTOR_S, error)
            loop.remove_reader(listener)
            loop.call_later(NO_DESCRIPTOR_S, self._open, listener, address)
            return
        if (context := self._contexts.get(address)) is not None:
            self._handshakes.begin(context, sock, self._admit)
        else:
            self._admit(sock, shm_capable=address.is_unix)

    def _admit(self, sock: socket.socket | TlsSocket, *, shm_capable: bool = False) -> None:
        names = () if isinstance(sock, socket.socket) else sock.peer_names()
        self._last_number += 1
        peer = Peer(self, self._last_number, sock)
        self._peers[peer.number] = peer
        self.core.connected(peer.number, shm_capable=shm_capable, certificates=names)
        asyncio.get_running_loop().add_reader(sock.fileno(), self._readable, peer)

    def _open(self, listener: socket.socket, address: Address) -> None:
        if not self._stopped.is_set():
            asyncio.get_running_loop().add_reader(listener, self._accept, listener, address)

    def _readable(self, peer: Peer) -> None:
        """A connection's turn: take what it sent, up to a bound, and answer."""
        if peer.number not in self._peers:
            return
        peer.heard_at = peer.turn_began = self.now()
        with self._answering_for(peer):
            if peer.stream.paused:
                peer.stream.resume()
            alive = peer.stream.receive(TURN_BYTES)
            self.settle()
            if not alive:
                self._close(peer, "")
            elif (peer.stream.paused or peer.stream.sated) and not peer.behind:
                self._again(peer)

    def _again(self, peer: Peer) -> None:
        """Give a connection another turn after the others', whether or not it sends more."""
        if not peer.recalled:
            peer.recalled = True
            asyncio.get_running_loop().call_soon(self._recalled, peer)

    def _recalled(self, peer: Peer) -> None:
        peer.recalled = False
        self._readable(peer)

    @contextmanager
    def _answering_for(self, peer: Peer) -> Iterator[None]:
        """Close the connection whose handling fails, and nobody else's."""
        try:
            yield
        except KvRelayError as error:
            self.settle()
            self._close(peer, str(error))
        except Exception:
            log.exception("a bug: connection %d is closed, the others go on", peer.number)
            self._close(peer, "internal error")

    def perform(self) -> None:
        """Carry out what the core decided; what is to be sent is queued."""
        for action in self.core.take_actions():
            peer = self._peers.get(action.conn)
            if peer is not None:
                try:
                    self._perform(peer, action)
                    self._touched.add(peer)
                    continue
                except Exception:
                    log.exception("a bug: connection %d is closed, the others go on", peer.number)
                    self._close(peer, "")
            if isinstance(action, SendData):
                self.core.transferred(action.transfer)

    def settle(self) -> None:
        """Carry out what the core decided, and send."""
        self.dispatch()
        self.perform()
        touched, self._touched = self._touched, set()
        for peer in touched:
            self._flush(peer)
        self._set_timer()

    def _perform(self, peer: Peer, action: Action) -> None:
        match action:
            case Send():
                peer.stream.send(action.reply)
            case SendArena():
                peer.stream.send(action.reply, fds=[self.arena.fd])
            case SendIndex():
                peer.stream.send(action.reply, fds=self._indexes[action.tenant].descriptors)
            case SendData():
                view = self.arena.view
                payload = [view[offset : offset + size] for offset, size in action.spans]
                self.traffic.sent[peer.transport] += sum(size for _, size in action.spans)
                peer.stream.send(action.reply, payload, on_sent=lambda: self.core.transferred(action.transfer))
            case Close():
                log.info("refusing connection %d: %s", peer.number, action.why)
                peer.closing = True

    def _flush(self, peer: Peer) -> None:
        if peer.number not in self._peers:
            return
        before = peer.stream.queued_bytes
        try:
            done = peer.stream.flush(TURN_BYTES)
        except KvRelayError as error:
            self._close(peer, str(error))
            return
        if done and peer.closing:
            self._close(peer, "")
            return
        loop = asyncio.get_running_loop()
        if done or peer.stream.queued_bytes < before or not peer.writing:
            peer.progressed_at = self.now()
        if done and peer.writing:
            loop.remove_writer(peer.stream.fileno())
        elif not done and not peer.writing:
            loop.add_writer(peer.stream.fileno(), self._flush, peer)
        peer.writing = not done
        behind = peer.behind
        if behind and peer.reading:
            loop.remove_reader(peer.stream.fileno())
        elif not behind and not peer.reading:
            loop.add_reader(peer.stream.fileno(), self._readable, peer)
        peer.reading = not behind
        if peer.stream.paused and not behind:
            self._again(peer)

    def _close(self, peer: Peer, why: str) -> None:
        if self._peers.pop(peer.number, None) is None:
            return
        if why:
            log.info("closing connection %d: %s", peer.number, why)
        loop = asyncio.get_running_loop()
        loop.remove_reader(peer.stream.fileno())
        if peer.writing:
            loop.remove_writer(peer.stream.fileno())
        peer.stream.close()
        self.core.disconnected(peer.number, self.now())
        loop.call_soon(self.settle)

    def _set_timer(self) -> None:
        deadline = self.core.next_deadline()
        if deadline is None or self._stopped.is_set() or (self._timer is not None and self._timer_at <= deadline):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = deadline
        self._timer = asyncio.get_running_loop().call_later(max(0.0, deadline - self.now()), self._tick)

    def _tick(self) -> None:
        self._timer = None
        self.core.tick(self.now())
        self.settle()


def _nothing_below() -> None:
    """There are no lower tiers."""


def _remove_socket(path: str) -> None:
    Path(path).unlink(missing_ok=True)


def _remove_dead_socket(path: str) -> None:
    """Remove a socket file that nobody listens on any more; leave anything else alone."""
    file = Path(path)
    try:
        mode = file.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"the pool cannot listen on unix:{path}: the file exists and is not a socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            _remove_socket(path)
            return
        except OSError:
            pass
    raise ConfigError(f"the pool cannot listen on unix:{path}: another process does; stop it or give another --unix")
