"""A fake publisher of KV cache events: what vLLM's `ZmqEventPublisher` does, with losses and restarts on demand.

In a test::

    publisher = await FakePublisher.start()
    await publisher.publish(stored([1, 2, 3, 4], block_size=2))
    publisher.lose(stored([5, 6], block_size=2))         # numbered and kept, but nobody hears of it
    await publisher.restart()                            # another life: numbers begin at 0 again
    await publisher.stop()
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any, Self

import msgspec
import zmq
import zmq.asyncio
from xxhash import xxh64_digest

if TYPE_CHECKING:
    from collections.abc import Sequence

Event = dict[str, Any]
END = b"\xff" * 8
BIND_S = 30.0


def stored(tokens: Sequence[int], *, block_size: int, parent: bytes | None = None, **more: Any) -> Event:
    """Blocks of these tokens, named by their content. ``parent``: the block before them."""
    names, name = [], parent
    for at in range(0, len(tokens), block_size):
        name = xxh64_digest((name or b"") + repr(list(tokens[at : at + block_size])).encode())
        names.append(name)
    event: Event = {"type": "BlockStored", "block_hashes": names, "parent_block_hash": parent}
    event |= {"token_ids": list(tokens), "block_size": block_size, "lora_id": None, "medium": "GPU", "lora_name": None}
    return {**event, "group_idx": 0, **more}


def removed(names: Sequence[bytes]) -> Event:
    """Blocks that give way."""
    return {"type": "BlockRemoved", "block_hashes": list(names), "medium": "GPU", "group_idx": 0}


class FakePublisher:
    """One data-parallel rank of one engine."""

    def __init__(self, *, kept: int = 10_000, replays: bool = True) -> None:
        """``kept``: batches that can be asked for again; ``replays``: whether it answers who asks."""
        self._kept = kept
        self._replays = replays
        self._context = zmq.asyncio.Context()
        self._task: asyncio.Task[None] | None = None
        self.endpoint = self.replay = ""
        self.asked: list[int] = []
        """Numbers from which on replays were asked for."""

    @classmethod
    async def start(cls, **options: Any) -> Self:
        """Listen on free ports."""
        publisher = cls(**options)
        await publisher._live()
        return publisher

    async def _live(self) -> None:
        """Begin a life: on the ports of the one before, if there was one."""
        self._number = 0
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=self._kept)
        self._pub, self._router = self._context.socket(zmq.XPUB), self._context.socket(zmq.ROUTER)
        for socket, address in ((self._pub, self.endpoint), (self._router, self.replay)):
            socket.linger = 0
            await _bind(socket, address or "tcp://127.0.0.1:*")
        self.endpoint, self.replay = (
            socket.getsockopt_string(zmq.LAST_ENDPOINT) for socket in (self._pub, self._router)
        )
        self._task = asyncio.create_task(self._answer())

    async def subscribed(self) -> None:
        """Wait until somebody listens."""
        await self._pub.recv()

    async def publish(self, *events: Event) -> None:
        """A batch of events."""
        number, payload = self._keep(events)
        await self._pub.send_multipart([b"", number.to_bytes(8, "big"), payload])

    async def garble(self, payload: bytes) -> None:
        """A batch that is none."""
        number, self._number = self._number, self._number + 1
        await self._pub.send_multipart([b"", number.to_bytes(8, "big"), payload])

    def lose(self, *events: Event) -> None:
        """A batch that nobody hears of, but that is kept for who asks."""
        self._keep(events)

    async def restart(self) -> None:
        """Die, and be born again with nothing kept."""
        await self._die()
        await self._live()

    async def stop(self) -> None:
        """Die for good."""
        await self._die()
        self._context.destroy(linger=0)

    def _keep(self, events: Sequence[Event]) -> tuple[int, bytes]:
        number, self._number = self._number, self._number + 1
        payload = msgspec.msgpack.encode([0.0, list(events), 0])
        self._buffer.append((number, payload))
        return number, payload

    async def _answer(self) -> None:
        while True:
            who, empty, first = await self._router.recv_multipart()
            self.asked.append(int.from_bytes(first, "big"))
            if not self._replays:
                continue
            for number, payload in list(self._buffer):
                if number >= self.asked[-1]:
                    await self._router.send_multipart([who, empty, b"", number.to_bytes(8, "big"), payload])
            await self._router.send_multipart([who, empty, b"", END, b""])

    async def _die(self) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait({self._task})
        self._pub.close()
        self._router.close()


async def _bind(socket: zmq.asyncio.Socket, address: str) -> None:
    """Listen; a port of a socket that was closed becomes free a moment later."""
    async with asyncio.timeout(BIND_S):
        while True:
            try:
                socket.bind(address)
            except zmq.ZMQError as error:
                if error.errno != zmq.EADDRINUSE:
                    raise
                await asyncio.sleep(0.01)
            else:
                return
