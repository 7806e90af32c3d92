"""Workers of one router ask each other: for metrics, and for hand-overs another one has the record of.

Each listens on a UNIX socket in the router's own directory. A question is a connection: one message there, one back.
Whoever does not answer in time is left out.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Literal

import msgspec
from msgspec import Struct

from kvrelay.router.core.merging import Snapshot, lasting, merge, weight

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

logger = logging.getLogger(__name__)

WAIT_S = 2.0
"""For a colleague's answer: a little longer than it may wait for proofs."""
MAX_BYTES = 64 << 20
_ENCODE = msgspec.msgpack.Encoder().encode
_SNAPSHOT = msgspec.msgpack.Decoder(Snapshot).decode


class Question(Struct, frozen=True):
    """``metrics``: your snapshot. ``handover``: your record of ``name``. ``remembered``: what ``worker`` last said."""

    what: Literal["metrics", "handover", "remembered"]
    name: str = ""
    worker: int = 0


_QUESTION = msgspec.msgpack.Decoder(Question).decode


class Colleagues:
    """The other workers, and what they have said."""

    def __init__(self, directory: Path, number: int, count: int) -> None:
        """This is worker ``number`` of ``count``."""
        self.number = number
        self._directory = directory
        self._others = [other for other in range(count) if other != number]
        self._answers: Callable[[Question], Awaitable[bytes]] | None = None
        self._server: asyncio.Server | None = None
        self._said: dict[int, Snapshot] = {}
        self._before: Snapshot = ()
        """What whoever sat here before had counted."""

    async def start(self, answers: Callable[[Question], Awaitable[bytes]]) -> None:
        """Answer from now on; ``answers`` answers questions for metrics and hand-overs, empty if there is nothing."""
        self._answers = answers
        # First, since whoever asks us for metrics then forgets what our predecessor said.
        remembered = [_SNAPSHOT(said) for said in await self._ask(Question("remembered", worker=self.number)) if said]
        self._before = max(remembered, key=weight, default=())
        path = self._path(self.number)
        path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._serve, path)

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
        for other, said in zip(self._others, await self._ask(Question("metrics")), strict=True):
            if said:
                self._said[other] = _SNAPSHOT(said)
            elif other in self._said:
                self._said[other] = lasting(self._said[other])
        return merge((self.with_before(own), *self._said.values()))

    async def find(self, handover: str) -> bytes | None:
        """The record of a hand-over, from whoever has it."""
        return next((said for said in await self._ask(Question("handover", handover)) if said), None)

    # --- asking and being asked ---

    async def _ask(self, question: Question) -> list[bytes]:
        return await asyncio.gather(*(self._ask_one(other, _ENCODE(question)) for other in self._others))

    async def _ask_one(self, other: int, question: bytes) -> bytes:
        writer = None
        try:
            async with asyncio.timeout(WAIT_S):
                reader, writer = await asyncio.open_unix_connection(self._path(other), limit=MAX_BYTES)
                writer.write(question)
                writer.write_eof()
                return await reader.read()
        except (OSError, TimeoutError) as error:
            logger.debug("worker %d does not answer: %s", other, error)
            return b""
        finally:
            if writer is not None:
                writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(WAIT_S):
                question = _QUESTION(await reader.read())
                if question.what == "remembered":
                    said = self._said.get(question.worker, ())
                    answer = _ENCODE(lasting(said)) if said else b""
                else:
                    assert self._answers is not None
                    answer = await self._answers(question)
                writer.write(answer)
                await writer.drain()
        except (OSError, TimeoutError, msgspec.MsgspecError) as error:
            logger.warning("a colleague's question was not answered: %s", error)
        finally:
            writer.close()

    def _path(self, number: int) -> Path:
        return self._directory / f"{number}.sock"
