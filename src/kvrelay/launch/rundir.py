"""The directory of one run: logs, sockets, the state file."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from kvrelay.errors import ConfigError
from kvrelay.launch.core.plan import LONGEST_SOCKET, MAX_SOCKET_PATH
from kvrelay.launch.local import STATE_FILE

if TYPE_CHECKING:
    from collections.abc import Sequence

LOCK_FILE = "lock"
IPC_DIR = "ipc"
LONGEST_RUN_DIR = MAX_SOCKET_PATH - LONGEST_SOCKET


class RunDir:
    """A run's directory, locked against a second launcher. Only what a run puts there is ever removed."""

    def __init__(self, path: Path | None) -> None:
        """``path``: as the user asked; None for a fresh one below XDG_STATE_HOME, or /tmp when that path is too long.

        Raises `ConfigError` when it cannot be made or another launcher uses it.
        """
        self._folders: list[Path] = []
        try:
            self.path = chosen = _fresh() if path is None else path.absolute()
        except OSError as error:
            raise ConfigError(f"no directory for this run: {error}; choose a writable --run-dir") from None
        try:
            self._created = path is None or not chosen.exists()
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = (self.path / LOCK_FILE).open("w")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            (self.path / IPC_DIR).mkdir(mode=0o700, exist_ok=True)
        except BlockingIOError:
            raise ConfigError(f"run_dir = {chosen}: another `kvrelay up` uses it; choose another --run-dir") from None
        except OSError as error:
            raise ConfigError(f"run_dir = {chosen}: {error.strerror}; choose a writable --run-dir") from None

    def make(self, folders: Sequence[str]) -> None:
        """Make folders for what the run keeps; `clean` removes them."""
        self._folders = [Path(folder) for folder in folders]
        for folder in self._folders:
            folder.mkdir(mode=0o700, exist_ok=True)

    def clean(self, names: list[str], *, keep_logs: bool) -> None:
        """Remove what the run left: sockets, state, folders, and the logs of ``names`` unless they are to be kept."""
        for folder in (self.path / IPC_DIR, *self._folders):
            shutil.rmtree(folder, ignore_errors=True)
        leftovers = [STATE_FILE, LOCK_FILE]
        leftovers += [] if keep_logs else [f"{name}.log" for name in names]
        for name in leftovers:
            (self.path / name).unlink(missing_ok=True)
        self._lock.close()
        if self._created and not keep_logs:
            with contextlib.suppress(OSError):  # something else is in it: it is not ours
                self.path.rmdir()


def _fresh() -> Path:
    try:
        state = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    except RuntimeError:  # a container's user without a home
        return Path(tempfile.mkdtemp(prefix="kvrelay-"))
    path = Path(state, "kvrelay", f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}").absolute()
    if len(str(path)) > LONGEST_RUN_DIR:
        return Path(tempfile.mkdtemp(prefix="kvrelay-"))
    return path
