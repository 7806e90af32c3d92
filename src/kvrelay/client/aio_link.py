"""A connection to one pool in an event loop: how it is made, and how operations are driven over it."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Self, TypeVar

from kvrelay.client.connection import TIMEOUT_S, Connection, allowed
from kvrelay.client.core.handshake import find_index, hello, reach
from kvrelay.client.core.session import AbandonedError, Ask, Call, undoing
from kvrelay.client.core.steps import Start, Transfer
from kvrelay.errors import DeadlineError, KvRelayError, PoolUnavailableError
from kvrelay.transport import nixl
from kvrelay.transport.dial import dial_async, unusable, unwelcome

if TYPE_CHECKING:
    import socket
    from types import TracebackType

    from kvrelay.client.core.steps import Operation, Step
    from kvrelay.transport.address import Address
    from kvrelay.transport.tls import TlsConfig, TlsSocket
    from kvrelay.wire import messages as m

T = TypeVar("T")

QUICK_TURNS, LOOK_S = 32, 0.0005
"""How often it is looked at once whether bytes have arrived that no message tells of; and after that, how often."""
LAST_STEPS = 16
"""Steps an operation may take to give back what it holds, once nobody waits for it."""


class AsyncLink(Connection):
    """What `kvrelay.client.aio.AsyncPoolClient` does apart from the operations themselves."""

    def __init__(self, sock: socket.socket | TlsSocket, address: Address) -> None:
        super().__init__(sock, str(address), is_unix=address.is_unix, reuse_staging=False)
        self._loop = asyncio.get_running_loop()
        self._writing = False
        self._loop.add_reader(self._stream.fileno(), self._readable)

    @classmethod
    async def connect(
        cls,
        address: str,
        *,
        name: str,
        token: str | None = None,
        timeout_s: float = TIMEOUT_S,
        map_arena: bool = True,
        transport: str = "auto",
        tls: TlsConfig | None = None,
    ) -> Self:
        """Connect; arguments and errors as for `kvrelay.client.blocking.PoolClient.connect`."""
        sock, where = await dial_async(address, tls=tls, timeout_s=timeout_s)
        try:
            client = cls(sock, where)
        except OSError as error:
            sock.close()
            raise unusable(address, error) from error
        try:
            try:
                client.welcome = await client._run(hello(name, token), timeout_s=timeout_s)
            except PoolUnavailableError as error:
                raise unwelcome(where, error) from error
            how = transport if map_arena else "tcp"
            way = await client._run(reach(client.welcome, how, nixl=nixl.available()))
            await asyncio.to_thread(client._map, way)
            client._map_index(await client._run(find_index(client.welcome, wanted=client._can_look)))
        except DeadlineError as error:
            await client.close()
            raise PoolUnavailableError(f"{address} accepts connections and does not answer: {error}") from None
        except BaseException:
            await client.close()
            raise
        return client

    def _readable(self) -> None:
        try:
            if not self._stream.receive():
                raise PoolUnavailableError(f"the pool at {self.address} closed the connection")
        except KvRelayError as error:
            self._fail(error)

    def _flush(self) -> None:
        try:
            done = self._stream.flush()
        except KvRelayError as error:
            self._fail(error)
            return
        if done and self._writing:
            self._loop.remove_writer(self._stream.fileno())
        elif not done and not self._writing:
            self._loop.add_writer(self._stream.fileno(), self._flush)
        self._writing = not done

    def _fail(self, error: KvRelayError) -> None:
        if self._stream.fileno() >= 0:
            self._loop.remove_reader(self._stream.fileno())
            if self._writing:
                self._loop.remove_writer(self._stream.fileno())
                self._writing = False
        self._stream.close()
        self._session.close(error)
        self._let_go()

    def _begin(self, ask: Ask, *, more: bool = False) -> Call:
        call, request = self._session.start(ask)
        try:
            self._stream.send(request, ask.payload, sums_behind=ask.sums_behind)
        except KvRelayError as error:
            raise self._session.forget(request.id, error) from None
        if not more:
            self._flush()
        return call

    async def _answer(self, call: Call, timeout_s: float) -> m.Reply:
        if call.finished:
            return call.outcome()
        self._flush()
        answered: asyncio.Future[None] = self._loop.create_future()

        def done(_call: Call) -> None:
            if not answered.done():
                answered.set_result(None)

        call.done = done
        try:
            async with asyncio.timeout(timeout_s):
                await answered
        except TimeoutError:
            error = DeadlineError(f"the pool at {self.address} did not answer within {round(timeout_s, 2):g} s")
            self._fail(PoolUnavailableError(str(error)))
            raise error from None
        except asyncio.CancelledError:
            if call.reply is not None:  # in this very turn of the loop
                self._undo(call)
            raise
        return call.outcome()

    async def _take(self, step: Step, timeout_s: float, started: list[Call]) -> m.Reply | Call | None:
        match step:
            case Start():
                started[:] = [call for call in started if not call.finished]
                call = self._begin(step.ask, more=step.more)
                started.append(call)
                return call
            case Transfer():
                await self._wait_for(step, timeout_s)
                return None
            case Call():
                return await self._answer(step, timeout_s)
            case Ask():
                call = self._begin(step)
                started.append(call)
                return await self._answer(call, timeout_s)

    async def _after_others(self, here: T) -> T:
        """What was found without waiting, once others had their turn: a task that asks again and again stops nobody."""
        await asyncio.sleep(0)
        return here

    async def _wait_for(self, transfer: Transfer, timeout_s: float) -> None:
        self._flush()
        deadline = self._loop.time() + timeout_s
        turns = 0
        while not transfer.finished():
            if self._loop.time() > deadline:
                raise DeadlineError(f"bytes to or from {self.address} did not arrive within {timeout_s:g} s")
            turns += 1
            await asyncio.sleep(0 if turns <= QUICK_TURNS else LOOK_S)

    async def _run(self, operation: Operation[T], *, timeout_s: float = TIMEOUT_S, extra_s: float = 0.0) -> T:
        timeout_s += allowed(extra_s)
        started: list[Call] = []
        step: Step | None = None
        try:
            step = next(operation)
            while True:
                try:
                    result = await self._take(step, timeout_s, started)
                except KvRelayError as error:
                    step = operation.throw(error)
                else:
                    step = operation.send(result)
        except StopIteration as stop:
            value: T = stop.value
            return value
        except PoolUnavailableError as error:
            self._fail(error)
            raise
        except asyncio.CancelledError:
            self._abandon(operation, started, moving=isinstance(step, Transfer))
            raise

    def _abandon(self, operation: Operation[T], started: list[Call], *, moving: bool) -> None:
        """Give back what an operation holds that nobody waits for any more. ``moving``: bytes are, now."""
        for call in started:
            if not call.finished:
                call.done = self._undo
                moving = moving or bool(call.ask.payload or call.ask.targets)
        if moving:
            # Its buffers are the caller's again from here on: nothing may move through them any more.
            self._fail(PoolUnavailableError("a transfer was cancelled half-way"))
        with contextlib.suppress(KvRelayError, StopIteration):
            step = operation.throw(AbandonedError("the task was cancelled"))
            for _ in range(LAST_STEPS):
                match step:
                    case Start():
                        step = operation.send(self._begin(step.ask))
                    case Call() if step.error is not None:
                        step = operation.throw(step.error)
                    case Call() if step.reply is not None:
                        step = operation.send(step.reply)
                    case Ask():
                        self._tell(step.request)
                        step = operation.throw(AbandonedError("the task was cancelled"))
                    case _:
                        step = operation.throw(AbandonedError("the task was cancelled"))

    def _undo(self, call: Call) -> None:
        """Give back what came for a task that was cancelled meanwhile."""
        request = undoing(call.reply)
        if request is not None:
            self._tell(request)

    def _tell(self, request: m.Request) -> None:
        """Send a request whose answer does not matter."""
        with contextlib.suppress(KvRelayError):
            self._begin(Ask(request))

    async def close(self) -> None:
        """End the connection and everything that belongs to it. May be called twice."""
        self._fail(PoolUnavailableError(f"the connection to {self.address} was closed"))
        self._unmap()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
