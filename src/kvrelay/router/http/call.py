"""One request to an engine, seen by who waits for its answer.

The body is either read whole or piped to a function as it comes. A call that is closed before its end closes its
connection, which is how vLLM learns that nobody wants the answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from kvrelay.router.errors import AnswerTooLargeError, EngineError, EngineSilentError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Coroutine
    from typing import Any

    from kvrelay.router.http.deadline import Deadline
    from kvrelay.router.http.messages import Headers

MAX_KEPT_BYTES = 16 << 20
"""Of an answer that nobody takes yet; the rest waits in the engine's buffers."""


class Carrier(Protocol):
    """The connection a call is on."""

    @property
    def deadline(self) -> Deadline:
        """The connection's, which serves one call after the other: of no concern to a call that has ended."""
        ...

    def abort(self) -> None:
        """Close it at once. May be repeated."""
        ...

    def pause_reading(self) -> None:
        """Let the engine's bytes wait."""
        ...

    def resume_reading(self) -> None:
        """Take them again."""
        ...


class Call:
    """One request in flight. Its connection calls the ``on_...`` methods; everything else is for its owner."""

    __slots__ = (
        "_at_least", "_begins", "_chunks", "_connection", "_deadline", "_done", "_error", "_first", "_full", "_head",
        "_kept", "_loop", "_moving", "_paused", "_silence_s", "_sink", "ended", "headers", "reason", "status", "whole",
    )  # fmt: skip

    def __init__(self, connection: Carrier, loop: asyncio.AbstractEventLoop) -> None:
        """The request is being sent on ``connection``."""
        self._connection = connection
        self._loop = loop
        self._head: asyncio.Future[None] = loop.create_future()
        self._first: asyncio.Future[None] | None = None
        self._begins: Callable[[bytes], bool] = bool
        self._done: asyncio.Future[None] | None = None
        self._error: EngineError | None = None
        self._sink: Callable[[bytes], None] | None = None
        self._chunks: list[bytes] = []
        self._kept = 0
        self._at_least = 1
        self._full = False
        self._deadline = connection.deadline
        self._silence_s = 0.0
        self._moving = True
        self._paused = False
        self.ended = False
        """Whether the answer is whole."""
        self.whole = False
        """The same, known already while the last piece of the body is given out."""
        self.status = 0
        self.reason = b""
        self.headers: Headers = []

    def head(self, timeout_s: float) -> asyncio.Future[None]:
        """To be awaited: the answer's head is there."""
        self._deadline.set(timeout_s)
        return self._head

    async def begun(self, timeout_s: float, begins: Callable[[bytes], bool] = bool, *, at_least: int = 1) -> bytes:
        """Wait for the body's first bytes, or its end. What is there by then, which is kept for `pipe`.

        ``begins``: given each piece, whether the answer has begun by now; with the first byte, if not given.

        Raises:
            EngineError: the connection was lost, or they did not come within ``timeout_s``.
        """
        if self._error is not None:
            raise self._error
        self._begins, self._at_least = begins, at_least
        if not self.ended and not (any(begins(data) for data in self._chunks) and self._kept >= at_least):
            self._first = self._loop.create_future()
            self._deadline.set(timeout_s)
            await self._first
            if not self.ended:
                self._deadline.clear()
        return self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)

    @property
    def has_body(self) -> bool:
        """Whether something of the body is there, or its end."""
        return bool(self._chunks) or self.ended

    def check(self) -> None:
        """Raise what the call has failed with by now, if it has."""
        if self._error is not None:
            raise self._error

    async def read(self, *, limit_bytes: int, timeout_s: float) -> bytes:
        """The whole body.

        Raises:
            EngineError: it did not come whole, in time, or within ``limit_bytes``.
        """
        if self.ended and self._kept <= limit_bytes and self._error is None:  # it came with its head, as usual
            whole = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
            self._chunks.clear()
            return whole
        parts: list[bytes] = []
        size = 0

        def collect(data: bytes) -> None:
            nonlocal size
            size += len(data)
            if size <= limit_bytes:
                parts.append(data)
            elif self._error is None:
                self.fail(AnswerTooLargeError(f"the answer is longer than {limit_bytes} bytes"))

        await self._pipe(collect, timeout_s, moving=False)
        if size > limit_bytes:  # it had ended before: no call to be failed any more
            raise AnswerTooLargeError(f"the answer is longer than {limit_bytes} bytes")
        return b"".join(parts)

    def pipe(self, sink: Callable[[bytes], None], *, silence_s: float) -> Coroutine[Any, Any, None]:
        """Give the body to ``sink`` as it comes, until its end; what is there already is given at once. To be awaited.

        Raises:
            EngineError: the connection was lost, or nothing came for ``silence_s`` (paused time aside).
        """
        return self._pipe(sink, silence_s, moving=True)

    async def _pipe(self, sink: Callable[[bytes], None], limit_s: float, *, moving: bool) -> None:
        """``moving``: whether the limit begins anew with every piece."""
        if self._chunks:
            data = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
            self._chunks.clear()
            sink(data)
        if self._error is not None:
            raise self._error
        if self.ended:
            return
        self._sink = sink
        self._silence_s = limit_s
        self._moving = moving
        if not self._paused:  # by what was there already
            if self._full:
                self._connection.resume_reading()
            self._deadline.set(limit_s)
        self._full = False
        self._done = self._loop.create_future()
        await self._done

    def pause(self) -> None:
        """Take nothing more from the engine: what it sends stays in its own buffers and the kernel's."""
        if not self.ended and not self._paused:
            self._paused = True
            self._deadline.clear()
            self._connection.pause_reading()

    def resume(self) -> None:
        """Go on after `pause`."""
        if self._paused:
            self._paused = False
            self._connection.resume_reading()
            if not self.ended:
                self._deadline.set(self._silence_s)

    def close(self) -> None:
        """Be done with it: an answer that is not whole is abandoned, and its connection closed. May be repeated."""
        self._sink = None
        if not self.ended:
            self._deadline.clear()
            self._connection.abort()

    def fail(self, error: EngineError) -> None:
        """End the call with ``error``, to be raised to whoever waits for it now or next."""
        if self.ended or self._error is not None:
            return
        self._error = error
        for future in (self._head, self._first, self._done):
            if future is not None and not future.done():
                future.set_exception(error)
        self.close()

    def on_head(self, status: int, reason: bytes, headers: Headers) -> None:
        """The answer's head is there."""
        self.status, self.reason, self.headers = status, reason, headers
        self._deadline.clear()
        if not self._head.done():
            self._head.set_result(None)

    def on_data(self, data: bytes) -> None:
        """More of the body."""
        if self._sink is None:
            self._chunks.append(data)
            self._kept += len(data)
            if self._first is not None and not self._first.done() and self._begins(data):
                self._begins = bool
                if self._kept >= self._at_least:
                    self._first.set_result(None)
            if self._kept >= MAX_KEPT_BYTES and not self._full:
                self._full = True
                self._connection.pause_reading()
            return
        if self._moving:
            self._deadline.set(self._silence_s)
        self._sink(data)

    def on_end(self) -> None:
        """The answer is whole; the connection may already serve another call."""
        if self._paused or self._full:
            self._paused = self._full = False
            self._connection.resume_reading()
        self.ended = True
        self._deadline.clear()
        _set(self._first)
        _set(self._done)

    def expire(self) -> None:
        """The deadline has come."""
        self.fail(
            EngineSilentError("the engine did not answer in time" if not self.status else "the engine fell silent")
        )


def _set(future: asyncio.Future[None] | None) -> None:
    if future is not None and not future.done():
        future.set_result(None)
