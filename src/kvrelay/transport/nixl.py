"""NIXL (its UCX backend: RDMA where there is some, else shared memory or TCP): one-sided copies to and from an arena.

The packages are not dependencies, not even optional ones, for their own dependencies want a CUDA build of torch:
install them with `INSTALL`. An agent takes half a second to make; only who asks for NIXL makes one.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import logging
from typing import TYPE_CHECKING, Any

from kvrelay.errors import ConfigError, KvRelayError, PoolUnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterable

INSTALL = "pip install --no-deps nixl nixl-cu12"
BACKEND = "UCX"
_MODULES = ("nixl_cu13", "nixl_cu12", "nixl_rocm")


def _module() -> str | None:
    """Where NIXL's Python interface is. Not ``nixl`` itself: that imports torch, to see which of these to take."""
    return next((name for name in _MODULES if importlib.util.find_spec(name) is not None), None)


def available() -> bool:
    """Whether NIXL is installed."""
    return _module() is not None


def _agent(name: str, *, progress: bool) -> Any:
    """Make an agent. ``progress``: with a thread that answers others.

    Raises:
        ConfigError: the packages are missing, or NIXL cannot use this machine.
    """
    module = _module()
    if module is None:
        raise ConfigError(f"NIXL is asked for and not installed: {INSTALL}")
    try:
        api = importlib.import_module(f"{module}._api")
        logging.getLogger("nixl").setLevel(logging.WARNING)  # it tells of every agent on stdout
        return api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=progress, backends=[BACKEND]))
    except Exception as error:  # whatever a foreign library raises
        raise ConfigError(f"NIXL cannot be used here ({error}): see UCX_TLS, or do without it") from error


def address_of(view: memoryview) -> int:
    """Where writable memory is."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


class NixlArena:
    """The pool's side: an arena that NIXL clients write and read. A thread of NIXL's answers them."""

    def __init__(self, arena: memoryview, name: str) -> None:
        """ConfigError: NIXL cannot be used."""
        self.name = name
        self.base = address_of(arena)
        self.size = arena.nbytes
        self._agent = _agent(name, progress=True)
        self._registered = self._agent.register_memory([(self.base, self.size, 0, "")], "DRAM", backends=[BACKEND])
        self.metadata: bytes = self._agent.get_agent_metadata()

    def close(self) -> None:
        """Give the arena's memory back. May be called twice."""
        if self._agent is not None:
            self._agent.deregister_memory(self._registered)
            self._agent = None


class NixlPeer:
    """A client's side: copies between memory it registered and the arena of the pool ``pool``.

    For one thread at a time.
    """

    def __init__(self, name: str, pool: str, metadata: bytes) -> None:
        """ConfigError: NIXL cannot be used. PoolUnavailableError: the pool's agent cannot be reached."""
        self._agent = _agent(name, progress=False)
        try:
            added = self._agent.add_remote_agent(metadata)
        except Exception as error:  # whatever a foreign library raises
            raise PoolUnavailableError(f"the pool's NIXL agent {pool} cannot be reached: {error}") from error
        self._pool = added.decode() if isinstance(added, bytes) else added
        self._regions: list[tuple[memoryview, int, int, Any]] = []
        """What is registered, and so must stay: a view, its first address and its last + 1, NIXL's name for it."""

    def register(self, view: memoryview) -> None:
        """Let NIXL use writable memory, which is held until `deregister` or `close`.

        Raises:
            KvRelayError: NIXL refuses it, for want of lockable memory for one.
        """
        start = address_of(view)
        if self.covers(start, view.nbytes):
            return
        try:
            registered = self._agent.register_memory([(start, view.nbytes, 0, "")], "DRAM", backends=[BACKEND])
        except Exception as error:
            raise KvRelayError(f"NIXL cannot register {view.nbytes} bytes: {error}; see ulimit -l") from error
        self._regions.append((view, start, start + view.nbytes, registered))

    def deregister(self, view: memoryview) -> None:
        """Undo `register`."""
        start = address_of(view)
        for index, (_, first, last, registered) in enumerate(self._regions):
            if first == start and last == start + view.nbytes:
                self._agent.deregister_memory(registered)
                del self._regions[index]
                return

    def covers(self, start: int, size: int) -> bool:
        """Whether memory is registered."""
        return any(first <= start and start + size <= last for _, first, last, _ in self._regions)

    def begin(self, *, write: bool, local: Iterable[tuple[int, int]], remote: Iterable[tuple[int, int]]) -> NixlCopy:
        """Start copying ``(address, size)`` pieces; those of the arena are addresses in the pool's agent.

        Raises:
            PoolUnavailableError: the pool's agent cannot be reached.
        """
        agent = self._agent
        here = agent.get_xfer_descs([(address, size, 0) for address, size in local], "DRAM")
        there = agent.get_xfer_descs([(address, size, 0) for address, size in remote], "DRAM")
        try:
            handle = agent.initialize_xfer("WRITE" if write else "READ", here, there, self._pool, b"", [BACKEND])
            return NixlCopy(agent, handle, agent.transfer(handle))
        except Exception as error:  # whatever a foreign library raises
            raise PoolUnavailableError(f"NIXL cannot reach the pool: {error}") from error

    def close(self) -> None:
        """Forget the memory and the pool. May be called twice."""
        agent, self._agent = self._agent, None
        if agent is not None:
            for *_, registered in self._regions:
                agent.deregister_memory(registered)
            self._regions = []
            agent.remove_remote_agent(self._pool)


class NixlCopy:
    """A copy under way."""

    def __init__(self, agent: Any, handle: Any, state: str) -> None:
        self._agent = agent
        self._handle = handle
        self._state = state

    def finished(self) -> bool:
        """Whether all bytes have arrived. PoolUnavailableError: they never will."""
        if self._state == "PROC":
            try:
                self._state = self._agent.check_xfer_state(self._handle)
            except Exception as error:
                self._state = "ERR"
                raise PoolUnavailableError(f"NIXL lost the pool: {error}") from error
        if self._state == "ERR":
            raise PoolUnavailableError("NIXL lost the pool")
        return self._state == "DONE"

    def release(self) -> None:
        """Give up the copy, or what is left of it. PoolUnavailableError: it cannot be stopped."""
        try:
            self._agent.release_xfer_handle(self._handle)
        except Exception as error:
            raise PoolUnavailableError(f"a copy by NIXL cannot be stopped: {error}") from error
