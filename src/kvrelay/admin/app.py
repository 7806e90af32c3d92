"""What every admin API begins with: its description, errors in one form, and probes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import APIRouter, FastAPI, HTTPException
from pydantic import Field

from kvrelay import __version__
from kvrelay.admin.answers import Model, Refused, tell_errors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvrelay.admin.bridge import Bridge


class Health(Model):
    """A probe's answer, where it is a good one."""

    status: str = Field(description="ok")


def new_app(who: str, description: str, refusals: Iterable[int]) -> FastAPI:
    """An API without routes. ``who`` is described; ``refusals``: the HTTP statuses of its errors."""
    app = FastAPI(
        title=f"kvrelay {who} admin API",
        version=__version__,
        description=description,
        docs_url=None,
        redoc_url=None,
        responses={status: {"model": Refused} for status in refusals},
    )
    tell_errors(app)
    return app


def probes(bridge: Bridge, draining: Callable[[], bool], *, ready: str, refusal: str) -> APIRouter:
    """Routes for probes, which have no token: they learn nothing but this.

    ``draining`` is asked in the working loop. ``ready`` describes the route that it decides, ``refusal`` is its 503's
    message.
    """
    router = APIRouter(tags=["probes"])

    @router.get("/health")
    async def health() -> Health:
        """Whether the working loop answers."""
        await bridge.call(lambda: None)
        return Health(status="ok")

    @router.get("/ready", description=ready)
    async def is_ready() -> Health:
        if await bridge.call(draining):
            raise HTTPException(503, refusal)
        return Health(status="ok")

    return router
