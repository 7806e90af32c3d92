"""One run of ``kvrelay up``: from settings to a service that serves, and back to nothing."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import time
from typing import TYPE_CHECKING

from kvrelay.client.token import read_token
from kvrelay.errors import KvRelayError
from kvrelay.launch.core import compat
from kvrelay.launch.core.failures import ProcessDiedError, describe_status
from kvrelay.launch.core.plan import ENGINE_STAGE

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvrelay.launch.core.plan import Plan
    from kvrelay.launch.core.settings import UpSettings
    from kvrelay.launch.local import Stack
    from kvrelay.wire.messages import Engine

REGISTER_S = 10.0
"""How long an engine that answers may take to appear in the pool's list."""
POLL_S = 0.25
INTERRUPTED = 130


class Service:
    """Runs a stack until it is told to stop or cannot serve any more.

    SIGINT, SIGTERM and SIGHUP stop it; a second SIGINT kills what is still ending. SIGUSR1 starts again what has died.
    """

    def __init__(self, settings: UpSettings, stack: Stack, report: Callable[[str], None]) -> None:
        """``report``: told one line at a time."""
        self._settings = settings
        self._stack = stack
        self._report = report
        self._told_to_stop = asyncio.Event()
        self._told_to_revive = asyncio.Event()
        self._exit_status = 0

    async def run(self, on_ready: Callable[[], None]) -> int:
        """Start, serve, stop. Returns the exit status; raises what made the service fail, after all has stopped."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self._interrupt)
        loop.add_signal_handler(signal.SIGTERM, self._told_to_stop.set)
        loop.add_signal_handler(signal.SIGHUP, self._told_to_stop.set)
        loop.add_signal_handler(signal.SIGUSR1, self._told_to_revive.set)
        work = asyncio.create_task(self._work(on_ready), name="work")
        stop = asyncio.create_task(self._told_to_stop.wait(), name="stop")
        try:
            await asyncio.wait((work, stop), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (work, stop):
                task.cancel()
            await asyncio.wait((work, stop))
            await self._stack.stop()
        if not work.cancelled():
            work.result()
        return self._exit_status

    def _interrupt(self) -> None:
        if self._told_to_stop.is_set():
            self._report("interrupted again: killing what is left")
            self._stack.kill()
        self._exit_status = INTERRUPTED
        self._told_to_stop.set()

    async def _work(self, on_ready: Callable[[], None]) -> None:
        deadline = time.monotonic() + self._settings.ready_timeout_s
        for stage in sorted({spec.stage for spec in self._stack.plan.processes}):
            await self._stack.start_stage(stage, deadline)
            if stage == ENGINE_STAGE and self._stack.plan.pools:
                token_file = self._settings.pool.token_file
                await check_registered(self._stack.plan, read_token(str(token_file) if token_file else None))
        self._stack.mark_ready()
        on_ready()
        await self._watch()

    async def _watch(self) -> None:
        """Judge every death and start again on demand; returns only by raising."""
        while True:
            revival = asyncio.create_task(self._told_to_revive.wait(), name="revival")
            death = asyncio.create_task(self._stack.next_death(), name="death")
            try:
                await asyncio.wait((revival, death), return_when=asyncio.FIRST_COMPLETED)
            finally:
                revival.cancel()
                death.cancel()
            if death.done():
                child = death.result()
                self._judge(child.spec.name, child.status or 0)
            if revival.done():
                self._told_to_revive.clear()
                await self._revive()

    def _judge(self, name: str, status: int) -> None:
        """Go on without a process, or give up."""
        if not self._may_go_on():
            raise ProcessDiedError(f"{name} ended with {describe_status(status)}")
        self._report(f"going on without {name}; start it again with: kill -USR1 {os.getpid()}")

    def _may_go_on(self) -> bool:
        on_exit = self._settings.on_exit
        return on_exit == "wait" or (on_exit == "keep" and self._stack.can_serve())

    async def _revive(self) -> None:
        try:
            await self._stack.revive(time.monotonic() + self._settings.ready_timeout_s)
        except KvRelayError as error:
            if not self._may_go_on():
                raise
            self._report(f"not started again: {error}")
        else:
            self._report("all processes run")


async def check_registered(plan: Plan, token: str | None) -> None:
    """Raise `ConfigError` unless every engine of the plan registered with the pool and all can exchange KV."""
    from kvrelay.client.aio import AsyncPoolClient

    for owner, address in plan.pools.items():
        expected = plan.registered_at(owner)
        async with await AsyncPoolClient.connect(address, name="kvrelay up", token=token, map_arena=False) as client:
            deadline = time.monotonic() + REGISTER_S
            engines: list[Engine] = await client.engines()
            while not set(expected) <= {engine.engine for engine in engines} and time.monotonic() < deadline:
                await asyncio.sleep(POLL_S)
                engines = await client.engines()
        compat.check(expected, engines)


def curl_line(plan: Plan, *, keys: bool = False) -> str:
    """A command that asks the service something; with ``keys`` as who has put one of them into ``KEY``."""
    question = '[{"role": "user", "content": "What is the capital of France?"}]'
    body = f'{{"model": "{plan.model_name}", "messages": {question}, "max_tokens": 32, "temperature": 0}}'
    url = f"{plan.endpoint}/v1/chat/completions"
    key = ' -H "Authorization: Bearer $KEY"' if keys else ""
    return f"curl {url}{key} -H 'Content-Type: application/json' -d {shlex.quote(body)}"
