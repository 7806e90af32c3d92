"""What both shells of the client have in common: a socket with a session on it, operations, perhaps a mapped arena."""

from __future__ import annotations

import secrets
from functools import partial
from typing import TYPE_CHECKING

from kvrelay.client.core.blocks import bytes_of
from kvrelay.client.core.mapped import MappedArena
from kvrelay.client.core.operations import Operations, StagePart
from kvrelay.client.core.session import Session
from kvrelay.client.index import SharedIndex, can_look
from kvrelay.client.mover import BatchMover
from kvrelay.client.nixl_path import NixlPath
from kvrelay.client.tensors import bytes_of_tensor
from kvrelay.errors import BadRequestError, PoolUnavailableError
from kvrelay.transport.checksum import segment_sums
from kvrelay.transport.payload import incoming
from kvrelay.transport.shm import Arena
from kvrelay.transport.stream import Stream
from kvrelay.wire import limits
from kvrelay.wire import messages as m

if TYPE_CHECKING:
    import socket
    from collections.abc import Sequence

    from kvrelay.client.core.names import PrefixCount
    from kvrelay.client.tensors import Memory
    from kvrelay.transport.tls import TlsSocket

TIMEOUT_S = 5.0
"""How long the pool may take to answer, beyond the time a request itself allows."""


def allowed(wait_s: float) -> float:
    """How long a call may wait beyond what any may.

    Raises:
        BadRequestError: it is no time, or longer than the pool waits for anything.
    """
    try:
        legal = 0 <= wait_s <= limits.MAX_WAIT_S
    except TypeError:
        legal = False
    if not legal:
        raise BadRequestError(f"a wait of {wait_s!r} s: legal are 0 to {limits.MAX_WAIT_S:g}")
    return wait_s


class Connection:
    """A connected socket, ``sock``, of the pool at ``address``."""

    welcome: m.Welcome

    def __init__(self, sock: socket.socket | TlsSocket, address: str, *, is_unix: bool, reuse_staging: bool) -> None:
        self.address = address
        self._session = Session(partial(incoming, sums=True))
        self._stream: Stream[m.Reply] = Stream(sock, m.AnyReply, self._session, accept_fds=is_unix)
        self._mover = BatchMover()
        self._ops = Operations(segment_sums, self._mover, secrets.token_hex(8), reuse_staging=reuse_staging)
        self._transport = "tcp"
        self._index: SharedIndex | None = None

    @property
    def arena(self) -> memoryview | None:
        """The mapped arena, None on a connection without shared memory."""
        return self._ops.arena

    @property
    def closed(self) -> bool:
        """Whether the connection has ended."""
        return self._session.closed is not None

    def fileno(self) -> int:
        """The socket's descriptor, to be watched for its other end's going away; negative when closed."""
        return self._stream.fileno()

    def stage(self, parts: Sequence[StagePart]) -> list[memoryview]:
        """Bytes to fill before `commit`, one view a part. See `Operations.stage` for how long they are valid."""
        return self._ops.stage(parts)

    def register_memory(self, memory: Memory) -> None:
        """Let pages of this writable memory travel in place where NIXL is used; elsewhere nothing is needed.

        It is held until the client is closed and no copy is under way.

        Raises:
            KvRelayError: it cannot be registered, for want of lockable memory for one.
        """
        view = bytes_of(bytes_of_tensor(memory), writable=True)
        if isinstance(self._ops.whole.direct, NixlPath):
            self._ops.whole.direct.register(view)

    @property
    def transport(self) -> str:
        """How the bytes of whole objects travel: ``shm``, ``nixl`` or ``tcp``."""
        return self._transport

    def _map(self, reply: m.Arena | m.NixlMapped | None) -> None:
        """Take the way to the arena that came with an answer."""
        if isinstance(reply, m.NixlMapped):
            self._ops.whole.direct = NixlPath(f"client-{secrets.token_hex(8)}", reply, self._mover)
            self._transport = "nixl"
        elif reply is not None:
            if not self._stream.received_fds:
                raise PoolUnavailableError("the pool announced its arena and sent no descriptor")
            arena = Arena.attach(self._stream.received_fds.pop(0), reply.size).view
            self._ops.arena, self._ops.whole.direct = arena, MappedArena(arena, self._mover)
            self._transport = "shm"

    @property
    def _can_look(self) -> bool:
        """Whether an index would be of use."""
        return can_look and self.transport == "shm"

    def _map_index(self, reply: m.IndexMapped | None) -> None:
        """Take the index that came with an answer."""
        if reply is not None:
            fds = self._stream.received_fds
            self._index = SharedIndex.attach([fds.pop(0) for _ in range(len(fds))], reply)

    def _counted(self, keys: Sequence[bytes]) -> PrefixCount | None:
        """How long the prefix is that is there; None: ask the pool."""
        index = self._index
        return None if index is None else index.count_prefix(self._stream.fileno(), keys)

    def _existing(self, keys: Sequence[bytes]) -> list[bool] | None:
        """Which keys are sealed; None: ask the pool."""
        index = self._index
        return None if index is None else index.exists(self._stream.fileno(), keys)

    def _let_go(self) -> None:
        """Hold no shared memory any more: the pool's would stay allocated after its end. Any thread may call it.

        What another thread is copying, and views that were handed out, stay valid.
        """
        self._index = None
        self._ops.arena = None
        if self._transport == "shm":
            self._ops.whole.direct = None

    def _unmap(self) -> None:
        self._let_go()
        direct, self._ops.whole.direct = self._ops.whole.direct, None
        if isinstance(direct, NixlPath):
            direct.close()
