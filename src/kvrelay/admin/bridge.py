"""From the admin thread into the working loop: few calls at a time, each short, none waited for without a limit.

The data path lives in the working loop. Admin clients, slow ones too, are served by another thread's loop; all that
reaches the working one is a function that runs there for a moment. One runs in a turn of the loop: data requests that
came meanwhile are served between two.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from typing import TYPE_CHECKING, Any, TypeVar

from kvrelay.errors import DeadlineError, PoolUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

T = TypeVar("T")

MAX_CALLS = 8
"""Calls handed over and not answered."""
TIMEOUT_S = 5.0


class Bridge:
    """Hands calls over to ``loop``; used from any other thread's event loop."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        max_calls: int = MAX_CALLS,
        timeout_s: float = TIMEOUT_S,
        who: str = "the pool",
    ) -> None:
        """``who`` works in ``loop``, for messages."""
        self._who = who
        self._loop = loop
        self._max_calls = max_calls
        self._timeout_s = timeout_s
        self._calls = 0
        self._lock = threading.Lock()
        self._due: deque[Callable[[], None]] = deque()
        """Touched in the working loop only."""

    async def call(self, work: Callable[[], T]) -> T:
        """Run ``work`` in the working loop; what it returned or raised.

        Raises:
            PoolUnavailableError: too many calls are under way, or there is no loop any more.
            DeadlineError: the loop did not come to it; then it will not happen.
        """
        self._enter()
        mine = asyncio.get_running_loop()
        answered: asyncio.Future[T] = mine.create_future()
        given_up = False

        def answer(result: T | None, error: Exception | None) -> None:
            if answered.done():
                return
            if error is not None:
                answered.set_exception(error)
            else:
                answered.set_result(result)  # type: ignore[arg-type]

        def run() -> None:
            if given_up:
                return
            result, problem = None, None
            try:
                result = work()
            except Exception as error:  # noqa: BLE001 - it is raised where it was asked for
                problem = error
            if not mine.is_closed():
                mine.call_soon_threadsafe(answer, result, problem)

        try:
            self._loop.call_soon_threadsafe(self._queue, run)
        except RuntimeError:
            self._leave()
            raise PoolUnavailableError(f"{self._who} has stopped") from None
        try:
            async with asyncio.timeout(self._timeout_s):
                return await answered
        except TimeoutError:
            given_up = True
            raise DeadlineError(f"{self._who} was busy for {self._timeout_s:g} s: ask again") from None

    async def wait(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine of ``work`` in the working loop, which may wait there; what it returned or raised.

        Raises:
            PoolUnavailableError: too many calls are under way, or there is no loop any more.
            DeadlineError: it did not come to its end in time.
        """
        self._enter()
        coroutine = work()
        try:
            running = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except RuntimeError:
            coroutine.close()
            self._leave()
            raise PoolUnavailableError(f"{self._who} has stopped") from None
        try:
            async with asyncio.timeout(self._timeout_s):
                return await asyncio.wrap_future(running)
        except TimeoutError:
            raise DeadlineError(f"{self._who} was busy for {self._timeout_s:g} s: ask again") from None
        finally:
            self._leave()

    def _queue(self, run: Callable[[], None]) -> None:
        self._due.append(run)
        if len(self._due) == 1:
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        """Run the oldest; the next one in the loop's next turn."""
        run = self._due[0]
        self._leave()
        run()
        self._due.popleft()
        if self._due:
            self._loop.call_soon(self._turn)

    def _enter(self) -> None:
        with self._lock:
            if self._calls >= self._max_calls:
                raise PoolUnavailableError(
                    f"{self._calls} admin requests are waiting for {self._who} already: ask again"
                )
            self._calls += 1

    def _leave(self) -> None:
        with self._lock:
            self._calls -= 1
