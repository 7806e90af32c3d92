"""Workers of one router ask each other: for metrics, for hand-overs another one has the record of, for how it stands.

Each listens on an abstract UNIX socket: a name that is gone with whoever listens, however they end. Everybody on the
host can see it, and connect; so both sides look who the other is, and a question shows a secret that only workers of
one router have. A question is a connection: one message there, one back. Whoever does not answer in time is left out.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import secrets
import socket
import struct
from typing import TYPE_CHECKING, Literal

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from kvrelay.router.core.merging import Snapshot, lasting, merge, weight

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

logger = logging.getLogger(__name__)

WAIT_S = 2.0
"""For another worker's answer: a little longer than it may wait for proofs."""
MAX_BYTES = 64 << 20
_CREDENTIALS = struct.Struct("3i")
"""Of a socket's other end: process, user, group."""
_ENCODE = msgspec.msgpack.Encoder().encode
_SNAPSHOT = msgspec.msgpack.Decoder(Snapshot).decode


class WorkerGroup(Struct, frozen=True):
    """What the workers of one router share. Made before there are any."""

    name: str
    secret: bytes

    @classmethod
    def new(cls) -> WorkerGroup:
        """Another one than all others."""
        return cls(f"kvrelay-router-{os.getpid()}-{secrets.token_hex(8)}", secrets.token_bytes(32))

    def address(self, number: int) -> str:
        """Where a worker listens."""
        return f"\0{self.name}-{number}"


class PeerRequest(Struct, frozen=True):
    """``metrics``: your snapshot. ``handover``: your record of ``name``. ``remembered``: what ``worker`` last said.

    Of engines: ``state``: how you stand. ``adopt``: go over to ``state``. ``statuses``: what you know of them.
    """

    what: Literal["metrics", "handover", "remembered", "state", "adopt", "statuses"]
    secret: bytes = b""
    name: str = ""
    worker: int = 0
    state: bytes = b""


_REQUEST = msgspec.msgpack.Decoder(PeerRequest).decode


class WorkerPeers:
    """The other workers, and what they have said."""

    def __init__(self, group: WorkerGroup, number: int, count: int) -> None:
        """This is worker ``number`` of ``count``."""
        self.number = number
        self._group = group
        self._others = [other for other in range(count) if other != number]
        self._answers: Callable[[PeerRequest], Awaitable[bytes]] | None = None
        self._server: asyncio.Server | None = None
        self._said: dict[int, Snapshot] = {}
        self._before: Snapshot = ()
        """What whoever sat here before had counted."""

    async def start(self, answers: Callable[[PeerRequest], Awaitable[bytes]]) -> None:
        """Answer from now on; ``answers`` answers questions for metrics and hand-overs, empty if there is nothing."""
        self._answers = answers
        # First, since whoever asks us for metrics then forgets what our predecessor said.
        remembered = [
            _SNAPSHOT(said) for said in await self._ask(PeerRequest("remembered", worker=self.number)) if said
        ]
        self._before = max(remembered, key=weight, default=())
        sock = socket.socket(socket.AF_UNIX)  # uvloop takes no such names itself
        sock.bind(self._group.address(self.number))
        self._server = await asyncio.start_unix_server(self._serve, sock=sock)

    async def close(self) -> None:
        """Answer no more."""
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    def with_before(self, snapshot: Snapshot) -> Snapshot:
        """This worker's metrics with what was counted in its place before."""
        return merge((snapshot, self._before)) if self._before else snapshot

    async def gather(self, own: Snapshot) -> Snapshot:
        """All workers' metrics; of those that do not answer, what they had counted when they last did."""
        for other, said in zip(self._others, await self._ask(PeerRequest("metrics")), strict=True):
            if said:
                self._said[other] = _SNAPSHOT(said)
            elif other in self._said:
                self._said[other] = lasting(self._said[other])
        return merge((self.with_before(own), *self._said.values()))

    async def find(self, handover: str) -> bytes | None:
        """The record of a hand-over, from whoever has it."""
        return next((said for said in await self._ask(PeerRequest("handover", name=handover)) if said), None)

    async def ask_states(self) -> list[bytes | None]:
        """How the others stand."""
        return await self._ask(PeerRequest("state"))

    async def tell_state(self, state: bytes) -> list[tuple[int, bytes | None]]:
        """Have the others go over to a state; who said what."""
        return list(zip(self._others, await self._ask(PeerRequest("adopt", state=state)), strict=True))

    async def ask_statuses(self) -> list[bytes | None]:
        """What the others have to do at their engines."""
        return await self._ask(PeerRequest("statuses"))

    # --- asking and being asked ---

    async def _ask(self, request: PeerRequest) -> list[bytes | None]:
        """What each of the others says: empty if it does not in time, None where nobody is."""
        message = _ENCODE(replace(request, secret=self._group.secret))
        return await asyncio.gather(*(self._ask_one(other, message) for other in self._others))

    async def _ask_one(self, other: int, request: bytes) -> bytes | None:
        writer, address = None, self._group.address(other)
        sock = socket.socket(socket.AF_UNIX)
        sock.setblocking(False)
        try:
            async with asyncio.timeout(WAIT_S):
                await asyncio.get_running_loop().sock_connect(sock, address)
                reader, writer = await asyncio.open_unix_connection(sock=sock, limit=MAX_BYTES)
                if not _is_ours(writer):
                    logger.error("another user has taken worker %d's place at %r", other, address)
                    return b""
                writer.write(request)
                writer.write_eof()
                return await reader.read()
        except ConnectionRefusedError:
            return None
        except (OSError, TimeoutError) as error:
            logger.debug("worker %d does not answer: %s", other, error)
            return b""
        finally:
            if writer is not None:
                writer.close()
            else:
                sock.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(WAIT_S):
                if not _is_ours(writer):
                    return
                request = _REQUEST(await reader.read())
                if not hmac.compare_digest(request.secret, self._group.secret):
                    return
                if request.what == "remembered":
                    said = self._said.get(request.worker, ())
                    answer = _ENCODE(lasting(said)) if said else b""
                else:
                    assert self._answers is not None
                    answer = await self._answers(request)
                writer.write(answer)
                await writer.drain()
        except (OSError, TimeoutError, msgspec.MsgspecError) as error:
            logger.warning("another worker's question was not answered: %s", error)
        finally:
            writer.close()


def _is_ours(writer: asyncio.StreamWriter) -> bool:
    """Whether the other end is a process of this user."""
    sock = writer.get_extra_info("socket")
    told = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    user: int = _CREDENTIALS.unpack(told)[1]
    return user == os.geteuid()
