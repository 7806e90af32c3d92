"""A pool in the engine's own process group: its host memory serves the decode engines, without a pool to run beside.

The scheduler's process starts it as a child, so that neither waits for the other's interpreter lock, and starts it
again when it ends. It cannot outlive the engine: the kernel kills it with the thread that started it, however the
engine went. Run as a program (``python -m kvrelay.connector.embedded PARENT ARGUMENT...``) this module is that child.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

from kvrelay.connector.core.backoff import Backoff
from kvrelay.errors import ConfigError
from kvrelay.launch import kernel
from kvrelay.transport.address import parse_address

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvrelay.connector.config import ConnectorConfig

log = logging.getLogger(__name__)

START_S = 60.0
"""For the first start: an interpreter, and memory to touch."""
END_S = 3.0
"""From SIGTERM to SIGKILL: what it holds is worthless without the engine."""


def serve_arguments(config: ConnectorConfig) -> list[str]:
    """For ``kvrelay pool serve``: where the engine's own configuration says the pool is."""
    address = parse_address(config.pool)
    listen, unix = (config.embedded_listen or "none", address.path) if address.is_unix else (config.pool[4:], "")
    argv = ["--listen", listen, "--size", str(config.embedded_pool)]
    if unix:
        argv += ["--unix", unix]
    return [*argv, "--token-file", config.token_file] if config.token_file else argv


class EmbeddedPool:
    """Keeps one pool running. `start` and `close` are for the engine's thread; the rest happens on its own."""

    def __init__(self, arguments: Sequence[str]) -> None:
        """``arguments``: for ``kvrelay pool serve``."""
        self._command = [sys.executable, "-P", "-m", __name__, str(os.getpid()), *arguments]
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._closing = threading.Event()
        self._known = threading.Event()
        self._served = False
        self._thread = threading.Thread(target=self._keep, name="kvrelay embedded pool", daemon=True)

    def start(self) -> None:
        """Return when it serves.

        Raises:
            ConfigError: it ended instead.
        """
        self._thread.start()
        if not self._known.wait(START_S):
            log.warning("kvrelay: the embedded pool does not serve after %g s; going on without", START_S)
        elif not self._served:
            self.close()
            raise ConfigError(
                "the embedded pool did not start: its message is above; change embedded_pool (its size), "
                "embedded_listen or pool (where it listens)"
            )

    def close(self) -> None:
        """End it."""
        self._closing.set()
        with self._lock:
            process = self._process
        if process is not None and process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
            process.kill()
        self._thread.join(END_S)

    def _keep(self) -> None:
        """The child dies with the thread that started it, so this one starts it, and stays."""
        backoff = Backoff()
        while not self._closing.is_set():
            try:
                ended = self._run(backoff.worked)
            except OSError as error:
                ended = f"cannot be started: {error}"
            self._known.set()
            if not self._closing.is_set():
                log.error("kvrelay: the embedded pool %s: starting it again", ended)
                self._closing.wait(backoff.failed())

    def _run(self, serving: Callable[[], None]) -> str:
        """One pool, from its start to its end; how it ended."""
        with self._lock:
            if self._closing.is_set():
                return "is not wanted any more"
            process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                text=True,
                errors="replace",
                process_group=0,  # Ctrl-C is the engine's, which ends it
            )
            self._process = process
        assert process.stdout is not None
        with process.stdout as said:
            for line in said:  # the first says that it serves; their end is its end
                log.info("kvrelay: embedded pool: %s", line.rstrip())
                self._served = True
                self._known.set()
                serving()
        return f"ended with status {process.wait()}"


def main(argv: Sequence[str]) -> int:
    """Serve until the engine ends. ``argv``: the engine's process id, then arguments for ``kvrelay pool serve``."""
    from kvrelay.cli import main as command

    parent, *arguments = argv
    kernel.die_with_parent(signal.SIGKILL)
    if os.getppid() != int(parent):  # it ended before the line above
        return 1
    return command(["pool", "serve", *arguments])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
