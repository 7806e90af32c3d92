"""Asks engines which models they serve: when a request names a model and what is known is old, or lacks it.

Where there is one engine of each role there is nothing to choose, and nobody is asked. The question bears the
client's own key, since the engines may want one.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kvrelay.router.core.models import NO_STRANGERS, list_of, read_cards, strangers
from kvrelay.router.errors import EngineError

if TYPE_CHECKING:
    from msgspec import Raw

    from kvrelay.router.core.fleet import Engine
    from kvrelay.router.core.models import Strangers
    from kvrelay.router.engines import Engines
    from kvrelay.router.http.messages import Headers, Request

PATH = "/v1/models"
WAIT_S = 1.0
"""A request, or a list of models, waits no longer for engines to say what they serve."""
TIMEOUT_S = 5.0
OLD_S, MISSING_S = 30.0, 1.0
"""What is known is asked for again when it is so old; where it lacks the model that is wanted, so old."""


class Catalogue:
    """What each engine serves, as far as is known."""

    def __init__(self, engines: Engines) -> None:
        """Nobody has been asked yet."""
        self._engines = engines
        self._known: dict[Engine, frozenset[str]] = {}
        self._asked_at: float | None = None
        self._asking: asyncio.Task[None] | None = None

    async def strangers(self, model: str, request: Request) -> Strangers:
        """The engines not to be asked for ``model``. ``request``: whose key the engines get to see."""
        engines = self._engines
        if not model or max(len(engines.prefills), len(engines.decodes)) < 2:
            return NO_STRANGERS
        age_s = self._age_s
        if age_s is None:
            await self._wait(request)
        elif age_s > OLD_S:
            self._ask(request)
        found = strangers(model, engines.prefills, engines.decodes, self._known)
        if found is None and age_s is not None and age_s > MISSING_S:
            await self._wait(request)
            found = strangers(model, engines.prefills, engines.decodes, self._known)
        return NO_STRANGERS if found is None else found

    async def listed(self, request: Request) -> bytes | None:
        """The list of all models there are; None if no engine says anything."""
        asked = {engine: asyncio.create_task(self._fetch(engine, request)) for engine in self._in_order}
        try:
            await asyncio.wait(asked.values(), timeout=WAIT_S)
            said = [task.result() for task in asked.values() if task.done()]
        finally:
            for task in asked.values():
                task.cancel()
        answers = [cards for cards in said if cards is not None]
        return list_of(answers) if answers else None

    def close(self) -> None:
        """Ask no longer."""
        if self._asking is not None:
            self._asking.cancel()

    @property
    def _in_order(self) -> tuple[Engine, ...]:
        return tuple(self._engines.decodes) + tuple(self._engines.prefills)

    @property
    def _age_s(self) -> float | None:
        return None if self._asked_at is None else asyncio.get_running_loop().time() - self._asked_at

    async def _wait(self, request: Request) -> None:
        await asyncio.wait({self._ask(request)}, timeout=WAIT_S)

    def _ask(self, request: Request) -> asyncio.Task[None]:
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask_all(request))
        return self._asking

    async def _ask_all(self, request: Request) -> None:
        engines = self._in_order
        said = await asyncio.gather(*(self._fetch(engine, request) for engine in engines))
        for engine, cards in zip(engines, said, strict=True):
            if cards is not None:
                self._known[engine] = frozenset(cards)
        self._known = {engine: names for engine, names in self._known.items() if engine in engines}
        self._asked_at = asyncio.get_running_loop().time()

    async def _fetch(self, engine: Engine, request: Request) -> dict[str, Raw] | None:
        try:
            status, body = await self._engines.exchange(engine, PATH, key_of(request), timeout_s=TIMEOUT_S)
        except EngineError:
            return None
        return read_cards(body) if status == 200 else None


def key_of(request: Request) -> Headers:
    """The headers by which an engine knows a client."""
    return [header for header in request.headers if header[0] in {b"authorization", b"x-api-key"}]
