"""Running a plan on this machine: start in order, watch, stop in reverse order, leave nothing behind."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
import time
from typing import TYPE_CHECKING

from kvrelay.errors import DeadlineError
from kvrelay.launch.child import Child
from kvrelay.launch.core.failures import ProcessDiedError, describe_status
from kvrelay.launch.core.logs import causes, last_words
from kvrelay.launch.readiness import until_ready

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from kvrelay.launch.core.plan import Plan, ProcessSpec

TAIL_LINES = 20
MOST_CAUSES = 2
PROGRESS_S = 10.0
UNREADY_GRACE_S = 3.0
"""A stack that never served has nothing to finish; vLLM does not hear SIGTERM while it starts."""
STATE_FILE = "stack.json"


class Stack:
    """The processes of one plan."""

    def __init__(self, plan: Plan, run_dir: Path, report: Callable[[str], None]) -> None:
        """``run_dir``: an existing directory for logs and the state file. ``report``: told one line at a time."""
        self.plan = plan
        self._run_dir = run_dir
        self._report = report
        self._children: dict[str, Child] = {}
        self._mourned: set[Child] = set()
        """Those whose end was reported."""
        self._ready = False
        self._began = time.monotonic()

    async def start_stage(self, stage: int, deadline: float) -> None:
        """Start the processes of one stage and wait until all are ready.

        ``deadline``: on the clock of `time.monotonic`. Raises `DeadlineError` naming what is not ready,
        `ProcessDiedError` as soon as anything started so far ends, and `ConfigError` when others share a port.
        """
        specs = [spec for spec in self.plan.processes if spec.stage == stage]
        await self._start(specs)
        await self._wait_ready(specs, deadline)

    def mark_ready(self) -> None:
        """Note in the state file that everything was ready once."""
        self._ready = True
        self._save_state()

    async def revive(self, deadline: float) -> None:
        """Start again what has ended, and wait until it is ready. Raises as `start_stage` does."""
        dead = [child for child in self._children.values() if child.ended.is_set()]
        self._mourned.difference_update(dead)
        for child in dead:
            await child.stop(math.inf)
        specs = sorted((child.spec for child in dead), key=lambda spec: spec.stage)
        for _, together in itertools.groupby(specs, key=lambda spec: spec.stage):
            stage = list(together)
            await self._start(stage)
            await self._wait_ready(stage, deadline)

    async def next_death(self) -> Child:
        """Wait for a process to end that nobody asked to end; each is reported, and returned, once."""
        child = await _first_to_end(child for child in self._children.values() if child not in self._mourned)
        self._mourn(child)
        self._save_state()
        return child

    def can_serve(self) -> bool:
        """Whether requests can still be answered: the router, if there is one, and a decode engine live."""
        living = {child.spec.role for child in self._children.values() if not child.ended.is_set()}
        needed = {spec.role for spec in self.plan.processes} & {"router", "decode"}
        return needed <= living

    async def stop(self) -> None:
        """Stop everything, the highest stage first. Returns when nothing is left."""
        for stage in sorted({child.spec.stage for child in self._children.values()}, reverse=True):
            children = [child for child in self._children.values() if child.spec.stage == stage]
            running = [child.spec.name for child in children if not child.ended.is_set()]
            if running:
                self._say(f"stopping {', '.join(running)}")
            grace_s = math.inf if self._ready else UNREADY_GRACE_S
            await asyncio.gather(*(child.stop(grace_s) for child in children))
        self._children.clear()

    def kill(self) -> None:
        """SIGKILL to everything, now. `stop` still has to be awaited."""
        for child in self._children.values():
            child.kill()

    async def _start(self, specs: Iterable[ProcessSpec]) -> None:
        for spec in specs:
            self._children[spec.name] = await Child.start(spec, self._run_dir / f"{spec.name}.log")
            self._say(f"{spec.name} starting")

    async def _wait_ready(self, specs: Iterable[ProcessSpec], deadline: float) -> None:
        waiting: dict[asyncio.Task[None], ProcessSpec] = {
            asyncio.create_task(until_ready(spec.readiness, self._leader_of(spec)), name=spec.name): spec
            for spec in specs
        }
        death = asyncio.create_task(
            _first_to_end(child for child in self._children.values() if child not in self._mourned)
        )
        try:
            while waiting:
                left = deadline - time.monotonic()
                done, _ = await asyncio.wait(
                    (*waiting, death), timeout=max(min(left, PROGRESS_S), 0), return_when=asyncio.FIRST_COMPLETED
                )
                if death in done:
                    raise self._died(death.result())
                for ready in [task for task in waiting if task in done]:
                    spec = waiting.pop(ready)
                    ready.result()
                    self._say(f"{spec.name} ready" + (f" at {spec.url}" if spec.url else ""))
                if waiting and time.monotonic() >= deadline:
                    raise self._late([spec.name for spec in waiting.values()])
                if not done:
                    self._say(f"waiting for {', '.join(spec.name for spec in waiting.values())}")
        finally:
            unfinished = (*waiting, death)
            for pending in unfinished:
                pending.cancel()
            await asyncio.gather(*unfinished, return_exceptions=True)
        self._save_state()

    def _leader_of(self, spec: ProcessSpec) -> Callable[[], int | None]:
        """Tells the process id of its child, which begins a session; None until it is known."""
        child = self._children[spec.name]
        return lambda: child.pid

    def _mourn(self, child: Child) -> None:
        """Report how a process ended and its last lines of output."""
        assert child.status is not None
        self._mourned.add(child)
        self._say(f"{child.spec.name} ended with {describe_status(child.status)}; last lines of {child.log_path}:")
        self._show_tail(child)

    def _died(self, child: Child) -> ProcessDiedError:
        self._mourn(child)
        assert child.status is not None
        return ProcessDiedError(f"{child.spec.name} ended with {describe_status(child.status)} before all was ready")

    def _late(self, names: list[str]) -> DeadlineError:
        for name in names:
            self._say(f"{name} is not ready; last lines of {self._children[name].log_path}:")
            self._show_tail(self._children[name])
        verb = "is" if len(names) == 1 else "are"
        return DeadlineError(
            f"{', '.join(names)} {verb} not ready after {time.monotonic() - self._began:.0f} s; raise --ready-timeout "
            "if the log shows progress"
        )

    def _show_tail(self, child: Child) -> None:
        lines = child.log()
        for line in last_words(lines, TAIL_LINES) or ["(no output)"]:
            self._report(f"    {line}")
        for cause in causes(lines, MOST_CAUSES):
            self._report(f"{child.spec.name}: {cause}")

    def _say(self, text: str) -> None:
        self._report(f"[{time.monotonic() - self._began:6.1f} s] {text}")

    def _save_state(self) -> None:
        """Write who runs where, for whoever wants to look (atomically: a reader never sees half of it)."""
        state = {
            "launcher": os.getpid(),
            "ready": self._ready,
            "endpoint": self.plan.endpoint,
            "pool": next(iter(self.plan.pools.values()), None),
            "pools": dict(self.plan.pools),
            "model": self.plan.model_name,
            "processes": {
                name: {
                    "role": child.spec.role,
                    "pid": child.pid,
                    "status": child.status,
                    "url": child.spec.url,
                    "log": str(child.log_path),
                }
                for name, child in self._children.items()
            },
        }
        scratch = self._run_dir / f".{STATE_FILE}"
        scratch.write_text(json.dumps(state, indent=1))
        scratch.replace(self._run_dir / STATE_FILE)


async def _first_to_end(children: Iterable[Child]) -> Child:
    """The first of ``children`` to end; for ever when there is none."""
    tasks = {asyncio.create_task(child.ended.wait()): child for child in children if not child.stopping}
    try:
        if not tasks:
            await asyncio.Event().wait()
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return tasks[next(iter(done))]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
