"""What operations are made of: requests that are sent now, and answers that are waited for when they are needed.

An operation is a generator. It yields

- an `Ask` to send a request and be sent its reply,
- a `Start` to send a request and be sent its `Call` at once, so that work goes on while the pool answers,
- a `Call` to be sent its reply,
- a `Transfer` to go on when bytes that move without a message have arrived,

and is thrown the error where that is what came. The blocking shell drives it by waiting, the asyncio shell by awaiting.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias, TypeVar

from msgspec import Struct

from kvrelay.client.core.session import Ask, Call
from kvrelay.wire import messages as m

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

T = TypeVar("T")
R = TypeVar("R", bound=m.Reply)


class Start(Struct, frozen=True, eq=False):
    """Send this, and go on. ``more``: another follows at once, they may leave together."""

    ask: Ask
    more: bool = False


class Transfer(Struct, frozen=True, eq=False):
    """Go on when ``finished`` answers True; it is asked again and again. It raises what went wrong."""

    finished: Callable[[], bool]


Step: TypeAlias = Ask | Start | Call | Transfer
Operation: TypeAlias = "Generator[Step, m.Reply | Call | None, T]"


def begin(ask: Ask, *, more: bool = False) -> Operation[Call]:
    """Send a request without waiting for its answer. ``more``: another follows at once, they may leave together."""
    call = yield Start(ask, more)
    assert isinstance(call, Call)
    return call


def answer(call: Call, kind: type[R]) -> Operation[R]:
    """Wait for the answer to what `begin` sent."""
    reply = yield call
    assert isinstance(reply, kind)
    return reply
