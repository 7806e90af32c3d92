"""One running process of the plan, seen through its guard."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from typing import TYPE_CHECKING

from kvrelay.launch import kernel

if TYPE_CHECKING:
    from pathlib import Path

    from kvrelay.launch.core.plan import ProcessSpec

GUARD_EXTRA_S = 10.0
"""How much longer than the child's own grace its guard may take before its session is killed from here."""
TAIL_BYTES = 1 << 18


class Child:
    """A started process. Made by `start`."""

    def __init__(self, spec: ProcessSpec, log_path: Path, guard: asyncio.subprocess.Process) -> None:
        """``log_path``: where its output goes."""
        self.spec = spec
        self.log_path = log_path
        self.pid: int | None = None
        self.status: int | None = None
        """How it ended: an exit status, or minus a signal's number; None while it runs."""
        self.ended = asyncio.Event()
        """Set as soon as it has ended; processes it left behind may still be ending."""
        self.stopping = False
        """Whether we asked it to end."""
        self._guard = guard
        self._watcher = asyncio.create_task(self._watch(), name=f"watch {spec.name}")

    @classmethod
    async def start(cls, spec: ProcessSpec, log_path: Path) -> Child:
        """Start the guard of ``spec``, which starts the process. Its output is appended to ``log_path``."""
        log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            guard = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "kvrelay.launch.guard", str(spec.grace_s), "--", *spec.argv),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=dict(spec.env),
                start_new_session=True,
            )
        finally:
            os.close(log)
        return cls(spec, log_path, guard)

    async def stop(self, grace_s: float) -> None:
        """SIGTERM, at most ``grace_s`` or its own grace, SIGKILL to whatever is left. Returns when all is gone."""
        self.stopping = True
        self._tell(b"t")
        if grace_s < self.spec.grace_s:
            await asyncio.wait((self._watcher,), timeout=grace_s)
            self._tell(b"k")
        try:
            async with asyncio.timeout(self.spec.grace_s + GUARD_EXTRA_S):
                await asyncio.shield(self._watcher)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._guard.kill()
            await self._watcher

    def kill(self) -> None:
        """SIGKILL to it and everything below it, now. `stop` still has to be awaited."""
        self.stopping = True
        self._tell(b"k")

    def log(self) -> list[str]:
        """The end of its output, in lines."""
        with contextlib.suppress(OSError), self.log_path.open("rb") as log:
            log.seek(max(log.seek(0, os.SEEK_END) - TAIL_BYTES, 0))
            return log.read().decode(errors="replace").splitlines()
        return []

    def _tell(self, command: bytes) -> None:
        assert self._guard.stdin is not None
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._guard.stdin.write(command)

    async def _watch(self) -> None:
        assert self._guard.stdout is not None
        async for line in self._guard.stdout:
            event = json.loads(line)
            self.pid = event.get("pid", self.pid)
            if "status" in event:
                self._note_end(event["status"])
        status = await self._guard.wait()
        if self.status is None:
            # The guard was killed, or could not run: its child died with it, what that started may not have.
            if self.pid:
                kernel.signal_each(kernel.session_members(self.pid), signal.SIGKILL)
            self._note_end(status)
        assert self._guard.stdin is not None
        self._guard.stdin.close()

    def _note_end(self, status: int) -> None:
        self.status = status
        self.ended.set()
