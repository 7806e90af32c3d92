"""An engine's error, held while another engine is asked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

from kvrelay.router.http.messages import Headers, end_to_end

if TYPE_CHECKING:
    from kvrelay.router.http.call import Call
    from kvrelay.router.http.reply import Reply

MAX_ERROR_BYTES = 4 << 20
"""Of an error's body."""


class PendingError(Struct, frozen=True):
    """An engine's 5xx or 429 answer, or an error under 200, kept in case no other engine does better."""

    status: int
    reason: bytes
    headers: Headers
    body: bytes

    @classmethod
    async def take(cls, call: Call, *, timeout_s: float) -> PendingError:
        """Read it whole."""
        return cls.of(call, await call.read(limit_bytes=MAX_ERROR_BYTES, timeout_s=timeout_s))

    @classmethod
    def of(cls, call: Call, body: bytes) -> PendingError:
        """What ``call`` answered, whose whole body is there."""
        return cls(call.status, call.reason, end_to_end(call.headers, {b"content-length"}), body)

    def give(self, reply: Reply, own: Headers) -> None:
        """To the client after all."""
        names = {name for name, _ in own}
        headers = [header for header in self.headers if header[0] not in names]
        headers += [*own, (b"content-length", b"%d" % len(self.body))]
        reply.start(self.status, headers, reason=self.reason)
        reply.write(self.body)
        reply.finish()
