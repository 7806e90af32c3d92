"""The time a request may take as a whole. When it is over everything done for the request is cancelled."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kvrelay.router.core.answers import Refusal

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from typing import Any

    from kvrelay.router.http.reply import Reply


async def within(limit_s: float, work: Coroutine[Any, Any, str], reply: Reply) -> str:
    """Do ``work``, which answers with ``reply``, in ``limit_s`` seconds (0: any time). The outcome."""
    if not limit_s:
        return await work
    try:
        async with asyncio.timeout(limit_s) as scope:
            return await work
    except TimeoutError:
        if not scope.expired():
            raise
        reply.break_off(Refusal(504, "deadline", f"The request was not done within its {limit_s:g} s"))
        return "error"
