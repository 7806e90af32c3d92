"""What engines add to requests by themselves, asked of them in the background and remembered for a while."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from kvrelay.router.core.engine_defaults import Said, ask_defaults
from kvrelay.router.errors import EngineError, EngineSilentError

if TYPE_CHECKING:
    from kvrelay.router.core.engine_defaults import Defaults
    from kvrelay.router.core.fleet import Engine
    from kvrelay.router.engines import Engines
    from kvrelay.router.http.messages import Headers

logger = logging.getLogger(__name__)

FRESH_S = 30.0
"""So long nothing is asked again; after it, what is known counts until the next answer is there."""
SLOW_S = 1.0
"""So long nothing is asked again of an engine that did not answer in time."""
ANSWER_S = 5.0
MAX_MODELS = 256
"""Engines times models that are remembered: clients name models, and may name any."""
MAX_NAME_CHARS = 256
"""Longer names are nobody's models."""


class _KeyRefusedError(Exception):
    """A client's key is none of the engine's: that says nothing about the engine."""


class _Known(Struct):
    defaults: Defaults | None
    until: float
    """Loop time."""


class EngineDefaults:
    """Knows what it was asked about before. Made and used in one event loop."""

    def __init__(self, engines: Engines) -> None:
        """Asks nothing yet."""
        self._engines = engines
        self._known: dict[tuple[Engine, str], _Known] = {}
        self._asking: dict[tuple[Engine, str], asyncio.Task[None]] = {}
        self._hidden: set[Engine] = set()
        """Engines of which it was said that they show nothing."""

    def known(self, engine: Engine, model: str, headers: Headers) -> Defaults | None:
        """What ``engine`` adds for ``model``; None if that is not known, or not known yet: then it is asked.

        ``headers``: by which engines know the client.
        """
        if len(model) > MAX_NAME_CHARS:
            return None
        key = (engine, model)
        found = self._known.get(key)
        stale = found is None or asyncio.get_running_loop().time() >= found.until
        if stale and key not in self._asking and len(self._asking) < MAX_MODELS:
            self._asking[key] = asyncio.create_task(self._ask(engine, model, headers))
        return found.defaults if found is not None else None

    async def close(self) -> None:
        """Stop asking."""
        tasks = set(self._asking.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _ask(self, engine: Engine, model: str, headers: Headers) -> None:
        key = (engine, model)
        try:
            defaults: Defaults | None = None
            fresh_s = FRESH_S
            try:
                async with asyncio.timeout(ANSWER_S):
                    defaults = await self._interview(engine, model, headers)
            except (TimeoutError, EngineSilentError):  # it is slow, not another: what is known counts on
                known = self._known.get(key)
                defaults, fresh_s = known.defaults if known is not None else None, SLOW_S
            except (EngineError, msgspec.MsgspecError, ValueError) as error:
                logger.debug("%s does not tell its defaults: %s", engine.name, error)
            except _KeyRefusedError:
                return
            self._known.pop(key, None)
            self._known[key] = _Known(defaults, asyncio.get_running_loop().time() + fresh_s)
            while len(self._known) > MAX_MODELS:
                del self._known[next(iter(self._known))]
        finally:
            del self._asking[key]

    async def _interview(self, engine: Engine, model: str, headers: Headers) -> Defaults | None:
        asking = ask_defaults(model)
        question = next(asking)
        while True:
            status, body = await self._engines.exchange(
                engine, question.path, headers, timeout_s=ANSWER_S, body=question.body
            )
            if status == 401:
                raise _KeyRefusedError
            if status == 403 and engine not in self._hidden:
                self._hidden.add(engine)
                logger.warning(
                    "%s does not show what it adds to requests (%s: 403): start vLLM with --enable-scale-out, "
                    "or leave out --first-token and --tokenise", engine.name, question.path,
                )  # fmt: skip
            try:
                question = asking.send(Said(status, body))
            except StopIteration as end:
                defaults: Defaults | None = end.value
                return defaults
