"""The look at an engine's 200 before a byte of it reaches the client.

While nothing was sent, another engine can still be asked, and an error can still be an error status. So the head is
passed on with the first bytes of a stream, not before them; and an answer that is no stream, of which a client can use
nothing before its end, is waited for as a whole up to `HOLD_BYTES`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvrelay.router.core.answers import JSON
from kvrelay.router.core.stream_end import error_status, says_error
from kvrelay.router.errors import EmptyAnswerError
from kvrelay.router.http.messages import find
from kvrelay.router.pending_error import PendingError

if TYPE_CHECKING:
    from kvrelay.router.http.call import Call

HOLD_BYTES = 1 << 20
"""Of a JSON answer; what is longer is passed on as it comes."""


async def vet(call: Call, *, timeout_s: float) -> PendingError | None:
    """Wait until the answer shows what it is: None for an answer, or the error that it is.

    Raises:
        EngineError: there is nothing behind the 200, or it broke off, or it did not come in time.
    """
    if call.status != 200:
        return None
    is_json = (find(call.headers, b"content-type") or b"").startswith(JSON)
    body = await call.begun(timeout_s, at_least=HOLD_BYTES if is_json else 1)
    if not body:
        raise EmptyAnswerError("the engine answered 200 with an empty body")
    if is_json and call.ended and says_error(body):
        call.status, call.reason = error_status(body), b""
        return PendingError.of(call, body)
    return None
