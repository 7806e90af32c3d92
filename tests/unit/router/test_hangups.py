"""SIGHUPs that come close together."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, cast

from kvrelay.router.admin.serving import Serving

if TYPE_CHECKING:
    from kvrelay.router.config import RouterConfig
    from kvrelay.router.service import RouterService


class Alone:
    """No other workers."""

    leads = True


class Service:
    """A router that notes what it is told."""

    def __init__(self) -> None:
        self.concert = Alone()
        self.applied: list[str] = []
        self.last = asyncio.Event()

    def reopen_logs(self) -> None:
        """Nothing to be seen here."""

    async def reload_entrance(self) -> None:
        """Nothing to be seen here either."""

    def apply(self, config: str) -> None:
        self.applied.append(config)
        if len(self.applied) == 2:
            self.last.set()


async def test_what_was_read_first_does_not_replace_what_was_read_last() -> None:
    """1. SIGHUP: the file is read, and takes a while. 2. The file changes. 3. SIGHUP again: it is read in no time."""
    file, slow, checked = ["old"], threading.Event(), threading.Event()

    def read() -> str:
        said = file[0]
        if said == "old":
            slow.set()
            checked.wait(0.2)  # unless the second reading is over before
        else:
            checked.set()
        return said

    service = Service()
    serving = Serving(
        None, cast("RouterService", service), lambda: cast("RouterConfig", read())
    )  # fmt: skip
    serving.on_hangup()
    assert await asyncio.to_thread(slow.wait, 10)
    file[0] = "new"
    serving.on_hangup()
    async with asyncio.timeout(10):
        await service.last.wait()
    assert service.applied == ["old", "new"]
