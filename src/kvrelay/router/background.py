"""Background work that must not end: a bug in it is told of, and it is begun again."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

logger = logging.getLogger(__name__)

AGAIN_S = 1.0


async def keep_running(work: Callable[[], Awaitable[None]], what: str) -> None:
    """Do ``work`` until it ends by itself. ``what`` it is, for the log."""
    while True:
        try:
            await work()
        except Exception:
            logger.exception("a bug ended %s: begun again in %g s", what, AGAIN_S)
            await asyncio.sleep(AGAIN_S)
        else:
            return
