"""Finds the decode engine that holds a stored response: by its name, else by asking all."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING

from kvrelay.router.core.stored_responses import holder_of, unknown_whereabouts
from kvrelay.router.errors import EngineError
from kvrelay.router.models import key_of

if TYPE_CHECKING:
    from kvrelay.router.core.answers import Refusal
    from kvrelay.router.core.fleet import Engine
    from kvrelay.router.engines import Engines
    from kvrelay.router.http.messages import Request

TIMEOUT_S = 5.0
_NAME = re.compile(r"[A-Za-z0-9_-]{1,256}")


async def find_holder(engines: Engines, name: str, request: Request) -> Engine | Refusal | None:
    """Who holds the response ``name``; None if nobody does. A refusal if those who may hold it cannot be asked.

    ``request``: whose key the engines get to see.
    """
    decodes = tuple(engines.decodes)
    if len(decodes) == 1:
        return decodes[0]
    if (holder := holder_of(name, decodes)) is not None:
        return holder
    if _NAME.fullmatch(name) is None:
        return None
    said = await asyncio.gather(*(_has(engines, engine, name, request) for engine in decodes))
    silent = [engine for engine, has in zip(decodes, said, strict=True) if has is None]
    for engine, has in zip(decodes, said, strict=True):
        if has:
            return engine
    return unknown_whereabouts(name, silent) if silent else None


async def _has(engines: Engines, engine: Engine, name: str, request: Request) -> bool | None:
    """Whether it has the response; None if it does not say."""
    try:
        status, _ = await engines.exchange(engine, f"/v1/responses/{name}", key_of(request), timeout_s=TIMEOUT_S)
    except EngineError:
        return None
    return None if status >= 500 else status == 200
