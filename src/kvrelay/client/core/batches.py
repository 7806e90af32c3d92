"""Batches of one call under way: a few are asked for ahead, while another is copied, sent or received."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from kvrelay.client.core.session import AbandonedError
from kvrelay.client.core.steps import begin
from kvrelay.errors import KvRelayError

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable, Iterator

    from kvrelay.client.core.session import Ask, Call
    from kvrelay.client.core.steps import Operation

LEASE_S = 60.0
"""How long a batch may take, from when it is asked for."""
DEPTH = 2
"""Batches under way while another is copied, sent or received."""


class Batch:
    """Keys ``start`` to ``stop`` of a call, and the request under way for them."""

    __slots__ = ("call", "start", "stop")

    def __init__(self, start: int, stop: int, call: Call) -> None:
        self.start = start
        self.stop = stop
        self.call = call


def ask_ahead(ask: Callable[[int, int], Ask], cuts: Iterator[tuple[int, int]], asked: deque[Batch]) -> Operation[None]:
    """Send requests until as many are under way as shall be."""
    while len(asked) < DEPTH:
        cut = next(cuts, None)
        if cut is None:
            return
        call = yield from begin(ask(*cut), more=len(asked) < DEPTH - 1)
        asked.append(Batch(*cut, call))


def settle(sent: deque[Batch], error: KvRelayError) -> Operation[None]:
    """Wait until the caller's buffers are the caller's again."""
    if isinstance(error, AbandonedError):
        return
    for batch in sent:
        with contextlib.suppress(KvRelayError):
            yield batch.call
