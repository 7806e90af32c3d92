"""Looks at each engine's health from time to time, so that one that is gone is known before a request finds out.

Each engine has a task of its own, which asks one question at a time and waits no longer than `TIMEOUT_S` for the
answer: an engine that hangs holds nobody up. The looks are spread by chance, so that they do not come all at once.
"""

from __future__ import annotations

import asyncio
import logging
import random
from functools import partial
from typing import TYPE_CHECKING

from kvrelay.errors import KvRelayError
from kvrelay.router.background import keep_running

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvrelay.router.core.fleet import Engine
    from kvrelay.router.engines import Engines

logger = logging.getLogger(__name__)

TIMEOUT_S = 5.0
HURRY_S = 1.0
"""Between looks at an engine that did not answer the last one well."""


class Prober:
    """Asks engines, and tells their health what they said."""

    def __init__(self, engines: Engines, interval_s: float) -> None:
        """``interval_s``: between two looks, about; 0 for none."""
        self._engines = engines
        self._interval_s = interval_s
        self._tasks: dict[Engine, asyncio.Task[None]] = {}

    def watch(self, engines: Iterable[Engine], interval_s: float | None = None) -> None:
        """Look at these from now on, and at no others; every ``interval_s`` if given."""
        changed = interval_s is not None and interval_s != self._interval_s
        self._interval_s = self._interval_s if interval_s is None else interval_s
        wanted = set(engines) if self._interval_s else set()
        for engine in [engine for engine in self._tasks if changed or engine not in wanted]:
            self._tasks.pop(engine).cancel()
        for engine in wanted - self._tasks.keys():
            look = keep_running(partial(self._look_at, engine), f"the probes of {engine.name}")
            self._tasks[engine] = asyncio.create_task(look)

    async def close(self) -> None:
        """Look no longer."""
        tasks = list(self._tasks.values())
        self.watch(())
        if tasks:
            await asyncio.wait(tasks)

    async def _look_at(self, engine: Engine) -> None:
        well = True
        while True:
            pause_s = self._interval_s if well else min(HURRY_S, self._interval_s)
            await asyncio.sleep(pause_s * (0.5 + random.random()))  # noqa: S311 - it spreads the load
            problem = await self._ask(engine)
            well = not problem
            if engine.health.probed(asyncio.get_running_loop().time(), well=well):
                told = "answers its probes again" if well else f"is down by its probes (last: {problem}): passed over"
                logger.warning("%s (%s) %s", engine.name, engine.address.url, told)

    async def _ask(self, engine: Engine) -> str:
        """What is wrong with it; empty if nothing is."""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                status = await self._engines.probe(engine, "/health", timeout_s=TIMEOUT_S)
        except KvRelayError as error:
            return str(error)
        except TimeoutError:
            return f"no answer within {TIMEOUT_S:g} s"
        return "" if status == 200 else f"/health answers {status}"
