"""Readings of the configuration that come close together: by SIGHUP, and by the admin API."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, cast

import pytest

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
        self.worker_sync = Alone()
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


@pytest.mark.parametrize("first", ["SIGHUP", "API"])
@pytest.mark.parametrize("second", ["SIGHUP", "API"])
async def test_what_was_read_first_does_not_replace_what_was_read_last(first: str, second: str) -> None:
    """1. The file is read, and that takes a while. 2. The file changes. 3. It is read again, in no time."""
    file, slow, checked = ["old"], threading.Event(), threading.Event()

    def read() -> RouterConfig:
        said = file[0]
        if said == "old":
            slow.set()
            checked.wait(0.2)  # unless the second reading is over before
        else:
            checked.set()
        return cast("RouterConfig", said)

    service = Service()
    serving = Serving(None, cast("RouterService", service), read)

    async def ask(how: str) -> None:
        if how == "SIGHUP":
            serving.on_hangup()
        else:
            await serving.reload()

    async with asyncio.timeout(10), asyncio.TaskGroup() as asking:
        asking.create_task(ask(first))
        assert await asyncio.to_thread(slow.wait, 10)
        file[0] = "new"
        asking.create_task(ask(second))
        await service.last.wait()
    assert service.applied == ["old", "new"]
