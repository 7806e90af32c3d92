"""A subscription to one engine's KV cache events, over ZMQ: what `kvrelay.router.core.kv.stream` says, done.

vLLM publishes on a PUB socket, as (topic, number, payload), and replays on a ROUTER socket: asked with a number, it
sends what it keeps from there on and then number -1. Each replay has a connection of its own, so that no answer is
mistaken for one to another question. Replays are thousands of batches, at a router's start from every engine at once:
of all of them one batch is taken in each round of the event loop, so that requests go on beside them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any

from kvrelay.errors import ConfigError, ProtocolError
from kvrelay.router.core.kv.events import MAX_BATCH_BYTES, decode_batch
from kvrelay.router.core.kv.index import Source
from kvrelay.router.core.kv.stream import Apply, Ask, Forget, Stream

if TYPE_CHECKING:
    from collections.abc import Coroutine

    import zmq.asyncio

    from kvrelay.router.core.kv.index import KvIndex
    from kvrelay.router.core.kv.settings import Publisher
    from kvrelay.router.core.kv.stream import Action
    from kvrelay.router.kv.metrics import KvMetrics

logger = logging.getLogger(__name__)

END = (1 << 64) - 1
"""The number behind a replay's last batch: -1."""
HIGH_WATER = 100_000
"""Batches that wait to be read; as many as vLLM lets wait on its side."""
HEARTBEAT_S, HEARTBEAT_TIMEOUT_S = 5, 15
RECONNECT_MS, LONGEST_RECONNECT_MS = 100, 5_000


