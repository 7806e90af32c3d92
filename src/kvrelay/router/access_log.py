"""The access log's file: lines are handed to a thread of its own in batches, so that no disk is ever waited for.

Between the two is a bounded buffer. What does not fit, since the disk (or who reads standard output) is too slow, is
dropped and counted; so are lines that cannot be written.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import threading
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Self

from kvrelay.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

FLUSH_S = 0.1
"""Lines wait no longer than this to be handed over, if the thread is free."""
FLUSH_BYTES = 64 << 10
"""That many are handed over at once."""
MAX_BYTES = 8 << 20
"""Of lines that wait."""
CLOSE_TIMEOUT_S = 2.0
STDOUT = "-"
_REOPEN, _END = b"reopen", b""


class AccessLog:
    """Lines to a file, or to standard output. Belongs to one event loop."""

    def __init__(self, path: str, file: int, dropped: Callable[[int], None], max_bytes: int) -> None:
        """See `open`."""
        self._path = path
        self._file = file
        self._dropped = dropped
        self._max_bytes = max_bytes
        self._loop = asyncio.get_running_loop()
        self._lines: list[bytes] = []
        self._size = 0
        self._timer: asyncio.TimerHandle | None = None
        self._queue: SimpleQueue[bytes] = SimpleQueue()
        self._writing = 0
        """Bytes that are with the thread."""
        self._complained = False
        self._thread = threading.Thread(target=self._work, name="kvrelay-access-log", daemon=True)

    @classmethod
    async def open(cls, path: str, dropped: Callable[[int], None], *, max_bytes: int = MAX_BYTES) -> Self:
        """Begin to write to ``path``, or `STDOUT`. ``dropped`` counts lines.

        Raises:
            ConfigError: the file cannot be opened for writing.
        """
        try:
            file = await asyncio.to_thread(_open, path)
        except OSError as error:
            raise ConfigError(_not_written(path, error.strerror or str(error))) from None
        log = cls(path, file, dropped, max_bytes)
        await asyncio.to_thread(log._thread.start)
        return log

    def write(self, line: bytes) -> None:
        """One line, with its end."""
        if self._size + self._writing + len(line) > self._max_bytes:
            self._dropped(1)
            return
        self._lines.append(line)
        self._size += len(line)
        if self._size >= FLUSH_BYTES and not self._writing:
            self._hand_over()
        elif self._timer is None:
            self._timer = self._loop.call_later(FLUSH_S, self._on_timer)

    def reopen(self) -> None:
        """Go on in a file of that name: the old one has been renamed."""
        self._hand_over()
        self._queue.put(_REOPEN)

    async def close(self) -> None:
        """Write what waits, within a bounded time."""
        if self._timer is not None:
            self._timer.cancel()
        self._hand_over()
        self._queue.put(_END)
        await asyncio.to_thread(self._thread.join, CLOSE_TIMEOUT_S)

    def _on_timer(self) -> None:
        self._timer = None
        if self._writing:
            self._timer = self._loop.call_later(FLUSH_S, self._on_timer)
        else:
            self._hand_over()

    def _hand_over(self) -> None:
        if self._lines:
            batch = b"".join(self._lines)
            self._lines.clear()
            self._size, self._writing = 0, self._writing + len(batch)
            self._queue.put(batch)

    # --- in the thread ---

    def _work(self) -> None:
        while (batch := self._queue.get()) != _END:
            if batch == _REOPEN:
                self._reopen()
                continue
            try:
                self._write_all(batch)
            except OSError as error:
                self._failed(error)
            finally:
                self._in_loop(self._wrote, len(batch))
        os.close(self._file)

    def _write_all(self, batch: bytes) -> None:
        left = memoryview(batch)
        try:
            while left:
                left = left[os.write(self._file, left) :]
        except OSError:
            self._in_loop(self._dropped, max(1, bytes(left).count(b"\n")))
            raise
        self._complained = False

    def _reopen(self) -> None:
        try:
            opened = _open(self._path)
        except OSError as error:
            logger.warning("--access-log %s cannot be opened again, the old file is kept: %s", self._path, error)
            return
        os.close(self._file)
        self._file = opened

    def _failed(self, error: OSError) -> None:
        if not self._complained:
            self._complained = True
            logger.warning("--access-log %s: lines are dropped: %s", self._path, error)

    def _in_loop(self, call: Callable[[int], None], number: int) -> None:
        with suppress(RuntimeError):  # the loop is closed: the disk took longer than the end of the router
            self._loop.call_soon_threadsafe(call, number)

    def _wrote(self, size: int) -> None:
        self._writing -= size


def writing_problem(path: str) -> str:
    """Why a log cannot be written there, as far as can be known without beginning it; empty if it can."""
    file = Path(path)
    try:
        there = file if file.exists() else file.parent
    except OSError as error:
        return _not_written(path, error.strerror or str(error))
    if path == STDOUT or (there.exists() and not file.is_dir() and os.access(there, os.W_OK)):
        return ""
    number = errno.ENOENT if not there.exists() else errno.EISDIR if file.is_dir() else errno.EACCES
    return _not_written(path, os.strerror(number))


def _not_written(path: str, why: str) -> str:
    return f"--access-log {path} cannot be written: {why}"


def _open(path: str) -> int:
    if path == STDOUT:
        return os.dup(1)
    return os.open(Path(path), os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)
