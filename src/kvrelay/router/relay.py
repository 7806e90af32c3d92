"""One engine's answer on its way to the client: bytes as they come, and an honest end if they stop coming."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

from kvrelay.router.core.answers import refusal
from kvrelay.router.core.events import EventCutter
from kvrelay.router.errors import EngineError, UnfinishedStreamError
from kvrelay.router.http.messages import end_to_end, find

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from kvrelay.router.core.stream_end import StreamEnd
    from kvrelay.router.http.call import Call
    from kvrelay.router.http.messages import Headers
    from kvrelay.router.http.reply import Reply

EVENT_STREAM = b"text/event-stream"
END_GRACE_S = 1.0
"""For an engine that has said its last event to end the stream, when the client has left with that event."""
END_BYTES = 64 << 10
"""Of what it may say by then."""


class Relay:
    """Joins a call to a reply."""

    __slots__ = (
        "_begins", "_call", "_cutter", "_end", "_framed", "_on_first_byte", "_reply", "_rewrite", "_trailer",
    )  # fmt: skip

    def __init__(
        self,
        call: Call,
        reply: Reply,
        own: Headers,
        on_first_byte: Callable[[], None] | None = None,
        trailer: Callable[[], Awaitable[bytes]] | None = None,
        begins: Callable[[bytes], bool] = bool,
        end: StreamEnd | None = None,
        rewrite: Callable[[bytes], bytes] | None = None,
    ) -> None:
        """``own``: the router's headers, which replace the engine's of the same names.

        ``on_first_byte``: called when the body begins, which ``begins`` tells of each piece. ``trailer``: what comes
        after a stream's last event. ``end``: what a stream of events must end with. ``rewrite``: of a stream whose
        beginning the client has: what becomes of its whole events.
        """
        self._rewrite = rewrite
        self._trailer = trailer
        self._begins = begins
        self._end = end
        self._call = call
        self._reply = reply
        self._on_first_byte = on_first_byte
        headers = end_to_end(call.headers, {name for name, _ in own}) + own
        self._framed = find(headers, b"content-length") is not None
        self._cutter = EventCutter() if not self._framed and is_events(headers) else None
        if rewrite is None:
            reply.events = self._cutter is not None
            reply.start(call.status, headers, reason=call.reason)

    async def run(self, *, silence_s: float) -> None:
        """Pass the body on to its end. A client that does not keep up holds the engine back.

        A client that leaves once a stream's last event was sent has had all of it: many do not wait for more.

        Raises:
            EngineError: the answer broke off; `break_off` ends the client's.
        """
        reply = self._reply
        reply.fed_by(self._call)
        if not self._call.has_body:
            reply.flush()
        try:
            await self._call.pipe(self._pass, silence_s=silence_s)
            reply.fed_by(None)
            if self._cutter is not None:
                rest = self._rest()
                if not self._is_whole:
                    raise UnfinishedStreamError("the engine ended the stream without saying that it is done")
                reply.write(self._written(rest), end=self._trailer is None)
                if self._trailer is not None:
                    reply.write(await self._trailer())
        except asyncio.CancelledError:
            if not (reply.gone and self._has_said_all):
                raise
            await self._see_off()
        finally:
            reply.fed_by(None)
        reply.finish()

    def break_off(self, error: EngineError) -> None:
        """End an answer that will not be whole: an error event in a stream of events, else a closed connection."""
        self._reply.break_off(refusal(error))

    def _pass(self, data: bytes) -> None:
        if self._on_first_byte is not None and self._begins(data):
            self._on_first_byte()
            self._on_first_byte = None
        last = self._call.whole and self._trailer is None
        if self._cutter is not None:
            data = self._cutter.feed(data)
            if self._end is not None:
                self._end.feed(data)
            if last:
                rest = self._rest()
                last = self._is_whole
                data = data + rest if last else data
        self._reply.write(self._written(data), end=last)

    async def _see_off(self) -> None:
        """Let the engine end its answer, as it is about to, so that its connection serves the next call."""
        self._call.resume()
        with suppress(EngineError):
            await self._call.read(limit_bytes=END_BYTES, timeout_s=END_GRACE_S)

    def _written(self, data: bytes) -> bytes:
        return data if self._rewrite is None else self._rewrite(data)

    def _rest(self) -> bytes:
        """What came behind the last whole event of a stream that has ended."""
        rest = b"" if self._cutter is None else self._cutter.rest()
        if self._end is not None:
            self._end.feed(rest)
        return rest

    @property
    def _has_said_all(self) -> bool:
        """Whether the last event of a stream was sent."""
        return self._cutter is not None and self._end is not None and self._call.status == 200 and self._end.whole

    @property
    def _is_whole(self) -> bool:
        return self._end is None or self._call.status != 200 or self._end.whole


def is_events(headers: Headers) -> bool:
    """Whether an answer is a stream of events."""
    return (find(headers, b"content-type") or b"").startswith(EVENT_STREAM)