def load_zmq() -> Any:
    """The module `zmq`, with `zmq.asyncio` and `zmq.utils.monitor`.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import zmq
        import zmq.asyncio
        import zmq.utils.monitor
    except ImportError as error:
        raise ConfigError(
            f"--kv-events: events come over ZeroMQ, and pyzmq is not there ({error}): install kvrelay[kv-events]"
        ) from None
    return zmq


class Subscriber:
    """One subscription. Runs from `start` to `stop`, whatever becomes of the engine."""

    def __init__(
        self,
        publisher: Publisher,
        index: KvIndex,
        metrics: KvMetrics,
        context: zmq.asyncio.Context,
        turn: asyncio.Lock,
    ) -> None:
        """What is heard goes into ``index``. ``turn``: of all subscribers, who takes a replayed batch."""
        self._turn = turn
        self.source = Source(publisher.engine, publisher.rank)
        self._publisher = publisher
        self._index = index
        self._metrics = metrics
        self._context = context
        self._zmq = load_zmq()
        self._stream = Stream(replays=publisher.replay is not None)
        self._labels = (publisher.engine, str(publisher.rank))
        self._counted = (0, 0)
        """Gaps and replays that the metrics have."""
        self._replay: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        index.join(self.source)
        for counted in (metrics.up, metrics.events, metrics.gaps, metrics.replays, metrics.blocks, metrics.lag_seconds):
            counted.labels(*self._labels)

    def start(self) -> None:
        """Begin to listen."""
        zmq = self._zmq
        socket = self._socket(zmq.SUB)
        socket.subscribe(b"")
        monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        socket.connect(self._publisher.endpoint)
        self._spawn(self._listen(socket))
        self._spawn(self._watch(socket, monitor))
        if self._publisher.replay is not None:
            self._spawn(self._wake())
        self._do(self._stream.start(self._now()))

    def stop(self) -> set[asyncio.Task[None]]:
        """Listen no more, and forget the engine. What is still to end of it."""
        for task in self._tasks:
            task.cancel()
        self._index.leave(self.source)
        self._metrics.left(*self._labels)
        return set(self._tasks)

    # --- what comes in ---

    async def _listen(self, socket: zmq.asyncio.Socket) -> None:
        with socket:
            while True:
                frames = await socket.recv_multipart()
                if len(frames) == 3 and len(frames[1]) == 8:
                    self._do(self._stream.live(int.from_bytes(frames[1], "big"), frames[2], self._now()))
                else:
                    logger.warning("%s: a message of %d parts, which is not one of vLLM's", self._name, len(frames))
                await asyncio.sleep(0)

    async def _watch(self, socket: zmq.asyncio.Socket, monitor: zmq.asyncio.Socket) -> None:
        zmq = self._zmq
        up = self._metrics.up.labels(*self._labels)
        try:
            with monitor:
                while True:
                    event = await zmq.utils.monitor.recv_monitor_message(monitor)
                    if event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                        logger.info("%s publishes its KV cache events", self._name)
                        up.set(1)
                    elif event["event"] == zmq.EVENT_DISCONNECTED:
                        logger.info("%s: no connection to its KV cache events", self._name)
                        up.set(0)
                        self._do(self._stream.disconnected(self._now()))
        finally:
            up.set(0)
            if not socket.closed:
                socket.disable_monitor()

    async def _wake(self) -> None:
        while True:
            due = self._stream.due
            assert due is not None
            await asyncio.sleep(max(0.05, due - self._now()))
            self._do(self._stream.tick(self._now()))

    async def _ask(self, first: int) -> None:
        assert self._publisher.replay is not None
        me = asyncio.current_task()
        with self._socket(self._zmq.DEALER) as socket:
            socket.connect(self._publisher.replay)
            await socket.send_multipart([b"", first.to_bytes(8, "big")])
            while self._replay is me:
                frames = await socket.recv_multipart()
                if len(frames) != 4 or len(frames[2]) != 8:
                    logger.warning("%s: a replay of %d parts, which is not one of vLLM's", self._name, len(frames))
                    return
                number = int.from_bytes(frames[2], "big")
                if number == END:
                    self._replay = None
                    self._do(self._stream.replay_ended(self._now()))
                    return
                async with self._turn:
                    self._do(self._stream.replayed(number, frames[3], self._now()))
                    await asyncio.sleep(0)

    # --- what is done about it ---

    def _do(self, actions: list[Action]) -> None:
        metrics, labels = self._metrics, self._labels
        for action in actions:
            match action:
                case Ask(first):
                    if self._replay is not None and self._replay is not asyncio.current_task():
                        self._replay.cancel()
                    self._replay = self._spawn(self._ask(first))
                case Apply(payload):
                    self._apply(payload)
                case Forget(why):
                    self._forget(why)
        metrics.blocks.labels(*labels).set(self._index.num_blocks(self.source))
        counts = (self._stream.gaps, self._stream.replays)
        for counter, count, before in zip((metrics.gaps, metrics.replays), counts, self._counted, strict=True):
            counter.labels(*labels).inc(count - before)
        self._counted = counts

    def _apply(self, payload: bytes) -> None:
        try:
            batch = decode_batch(payload)
        except ProtocolError as error:
            logger.warning("%s: %s: what it holds is not known any more", self._name, error)
            self._forget("unreadable")
            return
        self._index.apply(self.source, batch.events)
        self._metrics.events.labels(*self._labels).inc(len(batch.events))
        self._metrics.lag_seconds.labels(*self._labels).set(time.time() - batch.ts)
        for reason, blocks in self._index.take_skipped(self.source):
            self._metrics.skipped.labels(*self._labels, reason).inc(blocks)

    def _forget(self, why: str) -> None:
        self._index.forget(self.source)
        self._metrics.forgotten.labels(*self._labels, why).inc()
        logger.info("%s: what it holds is not known any more: %s", self._name, why)

    # --- the rest ---

    @property
    def _name(self) -> str:
        engine, rank = self._labels
        return engine if rank == "0" else f"{engine}, rank {rank}"

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()

    def _socket(self, kind: int) -> zmq.asyncio.Socket:
        socket: zmq.asyncio.Socket = self._context.socket(kind)
        socket.linger = 0
        socket.rcvhwm = HIGH_WATER
        socket.maxmsgsize = MAX_BATCH_BYTES
        socket.reconnect_ivl, socket.reconnect_ivl_max = RECONNECT_MS, LONGEST_RECONNECT_MS
        socket.heartbeat_ivl, socket.heartbeat_timeout = 1_000 * HEARTBEAT_S, 1_000 * HEARTBEAT_TIMEOUT_S
        return socket

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (bug := task.exception()) is not None:
            logger.error("%s: a bug ended the subscription to its KV cache events", self._name, exc_info=bug)
            self._forget("bug")
