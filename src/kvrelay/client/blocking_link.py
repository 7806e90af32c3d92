"""A blocking connection to one pool: how it is made, and how operations are driven over it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Self, TypeVar

from kvrelay.client.connection import TIMEOUT_S, Connection, allowed
from kvrelay.client.core.handshake import find_index, hello, reach
from kvrelay.client.core.session import Ask, Call
from kvrelay.client.core.steps import Start, Transfer
from kvrelay.client.lead import Lead
from kvrelay.errors import BadRequestError, DeadlineError, KvRelayError, PoolUnavailableError
from kvrelay.transport import nixl
from kvrelay.transport.dial import dial, unusable, unwelcome
from kvrelay.wire import messages as m

if TYPE_CHECKING:
    import socket
    from types import TracebackType

    from kvrelay.client.core.steps import Operation, Step
    from kvrelay.transport.address import Address
    from kvrelay.transport.tls import TlsConfig, TlsSocket

T = TypeVar("T")

IDLE_S = 20e-6
"""Between two looks at a transfer that the kernel says nothing about."""


class PendingCall:
    """A request under way on a `PoolClient`; see `PoolClient.start`. For one thread at a time."""

    def __init__(self, lead: Lead, call: Call) -> None:
        self._lead = lead
        self._call = call

    @property
    def number(self) -> int:
        """The id it was sent under, as for `Forget`; 0: it was not sent."""
        return self._call.number

    def poll(self) -> bool:
        """Whether there is an answer or an error, without waiting."""
        return self._call.finished or self._lead.pump(self._call, 0.0)

    def result(self, timeout_s: float) -> m.Reply:
        """The reply. DeadlineError: it is not there yet, ask again; any other error is the answer."""
        if not self._call.finished and not self._lead.pump(self._call, timeout_s):
            raise DeadlineError(f"no answer from the pool within {timeout_s} s")
        return self._call.outcome()


class BlockingLink(Connection):
    """What `kvrelay.client.blocking.PoolClient` does apart from the operations themselves."""

    def __init__(self, sock: socket.socket | TlsSocket, address: Address) -> None:
        super().__init__(sock, str(address), is_unix=address.is_unix, reuse_staging=True)
        self._lead = Lead(self._session, self._stream, self.address)

    @classmethod
    def connect(
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
        """Connect to ``unix:PATH``, ``tcp:HOST:PORT`` or ``tls:HOST:PORT``.

        ``transport``: how the bytes of whole objects travel: ``shm``, ``nixl``, ``tcp`` (in frames, over the connection
        itself), or ``auto``, the first of them that both sides have. ``map_arena=False``: the same as ``tcp``.
        ``tls``: certificates, if the address has none.

        Raises:
            PoolUnavailableError: nobody answers there.
            UnauthorizedError: the token is missing or wrong.
            VersionError: the pool speaks another protocol version.
            ConfigError: ``address`` is no address, a certificate cannot be used, or the pool does not offer
                ``transport`` here.
        """
        deadline = time.monotonic() + timeout_s
        sock, where = dial(address, tls=tls, timeout_s=timeout_s)
        try:
            client = cls(sock, where)
        except OSError as error:
            sock.close()
            raise unusable(address, error) from error
        try:
            try:
                client.welcome = client._run(hello(name, token), timeout_s=max(0.0, deadline - time.monotonic()))
            except PoolUnavailableError as error:
                raise unwelcome(where, error) from error
            how = transport if map_arena else "tcp"
            client._map(client._run(reach(client.welcome, how, nixl=nixl.available())))
            client._map_index(client._run(find_index(client.welcome, wanted=client._can_look)))
        except DeadlineError as error:
            client.close()
            raise PoolUnavailableError(f"{address} accepts connections and does not answer: {error}") from None
        except BaseException:
            client.close()
            raise
        return client

    def start(self, request: m.Request, reply: type[m.Reply]) -> PendingCall:
        """Send a request without waiting for its answer, a ``reply``. Errors come with the result.

        Not for messages with a payload: there would be nowhere for their bytes to come from or go to.
        """
        try:
            if isinstance(request, m.Read | m.Write | m.Put | m.Get):
                raise BadRequestError(
                    f"a {type(request).__name__} moves bytes: use put_many and get_many, fetch, or stage and commit"
                )
            return PendingCall(self._lead, self._lead.start(Ask(request, reply)))
        except KvRelayError as error:
            failed = Call(Ask(request, reply))
            failed.finish(None, error)
            return PendingCall(self._lead, failed)

    def _finish(self, call: Call, timeout_s: float) -> m.Reply:
        if not call.finished and not self._lead.pump(call, timeout_s):
            # The answer may still come and would be taken for another's: this connection cannot be used any more.
            error = DeadlineError(f"the pool at {self.address} did not answer within {round(timeout_s, 2):g} s")
            self._lead.end(PoolUnavailableError(str(error)))
            raise error
        return call.outcome()

    def _take(self, step: Step, timeout_s: float) -> m.Reply | Call | None:
        match step:
            case Start():
                return self._lead.start(step.ask, more=step.more)
            case Transfer():
                self._lead.flush()
                deadline = time.monotonic() + timeout_s
                while not step.finished():
                    if time.monotonic() > deadline:
                        raise DeadlineError(f"bytes to or from {self.address} did not arrive within {timeout_s:g} s")
                    time.sleep(IDLE_S)
                return None
            case Call():
                return self._finish(step, timeout_s)
            case Ask():
                return self._finish(self._lead.start(step), timeout_s)

    def _run(self, operation: Operation[T], *, timeout_s: float = TIMEOUT_S, extra_s: float = 0.0) -> T:
        timeout_s += allowed(extra_s)
        try:
            step = next(operation)
            while True:
                try:
                    result = self._take(step, timeout_s)
                except KvRelayError as error:
                    step = operation.throw(error)
                else:
                    step = operation.send(result)
        except StopIteration as stop:
            value: T = stop.value
            return value
        except PoolUnavailableError as error:
            self._lead.end(error)
            raise
        except (KeyboardInterrupt, SystemExit):
            # Its buffers are the caller's again from here on: nothing may move through them any more.
            self._lead.end(PoolUnavailableError("an operation was interrupted half-way"))
            raise
        finally:
            if self.closed:
                self._let_go()

    def close(self) -> None:
        """End the connection and everything that belongs to it. May be called twice, by any thread."""
        self._lead.end(PoolUnavailableError(f"the connection to {self.address} was closed"))
        self._unmap()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
