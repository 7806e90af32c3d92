"""How the engines are, by their own `/health`: asked for when somebody wants to know.

An engine that hangs must not make the router look ill, so the answer does not wait for it; and however many ask, each
engine is asked by one request at a time.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kvrelay.errors import KvRelayError

if TYPE_CHECKING:
    from collections.abc import Collection

    from kvrelay.router.core.fleet import Engine
    from kvrelay.router.engines import Engines

WAIT_S = 0.5
"""For an engine's answer; a slower one is as it was when it last answered. Kubernetes waits 1 s for ours."""
TIMEOUT_S = 5.0
"""After which an engine is not well."""


class HealthChecks:
    """Asks engines, and remembers what they said."""

    def __init__(self, engines: Engines) -> None:
        """Nobody has been asked yet."""
        self._engines = engines
        self._running: dict[Engine, asyncio.Task[None]] = {}
        self._problems: dict[Engine, str] = {}

    async def problem(self, engine: Engine) -> str:
        """What is wrong with it; empty if nothing is."""
        task = self._running.get(engine)
        if task is None:
            self._running[engine] = task = asyncio.create_task(self._ask(engine))
        await asyncio.wait({task}, timeout=WAIT_S)
        return self._problems.get(engine, f"no answer within {WAIT_S:g} s")

    def forget_all_but(self, engines: Collection[Engine]) -> None:
        """The others are gone."""
        for engine in [engine for engine in self._problems if engine not in engines]:
            del self._problems[engine]

    def close(self) -> None:
        """Ask no longer."""
        for task in self._running.values():
            task.cancel()

    async def _ask(self, engine: Engine) -> None:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                status = await self._engines.probe(engine, "/health", timeout_s=TIMEOUT_S)
            self._problems[engine] = "" if status == 200 else f"/health answers {status}"
        except KvRelayError as error:
            self._problems[engine] = str(error)
        except TimeoutError:
            self._problems[engine] = f"no answer within {TIMEOUT_S:g} s"
        finally:
            del self._running[engine]
